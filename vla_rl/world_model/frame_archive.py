"""The newest real episodes as frames: what the frame model learns from, and what it takes pixels from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch

from vla_rl.core.kept_episodes import KeptEpisodes
from vla_rl.core.records import Array, Trajectory
from vla_rl.world_model.frames import FrameInputs

_OTHER_TASK = 1e6  # added to the squared distance of frames of other tasks, so that they are the last choice


@dataclass(frozen=True, slots=True)
class FrameEpisode:
    """One real episode of T chunks."""

    images: Array  # uint8 [T + 1, V, H, W, 3], the last one after the end
    proprio: Array  # float32 [T + 1, P], standardized
    task: int

    @classmethod
    def of(cls, trajectory: Trajectory, proprio: Array) -> Self:
        """``proprio``: its proprioception, standardized."""
        return cls(trajectory.images, proprio, trajectory.episode.task)


class FrameArchive:
    """The last ``capacity`` episodes."""

    def __init__(self, capacity: int) -> None:
        self._kept = KeptEpisodes(FrameEpisode, capacity)
        self._index()

    @property
    def episodes(self) -> Sequence[FrameEpisode]:
        """All that is kept, the oldest first."""
        return self._kept.episodes

    def add(self, episode: FrameEpisode) -> None:
        """The oldest one leaves when there are too many."""
        self._kept.add([episode])
        self._index()

    def _index(self) -> None:
        """Number all frames, in order of episodes and time."""
        lengths = self._kept.lengths("images").tolist()
        self._episode = np.repeat(np.arange(len(lengths)), lengths)  # [R] of each frame
        self._time = np.concatenate([np.arange(n) for n in lengths], dtype=np.int64) if lengths else np.zeros(0, int)
        self._task = np.repeat([e.task for e in self.episodes], lengths)
        self._proprio = self._kept.column("proprio") if lengths else np.zeros((0, 0), np.float32)
        self._followed = np.flatnonzero(np.diff(self._episode, append=-1) == 0)  # frames with a next one

    def sample(self, count: int, generator: torch.Generator) -> tuple[FrameInputs, torch.Tensor]:
        """``count`` chunks, with replacement, and the frames after them, uint8 [count, V, H, W, 3].

        The nearest frames are of other episodes, as they are for an episode that has just been played. Raises
        ValueError without an episode.
        """
        if not len(self._followed):
            raise ValueError("the archive of frames is empty")
        rows = self._followed[torch.randint(len(self._followed), (count,), generator=generator).numpy()]
        first = rows - self._time[rows]
        proprio, after = self._proprio[rows], self._proprio[rows + 1]
        inputs = self.inputs(
            self.images(rows), self.images(first), self._task[rows], proprio, after, excluded=self._episode[rows]
        )
        return inputs, torch.from_numpy(self.images(rows + 1))

    def inputs(
        self, current: Array, first: Array, task: Array, proprio: Array, after: Array, excluded: Array | None = None
    ) -> FrameInputs:
        """n chunks for the frame model: frames [n, V, H, W, 3], standardized proprioception [n, P] before and after.

        ``excluded``: [n], episodes of this archive whose frames are not taken.
        """
        found = self._nearest(after, task, excluded)
        arrays = (current, first, self.images(found), proprio, after, self._proprio[found])
        return FrameInputs(*(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays))

    def _nearest(self, proprio: Array, task: Array, excluded: Array | None) -> Array:
        """The frame whose proprioception is nearest, of the same task where there is one; numbers [n]."""
        squares = (
            np.square(self._proprio).sum(axis=1) - 2.0 * proprio @ self._proprio.T
        )  # but for a constant of the row
        squares += _OTHER_TASK * (self._task != task[:, None])
        if excluded is not None and len(self.episodes) > 1:
            squares[self._episode == excluded[:, None]] = np.inf
        return squares.argmin(axis=1)

    def images(self, rows: Array) -> Array:
        """Frames by number: uint8 [n, V, H, W, 3]."""
        where = zip(self._episode[rows].tolist(), self._time[rows].tolist(), strict=True)
        return np.stack([self.episodes[e].images[t] for e, t in where])

    def save(self, path: Path) -> None:
        """For a checkpoint."""
        self._kept.save(path)

    def load(self, path: Path) -> None:
        """Continue from ``save``. Raises UserError if the file is missing or damaged."""
        self._kept.load(path)
        self._index()
