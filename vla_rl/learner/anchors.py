"""Anchors: chunks that every optimizer step clones in addition to its own, so that the policy does not forget them.

They come from demonstrations, from the run's own episodes, or half from each. Which chunks a step clones depends on
the run's seed, the policy version and the step alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from vla_rl.core.kept_episodes import KeptEpisodes
from vla_rl.core.records import Array, EnvSpec, Record, SuperBatch, join_records, take_rows

if TYPE_CHECKING:
    from envs.base.config import DemosConfig
    from vla_rl.policies.base.policy import Policy

_STREAM = 3  # separates the draws from those of minibatches


@dataclass(frozen=True, slots=True)
class AnchorRows:
    """Chunks to clone; padding has ``num_steps`` 0."""

    images: Array  # uint8 [n, V, H, W, 3]
    proprio: Array  # float32 [n, P]
    task: Array  # int32 [n]
    num_steps: Array  # int32 [n]
    record: Record  # of the policy's decisions

    def __len__(self) -> int:
        return len(self.task)

    def rows(self, index: Array | slice) -> Self:
        arrays = {name: getattr(self, name)[index] for name in _ARRAYS}
        return type(self)(**arrays, record=take_rows(self.record, index))


_ARRAYS = tuple(f.name for f in fields(AnchorRows) if f.type is Array)


class Anchors:
    """Chunks from which optimizer steps draw: demonstrations, and episodes of the run."""

    def __init__(self, demonstrations: AnchorRows | None = None, *, memory: int = 0) -> None:
        """``memory``: keep that many episodes of the run, the last ones."""
        self._demonstrations = demonstrations
        self._kept, self._remembers = KeptEpisodes(AnchorRows, memory), memory > 0

    def observe(self, batch: SuperBatch, kept: Array) -> None:
        """Keep chunks (a mask, bool [M]) of episodes that no earlier super-batch held; without a memory, nothing."""
        if not self._remembers:
            return
        for b in range(batch.new_episodes):
            rows = batch.offsets[b] + np.flatnonzero(kept[batch.offsets[b] : batch.offsets[b + 1]])
            if not rows.size:
                continue
            seen = batch.obs_row[rows]
            rest = batch.task[rows].copy(), batch.num_steps[rows].copy()
            names = batch.record if self._demonstrations is None else self._demonstrations.record
            record = {name: batch.record[name][rows].copy() for name in names}
            self._kept.add([AnchorRows(batch.images[seen], batch.proprio[seen], *rest, record)])

    def draw(self, count: int, seed: int, policy_version: int, step: int) -> AnchorRows | None:
        """``count`` chunks, with replacement; None while there are none."""
        given = [] if self._demonstrations is None else [self._demonstrations]
        sources = [source for source in (given, self._kept.episodes) if source]
        if not sources:
            return None
        rng = np.random.default_rng((seed, policy_version, step, _STREAM))
        sizes = [len(part) for part in np.array_split(np.arange(count), len(sources))]
        return _joined([_drawn(source, size, rng) for source, size in zip(sources, sizes, strict=True)])

    def save(self, path: Path) -> None:
        """Write the run's own episodes to an .npz file; ``load`` reads it."""
        self._kept.save(path)

    def load(self, path: Path) -> None:
        """Continue from ``save``. Raises UserError if the file is missing or damaged."""
        self._kept.load(path)


def anchors_of_demonstrations(
    paths: Sequence[Path], conventions: "DemosConfig", spec: EnvSpec, policy: "Policy", chunk_size: int
) -> AnchorRows:
    """All chunks of demonstration files. Raises DemonstrationError if a file does not fit the simulator."""
    from envs.base.demonstrations import demonstrations_for

    demos = demonstrations_for(spec, paths, conventions)
    actions, mask = demos.chunks(chunk_size)
    steps = mask.sum(axis=1).astype(np.int32)
    record = policy.encode(actions, np.random.default_rng(0))
    return AnchorRows(demos.images, demos.proprio, demos.task, steps, record)


def _drawn(episodes: Sequence[AnchorRows], count: int, rng: np.random.Generator) -> AnchorRows:
    first = np.cumsum([0, *map(len, episodes)])
    chosen = rng.integers(first[-1], size=count)
    episode = np.searchsorted(first, chosen, side="right") - 1
    return _joined([episodes[e].rows(np.array([i - first[e]])) for e, i in zip(episode, chosen, strict=True)])


def _joined(parts: Sequence[AnchorRows]) -> AnchorRows:
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
    return AnchorRows(**arrays, record=join_records([part.record for part in parts]))
