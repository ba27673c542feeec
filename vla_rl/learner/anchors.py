"""Anchors: chunks that every optimizer step clones in addition to its own, so that the policy does not forget them.

They come from demonstrations, or from the run's own successful episodes. Which chunks a step clones depends on the
run's seed, the policy version and the step alone.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np

from vla_rl.core.records import Array, EnvSpec, SuperBatch
from vla_rl.policies.openvla_oft.action_codec import ActionCodec

_STREAM = 3  # separates the draws from those of minibatches


@dataclass(frozen=True, slots=True)
class AnchorRows:
    """Chunks to clone; padding has ``num_steps`` 0."""

    images: Array  # uint8 [n, V, H, W, 3]
    proprio: Array  # float32 [n, P]
    task: Array  # int32 [n]
    tokens: Array  # uint8 [n, K, A]
    num_steps: Array  # int32 [n]

    def __len__(self) -> int:
        return len(self.task)

    def rows(self, index: Array) -> Self:
        return type(self)(*(getattr(self, f.name)[index] for f in fields(self)))


class Anchors:
    """Chunks of several episodes, from which optimizer steps draw."""

    def __init__(self, episodes: Sequence[AnchorRows] = (), memory: int | None = None) -> None:
        """``memory``: keep that many episodes, the last ones; None: these ones, and no others."""
        self._episodes = deque(episodes, memory)
        self._grows = memory is not None

    @classmethod
    def of_demonstrations(cls, paths: Sequence[Path], spec: EnvSpec, codec: ActionCodec, chunk_size: int) -> Self:
        """All chunks of demonstration files. Raises DemonstrationError if a file does not fit the simulator."""
        from envs.base.demonstrations import read_demonstrations

        views, proprio = spec.views, spec.proprio_dim
        demos = read_demonstrations(
            paths, instructions=spec.instructions, views=views, image_size=spec.image_size, proprio=proprio
        )
        actions, mask = demos.chunks(chunk_size)
        steps = mask.sum(axis=1).astype(np.int32)
        return cls([AnchorRows(demos.images, demos.proprio, demos.task, codec.encode(actions), steps)])

    def observe(self, batch: SuperBatch) -> None:
        """Keep the successful episodes of a super-batch; without a memory, nothing."""
        if not self._grows:
            return
        for b in np.flatnonzero(batch.success):
            rows = slice(batch.offsets[b], batch.offsets[b + 1])
            seen = batch.obs_row[rows]
            rest = batch.task[rows], batch.tokens[rows], batch.num_steps[rows]
            self._episodes.append(AnchorRows(batch.images[seen], batch.proprio[seen], *(x.copy() for x in rest)))

    def draw(self, count: int, seed: int, policy_version: int, step: int) -> AnchorRows | None:
        """``count`` chunks, with replacement; None while there are none."""
        if not self._episodes:
            return None
        first = np.cumsum([0, *map(len, self._episodes)])
        chosen = np.random.default_rng((seed, policy_version, step, _STREAM)).integers(first[-1], size=count)
        episode = np.searchsorted(first, chosen, side="right") - 1
        picked = [self._episodes[e].rows(np.array([i - first[e]])) for e, i in zip(episode, chosen, strict=True)]
        return _joined(picked)

    def save(self, path: Path) -> None:
        """Write the memory to an .npz file; ``load`` reads it."""
        arrays = {f.name: getattr(_joined(list(self._episodes)), f.name) for f in fields(AnchorRows) if self._episodes}
        np.savez(path, lengths=np.array([len(e) for e in self._episodes], np.int64), **arrays)

    def load(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as data:
            borders = np.cumsum([0, *data["lengths"]])
            arrays = {f.name: data[f.name] for f in fields(AnchorRows) if len(borders) > 1}
        for start, end in pairwise(borders.tolist()):
            self._episodes.append(AnchorRows(**{name: array[start:end] for name, array in arrays.items()}))


def _joined(parts: Sequence[AnchorRows]) -> AnchorRows:
    return AnchorRows(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(AnchorRows)))
