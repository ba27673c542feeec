"""What looks wrong with demonstrations, compared with the simulator that they are for."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from envs.base.demonstration_records import Demonstrations
from envs.base.image_conventions import AS_IT_IS, IMAGE_CONVENTIONS
from envs.base.vector_env import EnvError, VectorEnv, empty_observation, resized
from vla_rl.core.actions import ActionSpace
from vla_rl.core.records import EpisodeSpec

_PLACEMENTS = 6  # of the simulator, whose first frames are compared
_SMALL = 24  # pixels: details do not matter
_LIKE, _MARGIN = 0.6, 0.15  # correlations
_LITTLE = 0.05  # of a range
_AHEAD = 0.05  # by how much an action must explain the step before it better than its own
_MOST = 0.9  # of the episodes


class Finding(NamedTuple):
    """Something that looks wrong."""

    text: str  # with the remedy
    certain: bool = False  # a contradiction, not a doubt


class Beginnings(NamedTuple):
    """What the simulator shows at the beginning of episodes, and what its expert does there."""

    images: np.ndarray  # uint8 [n, V, S, S, 3]
    actions: np.ndarray  # float32 [n, A]; no row without an expert

    @classmethod
    def of(cls, env: VectorEnv, tasks: Sequence[int]) -> "Beginnings":
        """Of some placements of these tasks, in environment 0."""
        images, actions = [], []
        for number in range(_PLACEMENTS):
            env.reset([0], [EpisodeSpec(number, tasks[number % len(tasks)], number)])
            seen = empty_observation(env.spec, env.num_envs)
            env.observe([0], seen)
            images.append(seen.images[0])
            try:
                actions.append(env.expert_action(0))
            except EnvError:
                continue
        return cls(np.stack(images), np.array(actions, np.float32).reshape(-1, env.spec.action_dim))


def findings(demos: Demonstrations, space: ActionSpace, begun: Beginnings) -> list[Finding]:
    """Everything that looks wrong, the certain first."""
    found = [*_images(demos, begun), *_units(demos.actions, space), *_grippers(demos, space, begun), *_shift(demos)]
    return sorted(found, key=lambda finding: not finding.certain)


def _images(demos: Demonstrations, begun: Beginnings) -> list[Finding]:
    found = []
    first = demos.images[demos.offsets[:-1]]
    for view in range(first.shape[1]):
        theirs, ours = (_mean_image(images[:, view]) for images in (first, begun.images))
        like = {name: _correlation(turn(theirs), ours) for name, turn in IMAGE_CONVENTIONS.items()}
        best = max(like, key=lambda name: like[name])
        if best != AS_IT_IS and like[best] > max(_LIKE, like[AS_IT_IS] + _MARGIN):
            remedy = "set demos.rotated the other way" if best.startswith("rotated") else "convert the data"
            text = (
                f"view {view}: images are {best}, compared with the simulator's own (correlation {like[best]:.2f}, as "
                f"they are {like[AS_IT_IS]:.2f}): {remedy}"
            )
            found.append(Finding(text, certain=like[AS_IT_IS] < _LIKE))
    return found


def _mean_image(images: np.ndarray) -> np.ndarray:
    return resized(images, _SMALL).astype(np.float64).mean(axis=0)


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.ravel() - a.mean(), b.ravel() - b.mean()
    return float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-9))


def _units(actions: np.ndarray, space: ActionSpace) -> list[Finding]:
    reach = np.abs(actions - (space.low + space.high) / 2).max(axis=0) / ((space.high - space.low) / 2)
    return [
        Finding(
            f"{dim.name} uses {share:.1%} of its range, {dim.low:g} to {dim.high:g}: the data may have another unit, such "
            "as metres instead of shares of the largest step"
        )
        for dim, share in zip(space.dims, reach, strict=True)
        if dim.gripper is None and 0 < share < _LITTLE
    ]


def _grippers(demos: Demonstrations, space: ActionSpace, begun: Beginnings) -> list[Finding]:
    """The first commands: the scripted expert of the simulator opens, or closes, in the same situation."""
    found = []
    for i in space.grippers if len(begun.actions) else ():
        dim = space.dims[i]
        assert dim.gripper is not None
        middle, up = (dim.low + dim.high) / 2, dim.gripper.open == dim.high
        opens = [
            float(((commands > middle) == up).mean())
            for commands in (demos.actions[demos.offsets[:-1], i], begun.actions[:, i])
        ]
        if min(opens) < 1 - _MOST and max(opens) > _MOST:
            text = (
                f"{dim.name}: at the beginning, {opens[0]:.0%} of the demonstrations open it, and {opens[1]:.0%} of the "
                "scripted expert's episodes: its sign may be wrong, turn demos.gripper=[OPEN,CLOSED] around"
            )
            found.append(Finding(text))
    return found


def _shift(demos: Demonstrations) -> list[Finding]:
    """No action can move the robot before it is taken: a better match there says that steps do not belong together."""
    if not demos.proprio.shape[1]:
        return []
    rows = [slice(a, b) for a, b in zip(demos.offsets[:-1], demos.offsets[1:], strict=True) if b - a > 3]
    moved = [np.diff(demos.proprio[row], axis=0)[:-1] for row in rows]  # from step t to t + 1
    explained = []
    for lag in (0, 1):
        taken = [demos.actions[row][lag : len(m) + lag] for row, m in zip(rows, moved, strict=True)]
        explained.append(_explained(np.concatenate(taken), np.concatenate(moved)) if rows else 0.0)
    if explained[1] < explained[0] + _AHEAD:
        return []
    return [
        Finding(
            f"actions explain {explained[0]:.0%} of the motion of their own step and {explained[1]:.0%} of the one before: "
            "each observation seems to be stored after its action; shift the actions by one step"
        )
    ]


def _explained(actions: np.ndarray, moved: np.ndarray) -> float:
    """The share of the variance of ``moved`` [n, P] that a linear function of ``actions`` [n, A] explains."""
    a, m = np.c_[actions, np.ones(len(actions))].astype(np.float64), moved - moved.mean(axis=0)
    m = m[:, m.std(axis=0) > 1e-9]
    if not m.size:
        return 0.0
    m = m / m.std(axis=0)
    rest = m - a @ np.linalg.lstsq(a, m, rcond=None)[0]
    return float(1 - rest.var() / m.var())
