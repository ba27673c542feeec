"""How many chunks may be imagined in a row? Judged on real episodes that the model has not learned from.

From a real state, the chunks that were really executed are imagined: after d of them there is a predicted observation
and a real one. A depth of d passes if, over the newest predictions,

* pixels that really changed since the start are nearer to the real ones than those of the frame before (copying), and
  than those predicted for other chunks (shuffled);
* the frozen policy would choose nearly the same chunk: the mean difference between its likely chunks for the predicted
  and for the real observation is at most ``most_gap`` times that between the observation before and the real one.

The horizon is one chunk more than the depths that pass in a row: the last chunk of an imagined episode is rated, and
what comes after it is not looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass

import numpy as np
import torch

from vla_rl.core.records import Array
from vla_rl.world_model.frames import changed_pixels

LEAST_PREDICTIONS = 32  # of a depth, before it can pass


@dataclass(frozen=True, slots=True)
class Prediction:
    """One predicted observation against the real one."""

    pixels: float  # that really changed
    predicted: float  # sum over these of the mean absolute difference, of 255
    copied: float  # likewise, of the frame before
    shuffled: float  # likewise, of the frame that was predicted for another chunk
    gap: float  # between the likely chunks, predicted and real: mean absolute difference, normalized actions
    copied_gap: float  # between the likely chunks before and really after

    @classmethod
    def of(cls, before: Array, after: Array, predicted: Array, shuffled: Array, chunks: Array) -> Prediction:
        """Frames uint8 [V, H, W, 3]; ``chunks`` [3, K A]: the likely ones before, after, and as predicted."""
        real = after.astype(np.float32)
        changed = changed_pixels(torch.from_numpy(before), torch.from_numpy(after)).numpy()
        errors = [float(np.abs(frame - real).mean(axis=-1)[changed].sum()) for frame in (predicted, before, shuffled)]
        gaps = [float(np.abs(chunk - chunks[1]).mean()) for chunk in (chunks[2], chunks[0])]
        return cls(float(changed.sum()), *errors, *gaps)


@dataclass(frozen=True, slots=True)
class Depth:
    """What was found of one depth; nan without predictions."""

    predictions: int
    predicted: float  # mean absolute difference of changed pixels, of 255
    copied: float
    shuffled: float
    gap: float  # share of ``copied_gap``
    passed: bool


class HorizonGate:
    """The newest ``capacity`` predictions of each depth from 1 to ``horizon`` - 1."""

    def __init__(self, horizon: int, most_gap: float, capacity: int = 256) -> None:
        self._found = [deque[Prediction](maxlen=capacity) for _ in range(horizon - 1)]
        self._most_gap = most_gap

    def add(self, depth: int, predictions: Sequence[Prediction]) -> None:
        """``depth``: chunks since the real state, from 1 on."""
        self._found[depth - 1].extend(predictions)

    def depths(self) -> list[Depth]:
        """All depths, from 1 on."""
        return [self._depth(found) for found in self._found]

    def _depth(self, found: deque[Prediction]) -> Depth:
        if not found:
            return Depth(0, np.nan, np.nan, np.nan, np.nan, False)
        pixels, predicted, copied, shuffled, gap, copied_gap = np.array([astuple(p) for p in found]).sum(axis=0)
        enough = len(found) >= LEAST_PREDICTIONS
        passed = enough and predicted < copied and predicted < shuffled and gap <= self._most_gap * copied_gap
        return Depth(
            predictions=len(found),
            predicted=_mean(predicted, pixels),
            copied=_mean(copied, pixels),
            shuffled=_mean(shuffled, pixels),
            gap=_mean(gap, copied_gap),
            passed=bool(passed),
        )

    @property
    def horizon(self) -> int:
        """Chunks that may be imagined in a row, from 1 on."""
        passed = [depth.passed for depth in self.depths()]
        return 1 + (passed.index(False) if False in passed else len(passed))

    def metrics(self) -> dict[str, float]:
        """For the run's log; figures that do not exist yet are left out."""
        values = {"horizon": float(self.horizon)}
        for number, depth in enumerate(self.depths(), start=1):
            values |= {f"depth{number}_{name}": float(value) for name, value in asdict(depth).items()}
        return {name: value for name, value in values.items() if np.isfinite(value)}

    def state(self) -> list[list[tuple[float, ...]]]:
        """JSON-able, for a checkpoint."""
        return [[astuple(p) for p in found] for found in self._found]

    def restore(self, state: Sequence[Sequence[Sequence[float]]]) -> None:
        """Continue from ``state()``; a depth that the run had not is empty."""
        for found, saved in zip(self._found, state, strict=False):
            found.extend(Prediction(*map(float, values)) for values in saved)


def _mean(total: float, count: float) -> float:
    return float(total / count) if count else float("nan")
