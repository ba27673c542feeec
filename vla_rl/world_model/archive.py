"""Real episodes as the world model learns from them: features instead of images, and what each chunk led to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import torch

from vla_rl.core.kept_episodes import KeptEpisodes
from vla_rl.core.records import Array, Trajectory
from vla_rl.world_model.model import ChunkInputs, ChunkOutcomes

Rows = TypeVar("Rows", ChunkInputs, ChunkOutcomes)
_SMALLEST_STD = 1e-3  # of an input; below this it is taken for a constant
_SCALE = "mean", "std"


@dataclass(frozen=True, slots=True)
class Episode:
    """One real episode of T chunks; what ``ChunkInputs`` and ``ChunkOutcomes`` are made of, not standardized."""

    features: Array  # float32 [T, F]
    proprio: Array  # float32 [T + 1, P], the last one after the end
    elapsed: Array  # float32 [T]
    actions: Array  # float32 [T, K, A], in physical units
    event: Array  # int64 [T]
    returns: Array  # float32 [T], discounted return after each chunk
    solved: bool

    @classmethod
    def of(cls, trajectory: Trajectory, features: Array, actions: Array, discount: float) -> Self:
        """``features`` [T, F] and ``actions`` [T, K, A], in physical units, of its chunks.

        Raises ValueError for a trajectory without its final observation.
        """
        chunks, k = trajectory.num_chunks, trajectory.rewards.shape[1]
        if len(trajectory.proprio) == chunks:
            raise ValueError(f"episode {trajectory.episode.id} has no final observation to learn from")
        event = np.full(chunks, 2 * k)
        if trajectory.terminated:
            event[-1] = trajectory.num_steps[-1] - 1 + (0 if trajectory.success else k)
        to_go = np.arange(chunks - 2, -2, -1)  # chunks between the end of this one and the start of the last
        returns = np.where(to_go < 0, 0.0, trajectory.success * discount ** np.maximum(to_go, 0))
        return cls(
            features=features,
            proprio=trajectory.proprio,
            elapsed=trajectory.elapsed[:chunks],
            actions=actions,
            event=event,
            returns=returns.astype(np.float32),
            solved=trajectory.success,
        )


@dataclass(frozen=True, slots=True)
class Scale:
    """Mean and standard deviation that standardize an input; fixed as soon as the model begins to learn."""

    mean: Array
    std: Array

    @classmethod
    def of(cls, samples: Array, *, shared: bool) -> Self:
        """``shared``: one deviation, the root mean square, for all dimensions, which have one unit. Those that hardly
        vary then stay small, so that their noise is not taken for a signal."""
        std = samples.std(axis=0)
        std = np.full_like(std, np.sqrt(np.square(std).mean())) if shared else std
        return cls(samples.mean(axis=0), np.where(std < _SMALLEST_STD, 1.0, std).astype(np.float32))

    def __call__(self, x: Array) -> Array:
        return ((x - self.mean) / self.std).astype(np.float32)

    def undo(self, x: Array) -> Array:
        """In the input's own units again."""
        return (x * self.std + self.mean).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Scales:
    """Of all inputs."""

    features: Scale
    proprio: Scale
    actions: Scale

    def inputs(self, features: Array, proprio: Array, elapsed: Array, actions: Array) -> ChunkInputs:
        """Tensors of n chunks."""
        arrays = (self.features(features), self.proprio(proprio), elapsed.astype(np.float32), self.actions(actions))
        return ChunkInputs(*map(torch.from_numpy, arrays))


