"""The tabletop's tasks: placement, success and failure, progress, and a scripted expert."""

from dataclasses import dataclass

import numpy as np

from envs.base import EnvError
from envs.tabletop.world import BLOCK_HALF, BLOCK_HEIGHT, CONTACT, MAX_STEP, OPEN, TIP_LOW, World

FAMILIES = ("reach", "push", "pick_place")
TARGET_COLORS = ("red", "green", "blue", "yellow")
COLORS = (*TARGET_COLORS, "purple")  # purple is never a target, only the fourth distractor
INIT_STATES = 1000  # benchmark placements of each task

ZONE_HALF = 0.11  # half the side of the goal zone of "push"
PLATE_RADIUS = 0.1  # of the plate of "pick_place"
IN_ZONE = ZONE_HALF - BLOCK_HALF  # a block this close to the zone's centre, in x and in y, lies inside
ON_PLATE = 0.055  # a block this close to the plate's centre lies on it
SETTLED = 2  # control steps without motion over a block that count as having moved to it
DISTURBED = 0.04  # a distractor displaced further than this has been disturbed

_PHRASES = {
    "reach": "move to the {} block",
    "push": "push the {} block into the square",
    "pick_place": "put the {} block on the plate",
}
_SAMPLED, _BENCHMARK = 0, 1  # random streams; they are disjoint, so that no seed samples a benchmark placement
_EDGE = 0.12  # nothing is placed closer to the table's edge
_APART = 0.18  # least distance between the centres of two blocks
_CLEAR = 0.15  # least distance of a distractor from the way along which the target is pushed
_HOVER = (0.1, 0.16)  # height of the finger tips at the start
_DIAGONAL = 2.0**0.5  # of the table
_DRAWS = 128  # placements drawn at once


@dataclass(frozen=True, slots=True)
class Task:
    """One instruction."""

    family: int  # index into FAMILIES
    color: int  # of the target, index into COLORS

    @property
    def instruction(self) -> str:
        return _PHRASES[FAMILIES[self.family]].format(COLORS[self.color])


def list_tasks(families: tuple[str, ...]) -> tuple[Task, ...]:
    """All tasks of the given families, family by family and in each in the order of ``TARGET_COLORS``."""
    colors = range(len(TARGET_COLORS))
    return tuple(Task(FAMILIES.index(family), color) for family in families for color in colors)


def placement_rng(task: Task, seed: int, init_state: int | None) -> np.random.Generator:
    """The source of a placement's randomness: the benchmark state's number if one is given, else the seed."""
    stream, number = (_SAMPLED, seed) if init_state is None else (_BENCHMARK, init_state)
    return np.random.default_rng(np.random.SeedSequence(number, spawn_key=(stream, task.family, task.color)))


