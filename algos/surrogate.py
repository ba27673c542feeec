"""What the algorithms here share: targets around the policy at the update's start, and the objective of the policy."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from algos.base import Algorithm, Counts, RowTargets, Targets
from algos.checks import check_batch, check_rows
from algos.losses import (
    LossTerms,
    behaviour_weights,
    clipped_surrogate,
    element_mask,
    log_ratio,
    pool,
    soft_surrogate,
    token_mask,
    total_loss,
)
from algos.metrics import loss_metrics, ratio_metrics, weight_metrics
from vla_rl.config import SurrogateConfig
from vla_rl.types import Array, SuperBatch


class SurrogateAlgorithm(Algorithm):
    """An estimate of the advantages, and optionally a value function, are what a derived class adds."""

    @abstractmethod
    def estimate(self, batch: SuperBatch, proximal: Array, values: Array) -> tuple[Array, Array]:
        """Advantages and returns [M] each, from log-probabilities [M, K, A] and values [M] at the update's start."""

    def value_loss(self, values: Tensor, rows: RowTargets, chunks: Tensor) -> Tensor:
        """Sum over the chunks [n] of a mask. Without a value function 0, with gradients: engines expect them."""
        return 0.0 * torch.where(chunks, values, torch.zeros_like(values)).sum()

    def coefficients(self, iteration: int) -> tuple[float, float]:
        """Of the policy's part of the loss (with the entropy's) and of the value's."""
        return 1.0, 1.0

    def targets(self, batch: SuperBatch, logprobs: Array | None = None, values: Array | None = None) -> Targets:
        proximal, old_values = start_of_update(self.config, batch, logprobs, values)
        check_batch(batch, proximal)
        advantages, returns = self.estimate(batch, proximal, old_values)
        return Targets(
            advantages=advantages.astype(np.float32),
            returns=returns.astype(np.float32),
            proximal_logprobs=proximal,
            behaviour_logprobs=batch.logprobs,
            old_values=old_values,
            num_steps=batch.num_steps,
        )

    def loss(
        self, logprobs: Tensor, entropy: Tensor, values: Tensor, rows: RowTargets, counts: Counts, iteration: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        check_rows(logprobs, entropy, values, rows)
        tokens = token_mask(rows.num_steps, *logprobs.shape[1:])
        policy, metrics = policy_loss(c, logprobs, rows, tokens)
        value = self.value_loss(values, rows, element_mask(tokens, "chunk"))
        terms = LossTerms(policy, value, entropy=pool(entropy, tokens, "chunk").sum())
        policy_coef, value_coef = self.coefficients(iteration)
        loss = total_loss(
            terms,
            elements=counts.elements(c.ratio_level, logprobs.shape[2]),
            chunks=counts.chunks,
            policy_coef=policy_coef,
            value_coef=value_coef,
            entropy_coef=policy_coef * c.entropy_coef,
        )
        return loss, metrics | loss_metrics(terms, element_mask(tokens, c.ratio_level), tokens)


def start_of_update(
    config: SurrogateConfig, batch: SuperBatch, logprobs: Array | None, values: Array | None
) -> tuple[Array, Array]:
    """Log-probabilities [M, K, A] and values [M] of the proximal policy: recomputed, or as recorded.

    Raises ValueError where recomputed ones are given and not wanted, or the other way round.
    """
    if not config.recompute_logprobs and logprobs is None and values is None:
        return batch.logprobs, batch.values
    if config.recompute_logprobs and logprobs is not None and values is not None:
        return np.asarray(logprobs, np.float32), np.asarray(values, np.float32)
    raise ValueError(
        f"recompute_logprobs={config.recompute_logprobs}, but recomputed log-probabilities were "
        f"{'not ' if logprobs is None else ''}given and values were {'not ' if values is None else ''}given: "
        "give both to targets() where needs_recompute, else neither"
    )


def policy_loss(
    config: SurrogateConfig, logprobs: Tensor, rows: RowTargets, tokens: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negated surrogate, summed over the elements of some rows, and sums about its ratios for the metrics.

    Plain, the ratio to the policy that acted is held near 1. The decoupled objective holds the ratio to the policy at
    the update's start (the proximal policy) near 1 and weighs each element by pi_proximal / pi_behaviour, so that
    stale data neither are clipped away at once nor pull the policy back to the one that acted.

    ``logprobs`` [n, K, A]; ``tokens`` bool [n, K, A], the executed ones.
    """
    c, mask = config, element_mask(tokens, config.ratio_level)
    log_ratios = log_ratio(logprobs, rows.proximal_logprobs, tokens, c.ratio_level)
    log_weights = weights = None
    if c.recompute_logprobs:
        log_weights = log_ratio(rows.proximal_logprobs, rows.behaviour_logprobs, tokens, c.ratio_level)
        weights = behaviour_weights(log_weights, c.importance_cap, c.importance_band)
    match c.objective:
        case "clip":
            loss = clipped_surrogate(log_ratios, rows.advantages, mask, c.clip_low, c.clip_high, weights, c.dual_clip)
        case "sapo":
            loss = soft_surrogate(log_ratios, rows.advantages, mask, c.tau_positive, c.tau_negative, weights)
    metrics = ratio_metrics(log_ratios, mask, c.clip_low, c.clip_high, log_weights)
    if log_weights is not None:
        metrics |= weight_metrics(log_weights, mask, c.importance_cap, c.importance_band)
    return loss, metrics
