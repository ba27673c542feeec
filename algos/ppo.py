"""Proximal policy optimization on action chunks (arXiv:1707.06347), plain and decoupled (arXiv:2505.24298)."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from algos.advantages import chunk_rewards, gae, normalize
from algos.base import Algorithm, Counts, RowTargets, Targets
from algos.losses import (
    LossTerms,
    clipped_surrogate,
    clipped_value_loss,
    element_mask,
    log_ratio,
    pool,
    token_mask,
    total_loss,
    truncated_weights,
)
from algos.metrics import loss_metrics, ratio_metrics, weight_metrics
from vla_rl.config import PPOConfig
from vla_rl.types import Array, SuperBatch


class PPO(Algorithm):
    """Plain PPO clips the ratio to the policy that acted. The decoupled objective clips the ratio to the policy at the
    update's start (the proximal policy) and weighs each element by pi_proximal / pi_behaviour, so that stale data
    neither are clipped away at once nor pull the policy back to the one that acted."""

    config: PPOConfig

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.needs_recompute = config.recompute_logprobs
        self.epochs = config.epochs
        self.minibatches = config.minibatches

    def targets(self, batch: SuperBatch, logprobs: Array | None = None, values: Array | None = None) -> Targets:
        c = self.config
        proximal, old_values = self._start_of_update(batch, logprobs, values)
        check_batch(batch, proximal)
        rewards = chunk_rewards(batch.rewards, batch.num_steps)
        cut = batch.truncated if c.bootstrap == "truncated" else np.zeros_like(batch.truncated)
        advantages, returns = gae(rewards, old_values, batch.offsets, batch.final_value, cut, c.gamma, c.gae_lambda)
        if c.normalize_advantages:
            # Each chunk counts as often as the surrogate counts it: the loss at ratio 1 is then exactly 0.
            advantages = normalize(advantages, None if c.ratio_level == "chunk" else batch.num_steps)
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
        c, level = self.config, self.config.ratio_level
        check_rows(logprobs, entropy, values, rows)
        tokens = token_mask(rows.num_steps, *logprobs.shape[1:])
        mask, chunks = element_mask(tokens, level), element_mask(tokens, "chunk")

        log_ratios = log_ratio(logprobs, rows.proximal_logprobs, tokens, level)
        log_weights = weights = None
        if c.recompute_logprobs:
            log_weights = log_ratio(rows.proximal_logprobs, rows.behaviour_logprobs, tokens, level)
            weights = truncated_weights(log_weights, c.importance_cap)
        terms = LossTerms(
            policy=clipped_surrogate(log_ratios, rows.advantages, mask, c.clip_low, c.clip_high, weights),
            value=clipped_value_loss(values, rows.returns, rows.old_values, chunks, c.value_clip, c.huber_delta),
            entropy=pool(entropy, tokens, "chunk").sum(),
        )
        policy_on = iteration >= c.value_warmup
        loss = total_loss(
            terms,
            elements=counts.elements(level, logprobs.shape[2]),
            chunks=counts.chunks,
            policy_coef=1.0 if policy_on else 0.0,
            value_coef=c.value_coef,
            entropy_coef=c.entropy_coef if policy_on else 0.0,
        )
        metrics = loss_metrics(terms, mask, tokens)
        metrics |= ratio_metrics(log_ratios, mask, c.clip_low, c.clip_high, log_weights)
        if log_weights is not None:
            metrics |= weight_metrics(log_weights, mask, c.importance_cap)
        return loss, metrics

    def _start_of_update(self, batch: SuperBatch, logprobs: Array | None, values: Array | None) -> tuple[Array, Array]:
        """Log-probabilities [M, K, A] and values [M] of the proximal policy: recomputed, or as recorded."""
        if not self.needs_recompute and logprobs is None and values is None:
            return batch.logprobs, batch.values
        if self.needs_recompute and logprobs is not None and values is not None:
            return np.asarray(logprobs, np.float32), np.asarray(values, np.float32)
        raise ValueError(
            f"recompute_logprobs={self.needs_recompute}, but recomputed log-probabilities were "
            f"{'not ' if logprobs is None else ''}given and values were {'not ' if values is None else ''}given: "
            "give both to targets() where needs_recompute, else neither"
        )


def check_batch(batch: SuperBatch, logprobs: Array) -> None:
    """Raises ValueError where a super-batch contradicts itself, or ``logprobs`` [M, K, A] do not fit it."""
    chunks, size = batch.rewards.shape
    if np.any((batch.num_steps < 1) | (batch.num_steps > size)):
        raise ValueError(f"num_steps lie in {batch.num_steps.min()}..{batch.num_steps.max()}: must be 1..{size}")
    both = np.flatnonzero(batch.terminated == batch.truncated)
    if len(both):
        raise ValueError(
            f"episode {batch.episode_id[both[0]]} has terminated={batch.terminated[both[0]]} and "
            f"truncated={batch.truncated[both[0]]}: a finished episode is exactly one of the two"
        )
    for name, array in (("recorded", batch.logprobs), ("proximal", logprobs)):
        if array.shape != batch.tokens.shape:
            raise ValueError(f"{name} log-probabilities have shape {array.shape}, tokens {batch.tokens.shape}")
        bad = np.flatnonzero((~np.isfinite(array) & batch.step_mask[:, :, None]).any(axis=(1, 2)))
        if len(bad):
            raise ValueError(
                f"{name} log-probabilities of {len(bad)} of {chunks} chunks are not finite, first in row {bad[0]}: "
                "the policy that computed them has diverged, or gave an executed token no probability"
            )


def check_rows(logprobs: Tensor, entropy: Tensor, values: Tensor, rows: RowTargets) -> None:
    """Raises ValueError where a micro-batch's outputs and targets differ in shape: they would broadcast silently."""
    found = {"logprobs": logprobs, "entropy": entropy, "proximal_logprobs": rows.proximal_logprobs}
    per_chunk = {"values": values, "advantages": rows.advantages, "num_steps": rows.num_steps}
    shapes = {name: tuple(x.shape) for name, x in (found | per_chunk).items()}
    n, size, dim = rows.behaviour_logprobs.shape
    expected = dict.fromkeys(found, (n, size, dim)) | dict.fromkeys(per_chunk, (n,))
    if shapes != expected:
        wrong = ", ".join(f"{k} {v} instead of {expected[k]}" for k, v in shapes.items() if v != expected[k])
        raise ValueError(f"shapes of one micro-batch disagree: {wrong}")
