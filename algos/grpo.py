"""Group-relative policy optimization (arXiv:2402.03300) on action chunks, with the settings that turn it into its kin.

A return is compared with those of the other episodes from the same start; there is no value function.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from algos.advantages import episode_returns, group_advantages
from algos.base import Algorithm, Counts, RowTargets, Targets
from algos.checks import check_batch, check_rows
from algos.losses import LossTerms, element_mask, pool, token_mask, total_loss
from algos.metrics import loss_metrics
from algos.surrogate import policy_loss, start_of_update
from vla_rl.config import GRPOConfig
from vla_rl.types import Array, SuperBatch


class GRPO(Algorithm):
    """Every chunk of an episode has the episode's advantage."""

    config: GRPOConfig

    def targets(self, batch: SuperBatch, logprobs: Array | None = None, values: Array | None = None) -> Targets:
        c = self.config
        proximal, _ = start_of_update(c, batch, logprobs, values)
        check_batch(batch, proximal)
        returns = episode_returns(batch.rewards, batch.num_steps, batch.offsets)
        advantages = group_advantages(returns, batch.group, baseline=c.baseline, scale=c.scale)
        # The surrogate scales with the advantage, so an episode's weight in the average can be a part of it.
        per_chunk = np.repeat(advantages * self._weights(batch), np.diff(batch.offsets))
        nothing = np.zeros(batch.num_chunks, np.float32)
        return Targets(
            advantages=per_chunk.astype(np.float32),
            returns=nothing,
            proximal_logprobs=proximal,
            behaviour_logprobs=batch.logprobs,
            old_values=nothing,
            num_steps=batch.num_steps,
        )

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

    def loss(
        self, logprobs: Tensor, entropy: Tensor, values: Tensor, rows: RowTargets, counts: Counts, iteration: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        check_rows(logprobs, entropy, values, rows)
        tokens = token_mask(rows.num_steps, *logprobs.shape[1:])
        policy, metrics = policy_loss(c, logprobs, rows, tokens)
        # The value head stays as it is, with gradients of zero: engines expect one for every parameter.
        nothing = 0.0 * torch.where(element_mask(tokens, "chunk"), values, torch.zeros_like(values)).sum()
        terms = LossTerms(policy, value=nothing, entropy=pool(entropy, tokens, "chunk").sum())
        loss = total_loss(
            terms,
            elements=counts.elements(c.ratio_level, logprobs.shape[2]),
            chunks=counts.chunks,
            policy_coef=1.0,
            value_coef=1.0,
            entropy_coef=c.entropy_coef,
        )
        return loss, metrics | loss_metrics(terms, element_mask(tokens, c.ratio_level), tokens)
