"""Group-relative policy optimization (arXiv:2402.03300) on action chunks, with the settings that turn it into its kin.

A return is compared with those of the other episodes from the same start; there is no value function.
"""

from __future__ import annotations

import numpy as np

from algos.advantages import episode_returns, group_advantages
from algos.surrogate import SurrogateAlgorithm
from vla_rl.config import GRPOConfig
from vla_rl.types import Array, SuperBatch


class GRPO(SurrogateAlgorithm):
    """Every chunk of an episode has the episode's advantage."""

    config: GRPOConfig

    def estimate(self, batch: SuperBatch, proximal: Array, values: Array) -> tuple[Array, Array]:
        returns = episode_returns(batch.rewards, batch.num_steps, batch.offsets)
        advantages = group_advantages(returns, batch.group, baseline=self.config.baseline, scale=self.config.scale)
        # The surrogate scales with the advantage, so an episode's weight in the average can be a part of it.
        per_chunk = np.repeat(advantages * self._weights(batch), np.diff(batch.offsets))
        return per_chunk, np.zeros(batch.num_chunks)

    def _weights(self, batch: SuperBatch) -> Array:
        """float64 [B]: how much each of an episode's elements counts, where 1 is the mean over all elements."""
        level, dim = self.config.ratio_level, batch.tokens.shape[2]
        elements = np.array(
            [
                self.counts(batch.num_steps[first:last]).elements(level, dim)
                for first, last in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
            ]
        )
        match self.config.average:
            case "elements":
                return np.ones(len(elements))
            case "episodes":
                return elements.mean() / elements
            case "constant":
                return np.full(len(elements), elements.mean() / elements.max())
