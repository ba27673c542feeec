"""The value head learns from old episodes, too: many small steps on features that are kept (``algo.value_memory``).

    features of new episodes ──▶ [ the newest N episodes ] ──▶ λ-returns under the head as it is ──▶ Adam on the head

An update makes few steps on one super-batch, and a head that sees no more explains little. Features are computed
anyway, and a head of two layers costs nothing beside a trunk. Kept features are those of the trunk as it was then: it
moves slowly, and N bounds their age.

The first rank keeps them and trains a float32 copy of the head; the learner brings it to all ranks. The copy's first
layer reads standardized features. That changes which way its steps go, and no value.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from algos.actor_critic import ClippedValue
from algos.advantages import chunk_rewards, explained_variance
from vla_rl.core.kept_episodes import KeptEpisodes
from vla_rl.core.records import Array, SuperBatch
from vla_rl.core.tensor_files import load_tensors, moments_of, save_tensors, set_moments
from vla_rl.policies.base.value_head import ValueHead

_EPISODES, _MOMENTS = "value_memory.npz", "value_memory_adam.safetensors"
_STREAM = 7  # separates its draws from those of minibatches
_AT_ONCE = 64  # episodes whose values are computed in one pass
FIGURES = "value_memory_episodes", "value_memory_loss", "value_memory_explained"  # of ``train``
_NARROWEST = 0.1  # least deviation of a feature, as a share of their root mean square: what hardly moves may move later


@dataclass(frozen=True, slots=True)
class ValueEpisode:
    """An episode of n chunks; n + 1 states if it ends with the value of its final observation, else n."""

    features: Array  # float32 [n or n + 1, F]
    elapsed: Array  # float32 [n or n + 1]
    rewards: Array  # float64 [n]

    @property
    def continues(self) -> bool:
        """Whether its end has a value."""
        return len(self.features) > len(self.rewards)


class ValueMemory:
    """The newest episodes, and an optimizer of the value head."""

    def __init__(self, algorithm: ClippedValue, head: ValueHead, seed: int, device: torch.device) -> None:
        """``head``: a copy of the policy's, which is trained here."""
        c = algorithm.config
        self.head = head.to(device, torch.float32).requires_grad_()
        self._algorithm, self._seed, self._device = algorithm, seed, device
        self._adam = torch.optim.Adam(self.head.parameters(), lr=c.value_memory_lr)
        self._kept = KeptEpisodes(ValueEpisode, c.value_memory)

    def observe(self, batch: SuperBatch, features: Array, final_features: Array | None, *, reads_time: bool) -> None:
        """Keep the new episodes of a super-batch.

        Args:
            features: [M, F], of all chunks.
            final_features: [B, F], of the final observations; None if no episode has one.
            reads_time: whether the head reads the elapsed time; else that is 0.
        """
        rewards = chunk_rewards(batch.rewards, batch.num_steps)
        continues = self._algorithm.bootstrap_mask(batch) & (batch.final_obs_row >= 0)
        for b in range(batch.new_episodes):
            rows = slice(batch.offsets[b], batch.offsets[b + 1])
            seen, state = batch.obs_row[rows], features[rows].copy()
            if continues[b] and final_features is not None:
                seen = np.append(seen, batch.final_obs_row[b])
                state = np.concatenate([state, final_features[b : b + 1]])
            elapsed = batch.elapsed[seen] * np.float32(reads_time)
            self._kept.add([ValueEpisode(state, elapsed, rewards[rows])])

    def train(self, policy_version: int) -> dict[str, float]:
        """The steps that follow an update: ``head`` has the policy's weights before, and new ones after. Metrics.

        Steps whose loss is not finite are left out. Without an episode there are none.
        """
        if not len(self._kept):
            return {}
        c, first = self._algorithm.config, np.cumsum([0, *self._kept.lengths("rewards")])
        returns, losses = self.returns(), []
        mean, deviation = self._scale()
        self._read(mean, deviation)
        for step in range(c.value_steps):
            rng = np.random.default_rng((self._seed, policy_version, step, _STREAM))
            rows = rng.integers(first[-1], size=c.value_batch)
            state, elapsed = self._states(rows, np.searchsorted(first, rows, side="right") - 1, first)
            values = self.head((state - mean) / deviation, elapsed)
            loss = self._algorithm.memory_loss(values, self._tensor(returns[rows].astype(np.float32)))
            losses.append(loss.item())
            if np.isfinite(losses[-1]):  # a step would spoil the weights
                self._adam.zero_grad()
                loss.backward()
                self._adam.step()
        self._read(-mean / deviation, 1 / deviation)
        after = np.concatenate([values[: len(e.rewards)] for e, values in self._values()])
        explained = explained_variance(returns, after)
        found = float(len(self._kept)), float(np.mean(losses)), explained
        return {name: value for name, value in zip(FIGURES, found, strict=True) if value is not None}

    def returns(self) -> Array:
        """float64 [chunks]: λ-returns of all episodes under the head as it is, one episode after the other."""
        known = list(self._values())
        return self._algorithm.lambda_returns(
            np.concatenate([e.rewards for e, _ in known]),
            np.concatenate([values[: len(e.rewards)] for e, values in known]),
            np.cumsum([0, *(len(e.rewards) for e, _ in known)]),
            np.array([values[-1] for _, values in known]),
            np.array([e.continues for e, _ in known]),
        )

    @torch.no_grad()
    def _values(self) -> Iterator[tuple[ValueEpisode, Array]]:
        """Each episode and the values of its states."""
        episodes = self._kept.episodes
        for start in range(0, len(episodes), _AT_ONCE):
            part = episodes[start : start + _AT_ONCE]
            state, elapsed = (np.concatenate([getattr(e, x) for e in part]) for x in ("features", "elapsed"))
            values = self.head(self._tensor(state), self._tensor(elapsed)).cpu().numpy()
            yield from zip(part, np.split(values, np.cumsum([len(e.features) for e in part])[:-1]), strict=True)

    def _scale(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the features, float32 [F]."""
        episodes, count = self._kept.episodes, self._kept.lengths("features").sum()
        mean = np.sum([e.features.sum(axis=0, dtype=np.float64) for e in episodes], axis=0) / count
        variance = np.sum([np.square(e.features - mean).sum(axis=0) for e in episodes], axis=0) / count
        least = max(_NARROWEST * float(np.sqrt(variance.mean())), float(np.finfo(np.float32).tiny))
        deviation = np.maximum(np.sqrt(variance), least)
        return self._tensor(mean.astype(np.float32)), self._tensor(deviation.astype(np.float32))

    @torch.no_grad()
    def _read(self, mean: Tensor, deviation: Tensor) -> None:
        """From here on the head reads ``(features - mean) / deviation``: its first layer changes, its values do not."""
        reads = self.head[0]
        assert isinstance(reads, nn.Linear)
        reads.bias.add_(reads.weight @ mean)
        reads.weight.mul_(deviation)

    def _states(self, rows: Array, episode: Array, first: Array) -> tuple[Tensor, Tensor]:
        """Features [n, F] and elapsed times [n] of these chunks of the memory, of these episodes."""
        picked = [(self._kept.episodes[e], row - first[e]) for e, row in zip(episode, rows, strict=True)]
        elapsed = np.array([e.elapsed[row] for e, row in picked], np.float32)
        return self._tensor(np.stack([e.features[row] for e, row in picked])), self._tensor(elapsed)

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def save(self, folder: Path) -> None:
        """Episodes and moments; the head's weights are the policy's."""
        self._kept.save(folder / _EPISODES)
        save_tensors(moments_of(self._adam), folder / _MOMENTS)

    def load(self, folder: Path) -> None:
        """Continue from ``save``; without its files, as new. Raises UserError if they are damaged."""
        if not (folder / _EPISODES).is_file():
            return
        self._kept.load(folder / _EPISODES)
        set_moments(self._adam, load_tensors(folder / _MOMENTS, self._device))
