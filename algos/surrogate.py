"""The policy's part of an update, shared by all algorithms: what the ratios start from, and the clipped objective."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from algos.base import RowTargets
from algos.losses import behaviour_weights, clipped_surrogate, element_mask, log_ratio, soft_surrogate
from algos.metrics import ratio_metrics, weight_metrics
from vla_rl.config import SurrogateConfig
from vla_rl.types import Array, SuperBatch


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