def place(task: Task, num_blocks: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finger tips [3], blocks [B, 2] with the target first, and goal [2] of a new episode, by rejection sampling.

    Distances are chosen so that the expert needs two to four chunks of 8: 12 to 32 control steps over 3,600 episodes.
    """
    for _ in range(1000):
        tips = rng.uniform(_EDGE, 1.0 - _EDGE, (_DRAWS, 2))
        blocks = rng.uniform(_EDGE, 1.0 - _EDGE, (_DRAWS, num_blocks, 2))
        angle, length = rng.uniform(0.0, 2.0 * np.pi, _DRAWS), rng.uniform(0.25, 0.4, _DRAWS)
        way = length[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        goals = blocks[:, 0] + way
        fits = np.flatnonzero(_fits(task.family, tips, blocks, goals))
        if len(fits):
            i = fits[0]
            return np.append(tips[i], rng.uniform(*_HOVER)), blocks[i], goals[i]
    raise EnvError(f"found no placement of {num_blocks} blocks for {task.instruction!r}: lower env.distractors")


def _fits(family: int, tips: np.ndarray, blocks: np.ndarray, goals: np.ndarray) -> np.ndarray:
    """bool [_DRAWS]: which of the drawn placements are wanted."""
    target, others = blocks[:, 0], blocks[:, 1:]
    pairs = np.linalg.norm(blocks[:, :, None] - blocks[:, None], axis=3) + 2.0 * np.eye(blocks.shape[1])
    fits = pairs.min(axis=(1, 2)) >= _APART
    if FAMILIES[family] == "reach":
        return fits & _between(0.45, np.abs(target - tips).max(axis=1), 0.76)
    fits &= ((goals >= ZONE_HALF) & (goals <= 1.0 - ZONE_HALF)).all(axis=1)
    if FAMILIES[family] == "push":
        way = (goals - target) / np.linalg.norm(goals - target, axis=1, keepdims=True)
        behind = target - 1.9 * CONTACT * way
        fits &= ((behind >= 0.05) & (behind <= 0.95)).all(axis=1)
        fits &= _between(0.2, np.abs(behind - tips).max(axis=1), 0.5)
        return fits & (_off_segment(others, behind, goals) >= _CLEAR).all(axis=1)
    fits &= _between(0.2, np.abs(target - tips).max(axis=1), 0.45)
    return fits & (np.linalg.norm(others - goals[:, None], axis=2) >= ZONE_HALF + 2 * BLOCK_HALF).all(axis=1)


def _between(low: float, value: np.ndarray, high: float) -> np.ndarray:
    return (value >= low) & (value <= high)


def _off_segment(points: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """[m, j]: how far each of the points [m, j, 2] lies from the segment from ``start`` [m, 2] to ``end`` [m, 2]."""
    span = (end - start)[:, None]
    share = ((points - start[:, None]) * span).sum(axis=2) / (span * span).sum(axis=2)
    nearest = start[:, None] + np.clip(share, 0.0, 1.0)[..., None] * span
    return np.linalg.norm(points - nearest, axis=2)


def judge(world: World, family: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(success, failure), bool [n] each and never both. ``family`` is that of every environment.

    Success: "reach": the finger tips were still over the target for ``SETTLED`` control steps, at any height.
    "push", "pick_place": the target lies inside the zone, on the plate, and is not held.
    Failure, in every family: the tips settled over a distractor ("reach"), or a distractor was grasped or displaced.
    """
    blocks, held, kind = world.blocks[rows], world.held[rows], family[rows]
    settled = world.settled[rows] >= SETTLED
    offset = np.abs(blocks[:, 0] - world.goal[rows])
    inside = (held < 0) & (offset.max(axis=1) <= IN_ZONE)
    on_plate = (held < 0) & (np.hypot(offset[:, 0], offset[:, 1]) <= ON_PLATE)
    success = np.where(kind == 0, settled[:, 0], np.where(kind == 1, inside, on_plate))
    moved = np.abs(blocks[:, 1:] - world.placed[rows, 1:])
    failure = (held > 0) | (np.hypot(moved[..., 0], moved[..., 1]) > DISTURBED).any(axis=1)
    failure |= (kind == 0) & settled[:, 1:].any(axis=1)
    return success & ~failure, failure


def progress(world: World, family: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """float32 [n], 0..1: half for the finger tips' nearness to the target, half for the target's to the goal. "reach",
    which has no goal, counts the first in full."""
    target = world.blocks[rows, 0]
    reached = 1.0 - np.linalg.norm(world.tip[rows, :2] - target, axis=1) / _DIAGONAL
    brought = 1.0 - np.linalg.norm(target - world.goal[rows], axis=1) / _DIAGONAL
    return np.where(family[rows] == 0, reached, 0.5 * reached + 0.5 * brought).astype(np.float32)


_TRAVEL = 0.12  # height at which the expert moves over blocks
_WORK = 0.03  # height below which it pushes and grasps
_ARRIVED = 0.03  # corrected while coming down


def expert(world: World, family: int, row: int) -> np.ndarray:
    """float32 [7]: the next action. A function of the state alone, so it recovers from any disturbance."""
    name = FAMILIES[family]
    policy = {"reach": _expert_reach, "push": _expert_push, "pick_place": _expert_pick_place}[name]
    move, gripper = policy(world, row)
    move = move / MAX_STEP
    action = np.zeros(7, np.float32)
    action[:3] = move / max(1.0, float(np.abs(move).max()))  # slower but in the same direction at an axis's limit
    action[6] = gripper
    return action


def _expert_reach(world: World, row: int) -> tuple[np.ndarray, float]:
    move = np.append(world.blocks[row, 0] - world.tip[row, :2], 0.0)
    return move, 0.0


def _expert_push(world: World, row: int) -> tuple[np.ndarray, float]:
    """Come down behind the target, seen from the goal, and push; from anywhere else rise and go there first."""
    tip, block = world.tip[row], world.blocks[row, 0]
    to_goal = world.goal[row] - block
    remaining = float(np.hypot(*to_goal))
    way = to_goal / max(remaining, 1e-9)
    reach = tip[:2] - block
    depth = float(reach @ way)
    aside = reach - depth * way
    behind = block - 1.5 * CONTACT * way
    if tip[2] < BLOCK_HEIGHT and -2.0 * CONTACT < depth < -0.5 * CONTACT and np.hypot(*aside) < 0.4 * CONTACT:
        forward = min(MAX_STEP, remaining + max(-depth - CONTACT, 0.0))
        return np.append(forward * way - aside, min(_WORK - tip[2], 0.0)), 0.0
    return _hover_then_lower(tip, behind), 0.0


def _expert_pick_place(world: World, row: int) -> tuple[np.ndarray, float]:
    tip, target, goal = world.tip[row], world.blocks[row, 0], world.goal[row]
    if world.held[row] == 0:
        move = _hover_then_lower(tip, goal)
        low_enough = tip[2] <= BLOCK_HEIGHT and np.hypot(*(goal - tip[:2])) < _ARRIVED
        return (np.zeros(3), 1.0) if low_enough else (move, 0.0)
    near = np.hypot(*(target - tip[:2])) < _ARRIVED
    if near and tip[2] <= _WORK and world.aperture[row] > OPEN:
        return np.zeros(3), 0.0
    if world.aperture[row] <= OPEN:  # closed on nothing
        return np.array([0.0, 0.0, _TRAVEL - tip[2]]), 1.0
    return _hover_then_lower(tip, target), 1.0


def _hover_then_lower(tip: np.ndarray, place_xy: np.ndarray) -> np.ndarray:
    """The motion towards a place: rise clear of the blocks, go over the place, come down on it."""
    across = place_xy - tip[:2]
    if np.hypot(*across) < _ARRIVED:
        return np.append(across, TIP_LOW[2] - tip[2])
    if tip[2] < BLOCK_HEIGHT:
        return np.array([0.0, 0.0, _TRAVEL - tip[2]])
    return np.append(across, _TRAVEL - tip[2])