class Archive:
    """The last real episodes, flattened into rows when they are sampled from."""

    def __init__(self, capacity: int) -> None:
        self._kept = KeptEpisodes(Episode, capacity)
        self._rows: tuple[ChunkInputs, ChunkOutcomes] | None = None
        self.scales: Scales | None = None  # set by ``freeze_scales``

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_added(self) -> int:
        """Episodes, including those that have left."""
        return len(self._kept) + self._kept.forgotten

    @property
    def num_chunks(self) -> int:
        return int(self._kept.lengths("event").sum())

    @property
    def chunk_size(self) -> int:
        """K of what is here."""
        return int(self._kept.episodes[0].actions.shape[1])

    def add(self, episodes: Sequence[Episode]) -> None:
        """The oldest ones leave when there are too many. Costs a copy of the rows, and no further computation."""
        before = [*self._kept.episodes, *episodes]
        leaving = sum(len(episode.event) for episode in before[: self._kept.add(episodes)])
        if self._rows is not None and episodes:
            inputs, outcomes = self._flatten(episodes)
            self._rows = _joined(self._rows[0], inputs, leaving), _joined(self._rows[1], outcomes, leaving)

    def freeze_scales(self) -> Scales:
        """Standardize from now on by the statistics of what is here. Raises ValueError if that is nothing."""
        if not len(self):
            raise ValueError("an empty archive has no statistics")
        actions = self._kept.column("actions")
        self.scales = Scales(
            features=Scale.of(self._kept.column("features"), shared=True),
            proprio=Scale.of(self._kept.column("proprio"), shared=False),
            actions=Scale.of(actions.reshape(-1, actions.shape[-1]), shared=True),
        )
        self._rows = None
        return self.scales

    def sample(self, shape: tuple[int, int], generator: torch.Generator) -> tuple[ChunkInputs, ChunkOutcomes]:
        """Rows drawn with replacement, of the shape (members, n). Call ``freeze_scales`` first."""
        inputs, outcomes = self._rows = self._rows or self._flatten(self._kept.episodes)
        rows = torch.randint(len(outcomes.event), shape, generator=generator)
        return _take(inputs, rows), _take(outcomes, rows)

    def _flatten(self, episodes: Sequence[Episode]) -> tuple[ChunkInputs, ChunkOutcomes]:
        if self.scales is None:
            raise RuntimeError("call freeze_scales before sampling")
        scale = self.scales.proprio
        inputs = self.scales.inputs(
            np.concatenate([e.features for e in episodes]),
            np.concatenate([e.proprio[:-1] for e in episodes]),
            np.concatenate([e.elapsed for e in episodes]),
            np.concatenate([e.actions for e in episodes]),
        )
        lengths = [len(e.event) for e in episodes]
        outcomes = ChunkOutcomes(
            event=torch.from_numpy(np.concatenate([e.event for e in episodes])),
            returns=torch.from_numpy(np.concatenate([e.returns for e in episodes])),
            next_proprio=torch.from_numpy(scale(np.concatenate([e.proprio[1:] for e in episodes]))),
            goal=torch.from_numpy(scale(np.repeat([e.proprio[-1] for e in episodes], lengths, axis=0))),
            solved=torch.from_numpy(np.repeat([e.solved for e in episodes], lengths)),
        )
        return inputs, outcomes

    def save(self, path: Path) -> None:
        """Write everything to an ``.npz`` file."""
        scales = {f.name: getattr(self.scales, f.name) for f in fields(Scales)} if self.scales is not None else {}
        self._kept.save(path, **{f"{n}.{part}": getattr(x, part) for n, x in scales.items() for part in _SCALE})

    def load(self, path: Path) -> None:
        """Continue from ``save``. Raises UserError if the file is missing or damaged."""
        found = self._kept.load(path)
        if found:
            parts = {f.name: [found[f"{f.name}.{part}"] for part in _SCALE] for f in fields(Scales)}
            self.scales = Scales(**{name: Scale(*arrays) for name, arrays in parts.items()})
        self._rows = None


def _joined(rows: Rows, more: Rows, leaving: int) -> Rows:
    """``rows``, then ``more``, without the first ``leaving`` ones."""
    parts = {f.name: torch.cat([getattr(rows, f.name), getattr(more, f.name)])[leaving:] for f in fields(rows)}
    return type(rows)(**parts)


def _take(rows: Rows, index: torch.Tensor) -> Rows:
    return type(rows)(**{f.name: getattr(rows, f.name)[index] for f in fields(rows)})
