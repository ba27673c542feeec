"""Real episodes as the world model learns from them: features instead of images, and what each chunk led to."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch

from vla_rl.core.records import Array, Trajectory
from vla_rl.world_model.model import ChunkInputs, ChunkOutcomes

Rows = TypeVar("Rows", ChunkInputs, ChunkOutcomes)
_SMALLEST_STD = 1e-3  # of an input; below this it is taken for a constant


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
        self._episodes: deque[Episode] = deque(maxlen=capacity)
        self._rows: tuple[ChunkInputs, ChunkOutcomes] | None = None
        self.scales: Scales | None = None  # set by ``freeze_scales``
        self.num_added = 0  # episodes, including those that have left

    def __len__(self) -> int:
        return len(self._episodes)

    @property
    def num_chunks(self) -> int:
        return sum(len(episode.event) for episode in self._episodes)

    @property
    def chunk_size(self) -> int:
        """K of what is here."""
        return self._episodes[0].actions.shape[1]

    def add(self, episodes: Iterable[Episode]) -> None:
        """The oldest ones leave when there are too many. Costs a copy of the rows, and no further computation."""
        for episode in episodes:
            full = len(self._episodes) == self._episodes.maxlen
            leaving = len(self._episodes[0].event) if full else 0
            self._episodes.append(episode)
            self.num_added += 1
            if self._rows is not None:
                inputs, outcomes = self._flatten([episode])
                self._rows = _joined(self._rows[0], inputs, leaving), _joined(self._rows[1], outcomes, leaving)

    def freeze_scales(self) -> Scales:
        """Standardize from now on by the statistics of what is here. Raises ValueError if that is nothing."""
        if not self._episodes:
            raise ValueError("an empty archive has no statistics")
        self.scales = Scales(
            features=Scale.of(np.concatenate([e.features for e in self._episodes]), shared=True),
            proprio=Scale.of(np.concatenate([e.proprio for e in self._episodes]), shared=False),
            actions=Scale.of(
                np.concatenate([e.actions.reshape(-1, e.actions.shape[-1]) for e in self._episodes]), shared=True
            ),
        )
        self._rows = None
        return self.scales

    def sample(self, shape: tuple[int, int], generator: torch.Generator) -> tuple[ChunkInputs, ChunkOutcomes]:
        """Rows drawn with replacement, of the shape (members, n). Call ``freeze_scales`` first."""
        inputs, outcomes = self._rows = self._rows or self._flatten(self._episodes)
        rows = torch.randint(len(outcomes.event), shape, generator=generator)
        return _take(inputs, rows), _take(outcomes, rows)

    def _flatten(self, episodes: Collection[Episode]) -> tuple[ChunkInputs, ChunkOutcomes]:
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
        arrays: dict[str, Any] = {
            "num_added": np.array(self.num_added),
            "lengths": np.array([len(e.event) for e in self._episodes]),
        }
        for field in fields(Episode):
            values = [np.atleast_1d(getattr(e, field.name)) for e in self._episodes]
            if values:
                arrays[field.name] = np.concatenate(values)
        if self.scales is not None:
            for field in fields(Scales):
                scale = getattr(self.scales, field.name)
                arrays |= {f"{field.name}.mean": scale.mean, f"{field.name}.std": scale.std}
        np.savez(path, **arrays)

    def load(self, path: Path) -> None:
        """Continue from ``save``."""
        with np.load(path) as file:
            arrays = dict(file)
        lengths = arrays["lengths"]
        ends = np.cumsum(lengths)
        for i, (length, end) in enumerate(zip(lengths.tolist(), ends.tolist(), strict=True)):
            rows, states = slice(end - length, end), slice(end - length + i, end + i + 1)
            parts = {
                f.name: arrays[f.name][states if f.name == "proprio" else rows]
                for f in fields(Episode)
                if f.name != "solved"
            }
            self._episodes.append(Episode(**parts, solved=bool(arrays["solved"][i])))
        self.num_added = int(arrays["num_added"])
        if "features.mean" in arrays:
            names = [f.name for f in fields(Scales)]
            self.scales = Scales(**{n: Scale(arrays[f"{n}.mean"], arrays[f"{n}.std"]) for n in names})
        self._rows = None


def _joined(rows: Rows, more: Rows, leaving: int) -> Rows:
    """``rows`` without the first ``leaving`` ones, then ``more``."""
    parts = {f.name: torch.cat([getattr(rows, f.name)[leaving:], getattr(more, f.name)]) for f in fields(rows)}
    return type(rows)(**parts)


def _take(rows: Rows, index: torch.Tensor) -> Rows:
    return type(rows)(**{f.name: getattr(rows, f.name)[index] for f in fields(rows)})
