"""A fast two-and-a-half-dimensional tabletop behind the VectorEnv protocol.

It is there for tests that something learns and for experiments with many seeds; it stands in for no benchmark.
Three families of tasks, four colors each: "reach" (stop over the named block), "push" (push the named block into the
square), "pick_place" (put the named block on the plate). Distractors are blocks of other colors; to settle on one
("reach"), to grasp one or to shift one ends the episode as a failure (terminated, reward 0). Success gives reward 1.

Actions are in units of the largest step: |dx|, |dy|, |dz| <= 1 (larger ones are clipped), rotations are ignored, the
gripper moves towards 0 = closed .. 1 = open. Physics are in ``tabletop_world``, rules in ``tabletop_tasks``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from envs.base import EnvError, VectorEnv
from envs.tabletop.config import TabletopConfig
from envs.tabletop.drawing import Scene, draw
from envs.tabletop.tasks import (
    COLORS,
    FAMILIES,
    INIT_STATES,
    TARGET_COLORS,
    expert,
    judge,
    list_tasks,
    place,
    placement_rng,
    progress,
)
from envs.tabletop.world import World, advance
from vla_rl.core.records import EnvSpec, Episode, Observation, StepResult

ACTION_DIM = 7
PROPRIO_DIM = 5  # x, y, z of the finger tips in table widths, aperture 0..1, holding 0 or 1
MIN_IMAGE_SIZE = 32  # below this a block is less than three pixels wide
FRAME_SIZE = 192  # of recorded frames


def tabletop_spec(config: TabletopConfig) -> EnvSpec:
    """The spec of ``TabletopVectorEnv(config, ...)``. Raises EnvError where the configuration makes no sense."""
    if len(set(config.tasks)) != len(config.tasks):
        raise EnvError(f"env.tasks={list(config.tasks)} names a family twice: name each at most once")
    if config.image_size < MIN_IMAGE_SIZE:
        raise EnvError(
            f"env.image_size={config.image_size} is too small to see the blocks: use {MIN_IMAGE_SIZE} or more"
        )
    return EnvSpec(
        name="tabletop",
        views=("front",),
        image_size=config.image_size,
        proprio_dim=PROPRIO_DIM if config.proprio else 0,
        action_dim=ACTION_DIM,
        max_episode_steps=config.max_episode_steps,
        instructions=tuple(task.instruction for task in list_tasks(config.tasks)),
        init_states=INIT_STATES,
    )


class TabletopVectorEnv(VectorEnv):
    """See the module. Placements are a pure function of (task, seed), or of (task, init_state) where one is given."""

    def __init__(self, config: TabletopConfig, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots={num_slots}: a vectorized environment needs at least one slot")
        self.spec = tabletop_spec(config)
        self.num_slots = num_slots
        self._config = config
        self._tasks = list_tasks(config.tasks)
        self._world = World.empty(num_slots, 1 + config.distractors)
        self._colors = np.zeros((num_slots, 1 + config.distractors), np.int64)  # index into COLORS
        self._family = np.zeros(num_slots, np.int64)
        self._task = np.zeros(num_slots, np.int32)
        self._steps = np.full(num_slots, -1)  # control steps since the start of the episode; -1: never reset
        self._running = np.zeros(num_slots, bool)
        self._record = np.zeros(num_slots, bool)
        self._frames: list[list[np.ndarray]] = [[] for _ in range(num_slots)]

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        for slot, episode in zip(slots, episodes, strict=True):
            self._check(episode)
            self._start(slot, episode)

    def _check(self, episode: Episode) -> None:
        if not 0 <= episode.task < len(self._tasks):
            raise EnvError(
                f"episode {episode.id} asks for task {episode.task}: env.tasks={list(self._config.tasks)} "
                f"has the tasks 0..{len(self._tasks) - 1}"
            )
        if episode.init_state is not None and not 0 <= episode.init_state < INIT_STATES:
            raise EnvError(
                f"episode {episode.id} asks for initial state {episode.init_state}: "
                f"the tabletop has the benchmark states 0..{INIT_STATES - 1}"
            )

    def _start(self, slot: int, episode: Episode) -> None:
        task = self._tasks[episode.task]
        rng = placement_rng(task, episode.seed, episode.init_state)
        distractors = self._config.distractors
        others = rng.permutation([c for c in range(len(TARGET_COLORS)) if c != task.color]).tolist()
        others.append(len(TARGET_COLORS))
        tip, blocks, goal = place(task, 1 + distractors, rng)
        world = self._world
        world.tip[slot], world.blocks[slot], world.placed[slot], world.goal[slot] = tip, blocks, blocks, goal
        world.aperture[slot] = 1.0 if FAMILIES[task.family] == "pick_place" else 0.0
        world.held[slot] = -1
        world.settled[slot] = 0
        self._colors[slot] = [task.color, *others[:distractors]]
        self._family[slot], self._task[slot] = task.family, episode.task
        self._steps[slot], self._running[slot], self._record[slot] = 0, True, episode.record
        self._frames[slot] = []

    def step(self, slots: Sequence[int], actions: np.ndarray) -> StepResult:
        """See VectorEnv. Sleeps ``latency_ms`` for every executed control step of every slot: they share one core."""
        rows = self._checked_rows(slots, actions)
        n, chunk = actions.shape[:2]
        rewards = np.zeros((n, chunk), np.float32)
        num_steps = np.zeros(n, np.int32)
        success, failure = np.zeros(n, bool), np.zeros(n, bool)
        truncated = np.zeros(n, bool)
        active = np.arange(n)
        for k in range(chunk):
            moving = rows[active]
            advance(self._world, moving, actions[active, k])
            self._steps[moving] += 1
            num_steps[active] += 1
            self._keep_frames(moving)
            success[active], failure[active] = judge(self._world, self._family, moving)
            rewards[active, k] = success[active]
            ended = success[active] | failure[active]
            truncated[active] = ~ended & (self._steps[moving] >= self.spec.max_episode_steps)
            ended |= truncated[active]
            self._running[moving[ended]] = False
            active = active[~ended]
            if not len(active):
                break
        if self._config.latency_ms > 0.0:
            time.sleep(self._config.latency_ms * 1e-3 * int(num_steps.sum()))
        return StepResult(rewards, num_steps, success | failure, truncated, success)

    def _checked_rows(self, slots: Sequence[int], actions: np.ndarray) -> np.ndarray:
        rows = np.asarray(slots, np.int64)
        if actions.ndim != 3 or actions.shape[0] != len(rows) or actions.shape[1] < 1 or actions.shape[2] != ACTION_DIM:
            raise ValueError(
                f"actions of shape {actions.shape} for {len(rows)} slots: need [{len(rows)}, K, {ACTION_DIM}]"
            )
        if len(set(rows.tolist())) != len(rows):
            raise ValueError(f"slots {rows.tolist()} name a slot twice")
        if not self._running[rows].all():
            over = rows[~self._running[rows]].tolist()
            raise ValueError(f"slots {over} run no episode: reset them before stepping them")
        if not np.isfinite(actions).all():
            raise ValueError("actions hold numbers that are not finite")
        return rows

    def _keep_frames(self, rows: np.ndarray) -> None:
        if self._record.any():
            for slot in rows[self._record[rows]].tolist():
                self._frames[slot].append(draw(self._scene(slot), FRAME_SIZE))

    def _scene(self, slot: int) -> Scene:
        world = self._world
        return Scene(
            tip=world.tip[slot],
            aperture=float(world.aperture[slot]),
            held=int(world.held[slot]),
            blocks=world.blocks[slot],
            colors=[COLORS[c] for c in self._colors[slot]],
            goal=world.goal[slot],
            family=int(self._family[slot]),
        )

    def observe(self, slots: Sequence[int], out: Observation) -> None:
        for slot in slots:
            if self._steps[slot] < 0:
                raise ValueError(f"slot {slot} runs no episode: reset it before observing it")
            out.images[slot, 0] = draw(self._scene(slot), self.spec.image_size)
            out.task[slot] = self._task[slot]
            if self.spec.proprio_dim:
                out.proprio[slot] = self._proprio(slot)

    def _proprio(self, slot: int) -> np.ndarray:
        world = self._world
        return np.array([*world.tip[slot], world.aperture[slot], world.held[slot] >= 0], np.float64)

    def frames(self, slot: int) -> list[np.ndarray]:
        """See VectorEnv: uint8 [FRAME_SIZE, FRAME_SIZE, 3], drawn at that size rather than enlarged."""
        return self._frames[slot]

    def expert_action(self, slot: int) -> np.ndarray:
        return expert(self._world, int(self._family[slot]), slot)

    def potential(self, slots: Sequence[int]) -> np.ndarray:
        return progress(self._world, self._family, np.asarray(slots, np.int64))

    def demo_state(self, slot: int) -> dict[str, np.ndarray]:
        """The current privileged state, by its path within a demonstration in LIBERO's layout.

        states: float64 [8 + 3 B]: finger tips 3, aperture, held block, goal 2, blocks 2 B, colors B, executed steps.
        robot_states: float64 [5], in full precision what obs/proprio (float32) shows to the policy: obs/ee_pos [3] and
        obs/gripper_states [2], the aperture and whether a block is held.
        """
        world, proprio = self._world, self._proprio(slot)
        parts = (
            world.tip[slot],
            [world.aperture[slot], world.held[slot]],
            world.goal[slot],
            world.blocks[slot].ravel(),
            self._colors[slot],
            [self._steps[slot]],
        )
        return {
            "states": np.concatenate([np.asarray(part, np.float64) for part in parts]),
            "robot_states": proprio,
            "obs/proprio": proprio.astype(np.float32),
            "obs/ee_pos": proprio[:3],
            "obs/gripper_states": proprio[3:],
        }

    def close(self) -> None:
        self._frames = [[] for _ in range(self.num_slots)]
