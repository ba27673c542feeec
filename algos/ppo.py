"""Proximal policy optimization on action chunks (arXiv:1707.06347), plain and decoupled (arXiv:2505.24298)."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from algos.advantages import chunk_log_ratios, chunk_rewards, gae, normalize, vtrace
from algos.base import RowTargets
from algos.losses import clipped_value_loss
from algos.surrogate import SurrogateAlgorithm
from vla_rl.config import PPOConfig
from vla_rl.types import Array, FinalValues, SuperBatch


class PPO(SurrogateAlgorithm):
    """Advantages over a value function, by generalized estimation or V-trace."""

    config: PPOConfig

    def estimate(self, batch: SuperBatch, proximal: Array, values: Array) -> tuple[Array, Array]:
        c = self.config
        rewards = chunk_rewards(batch.rewards, batch.num_steps)
        continued = continued_by_value(batch, c.bootstrap)
        ends = batch.offsets, batch.final_value, continued, c.gamma, c.gae_lambda
        match c.estimator:
            case "gae":
                advantages, returns = gae(rewards, values, *ends)
            case "vtrace":
                weights = chunk_log_ratios(proximal, batch.logprobs, batch.num_steps)
                advantages, returns = vtrace(rewards, values, weights, *ends, cap=c.vtrace_cap)
        if c.normalize_advantages:
            # Each chunk counts as often as the surrogate counts it: the loss at ratio 1 is then exactly 0.
            advantages = normalize(advantages, None if c.ratio_level == "chunk" else batch.num_steps)
        return advantages, returns

    def value_loss(self, values: Tensor, rows: RowTargets, chunks: Tensor) -> Tensor:
        c = self.config
        return clipped_value_loss(values, rows.returns, rows.old_values, chunks, c.value_clip, c.huber_delta)

    def coefficients(self, iteration: int) -> tuple[float, float]:
        return (1.0 if iteration >= self.config.value_warmup else 0.0), self.config.value_coef


def continued_by_value(batch: SuperBatch, bootstrap: FinalValues) -> Array:
    """bool [B]: which episodes end with the value of their final observation instead of 0."""
    match bootstrap:
        case "truncated":
            return batch.truncated
        case "always":
            return np.ones_like(batch.truncated)
        case "never":
            return np.zeros_like(batch.truncated)
