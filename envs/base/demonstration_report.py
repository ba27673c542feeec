"""What looks wrong with demonstrations, compared with the simulator that they are for."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from envs.base.demonstration_records import Demonstrations
from envs.base.demonstration_replay import Simulated
from envs.base.image_conventions import AS_IT_IS, IMAGE_CONVENTIONS
from envs.base.vector_env import resized
from vla_rl.core.records import EnvSpec

_SMALL, _FRAMES = 8, 300  # pixels: details do not matter; how many frames are compared
_MARGIN, _CLEAR = 0.06, 0.5  # of two correlations together
_LITTLE = 0.05  # of a range
_FAR = 0.5  # of a range
_AHEAD = 0.05  # by how much an action must explain the step before it better than its own
_MOST = 0.9  # of the episodes
_MOVES = 0.05  # of a range
_ALIKE, _OPPOSITE, _TIMES = 0.8, -0.8, 2.0  # correlations of two motions; how many times as far
_LEAST_REPLAYS = 2


class Finding(NamedTuple):
    """Something that looks wrong."""

    text: str  # with the remedy
    certain: bool = False  # a contradiction, not a doubt


def findings(demos: Demonstrations, spec: EnvSpec, simulated: Simulated) -> list[Finding]:
    """Everything that looks wrong, the certain first."""
    first = demos.offsets[:-1]
    found = [
        *_images(demos, simulated),
        *_motion(demos, simulated),
        *_beginnings(demos.proprio[first], np.ptp(demos.proprio, axis=0), simulated.proprio),
        *_units(demos.actions, spec),
        *_grippers(demos.actions[first], spec, simulated.expert),
        *_rates(demos.rates, spec),
        *_shift(demos),
    ]
    return sorted(found, key=lambda finding: not finding.certain)


def _images(demos: Demonstrations, simulated: Simulated) -> Iterator[Finding]:
    """The mean first frame, and what differs from the mean where the state is alike, under each convention."""
    rows = np.unique(np.linspace(0, len(demos.images) - 1, _FRAMES).astype(int))
    looks = np.concatenate([simulated.images, *(replay.images for replay in simulated.replays)])
    states = np.concatenate([simulated.proprio, *(replay.proprio for replay in simulated.replays)])
    size = np.maximum(np.ptp(demos.proprio, axis=0), 1e-6)
    nearest = [int((((states - state) / size) ** 2).sum(axis=1).argmin()) for state in demos.proprio[rows]]
    for view in range(looks.shape[1]):
        beginning, first = _small(simulated.images[:, view]), demos.images[demos.offsets[:-1], view]
        ours, like = _differences(_small(looks[:, view]))[nearest], {}
        for name, turn in IMAGE_CONVENTIONS.items():
            means = (images.mean(axis=0) for images in (_small(turn(first)), beginning))
            like[name] = _correlation(*(mean - mean.mean() for mean in means))
            if demos.proprio.shape[1]:
                like[name] += _correlation(ours, _differences(_small(turn(demos.images[rows, view]))))
        best = max(like, key=lambda name: like[name])
        gain = like[best] - like[AS_IT_IS]
        if gain > _MARGIN:
            remedy = "set demos.rotated the other way" if best.startswith("rotated") else "convert the data"
            text = (
                f"view {view}: images are {best} (undone, they correlate with the simulator's own by {gain / 2:.2f} "
                f"more): {remedy}"
            )
            yield Finding(text, certain=gain > _CLEAR)


def _small(images: np.ndarray) -> np.ndarray:
    return resized(np.ascontiguousarray(images), _SMALL).astype(np.float64)


def _differences(values: np.ndarray) -> np.ndarray:
    """Of [m, ...], from the mean."""
    return values - values.mean(axis=0)


def _changes(values: np.ndarray) -> np.ndarray:
    """Of [m, ...], since the first."""
    return values - values[:1]


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-9))


def _motion(demos: Demonstrations, simulated: Simulated) -> Iterator[Finding]:
    """How each number of the state changes when the recorded actions are played, against the recorded change.

    All replays have to say the same: they do not begin just where the demonstrations do.
    """
    least = _MOVES * np.ptp(demos.proprio, axis=0)
    pairs = [
        (_changes(replay.proprio.astype(np.float64)), _changes(demos.proprio[replay.rows].astype(np.float64)))
        for replay in simulated.replays
    ]
    for i in range(demos.proprio.shape[1]):
        moved = [(ours[:, i], theirs[:, i]) for ours, theirs in pairs if np.ptp(theirs[:, i]) > least[i]]
        if len(moved) < _LEAST_REPLAYS:
            continue
        like = [_correlation(*pair) for pair in moved]
        far = [np.linalg.norm(ours) / np.linalg.norm(theirs) for ours, theirs in moved]
        if max(like) < _OPPOSITE:
            yield Finding(
                f"state {i} moves the other way when the recorded actions are played (correlation {max(like):.2f}): a "
                "number of the actions or of the state has another sign; of a gripper, turn "
                "demos.gripper=[OPEN,CLOSED] around"
            )
        elif min(like) > _ALIKE and (min(far) > _TIMES or max(far) < 1 / _TIMES):
            yield Finding(
                f"state {i} moves {np.mean(far):.2g} times as far as recorded when the recorded actions are played: "
                "the actions or the states have another unit"
            )


def _beginnings(first: np.ndarray, size: np.ndarray, ours: np.ndarray) -> Iterator[Finding]:
    low, high = ours.min(axis=0), ours.max(axis=0)
    gap = np.maximum(low - first, first - high) / np.maximum(size, 1e-6)
    for i in np.flatnonzero((gap > _FAR).mean(axis=0) > _MOST):
        yield Finding(
            f"state {i} begins between {first[:, i].min():.3g} and {first[:, i].max():.3g}, in the simulator between "
            f"{low[i]:.3g} and {high[i]:.3g}: it may mean something else there"
        )


def _units(actions: np.ndarray, spec: EnvSpec) -> Iterator[Finding]:
    low, high = spec.actions.low, spec.actions.high
    reach = np.abs(actions - (low + high) / 2).max(axis=0) / ((high - low) / 2)
    for dim, share in zip(spec.actions.dims, reach, strict=True):
        if dim.gripper is None and 0 < share < _LITTLE:
            yield Finding(
                f"{dim.name} uses {share:.1%} of its range, {dim.low:g} to {dim.high:g}: the data may have another "
                "unit, such as metres instead of shares of the largest step"
            )


def _grippers(first: np.ndarray, spec: EnvSpec, expert: np.ndarray) -> Iterator[Finding]:
    """The scripted expert of the simulator opens, or closes, in the same situation."""
    for i in spec.actions.grippers if len(expert) else ():
        gripper = spec.actions.dims[i].gripper
        assert gripper is not None
        middle, up = (gripper.open + gripper.closed) / 2, gripper.open > gripper.closed
        opens = [float(((actions[:, i] > middle) == up).mean()) for actions in (first, expert)]
        if min(opens) < 1 - _MOST and max(opens) > _MOST:
            yield Finding(
                f"{spec.actions.names[i]}: at the beginning, {opens[0]:.0%} of the demonstrations open it, and "
                f"{opens[1]:.0%} of the scripted expert's episodes: its sign may be wrong, turn "
                "demos.gripper=[OPEN,CLOSED] around"
            )


def _rates(rates: Sequence[float], spec: EnvSpec) -> Iterator[Finding]:
    for rate in rates:
        if rate != spec.fps:
            yield Finding(
                f"the data have {rate:g} frames a second, the simulator {spec.fps} control steps: an action may stand "
                "for another length of time; resample the data, unless the number was never set"
            )


def _shift(demos: Demonstrations) -> Iterator[Finding]:
    """No action can move the robot before it is taken: a better match there says that steps do not belong together."""
    rows = [slice(a, b) for a, b in zip(demos.offsets[:-1], demos.offsets[1:], strict=True) if b - a > 3]
    if not demos.proprio.shape[1] or not rows:
        return
    moved = [np.diff(demos.proprio[row], axis=0)[:-1] for row in rows]  # from step t to t + 1
    own, before = (
        _explained(
            np.concatenate([demos.actions[row][lag : len(m) + lag] for row, m in zip(rows, moved, strict=True)]),
            np.concatenate(moved),
        )
        for lag in (0, 1)
    )
    if before > own + _AHEAD:
        yield Finding(
            f"actions explain {own:.0%} of the motion of their own step and {before:.0%} of the one before: each "
            "observation seems to be stored after its action; shift the actions by one step"
        )


def _explained(actions: np.ndarray, moved: np.ndarray) -> float:
    """The share of the variance of ``moved`` [n, P] that a linear function of ``actions`` [n, A] explains."""
    a, m = np.c_[actions, np.ones(len(actions))].astype(np.float64), moved - moved.mean(axis=0)
    m = m[:, m.std(axis=0) > 1e-9]
    if not m.size:
        return 0.0
    m = m / m.std(axis=0)
    rest = m - a @ np.linalg.lstsq(a, m, rcond=None)[0]
    return float(1 - rest.var() / m.var())
