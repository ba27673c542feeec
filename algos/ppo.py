"""Proximal policy optimization on action chunks (arXiv:1707.06347), plain and decoupled (arXiv:2505.24298)."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from algos.advantages import chunk_log_ratios, chunk_rewards, gae, normalize, vtrace
from algos.base import Algorithm, Counts, RowTargets, Targets
from algos.checks import check_batch, check_rows
from algos.losses import LossTerms, clipped_value_loss, element_mask, pool, token_mask, total_loss
from algos.metrics import loss_metrics
from algos.surrogate import policy_loss, start_of_update
from vla_rl.config import PPOConfig
from vla_rl.types import Array, SuperBatch


class PPO(Algorithm):
    """Generalized advantages from a value head, and the clipped surrogate."""

    config: PPOConfig

    def targets(self, batch: SuperBatch, logprobs: Array | None = None, values: Array | None = None) -> Targets:
        c = self.config
        proximal, old_values = start_of_update(c, batch, logprobs, values)
        check_batch(batch, proximal)
        rewards = chunk_rewards(batch.rewards, batch.num_steps)
        cut = batch.truncated if c.bootstrap == "truncated" else np.zeros_like(batch.truncated)
        ends = batch.offsets, batch.final_value, cut, c.gamma, c.gae_lambda
        match c.estimator:
            case "gae":
                advantages, returns = gae(rewards, old_values, *ends)
            case "vtrace":
                weights = chunk_log_ratios(proximal, batch.logprobs, batch.num_steps)
                advantages, returns = vtrace(rewards, old_values, weights, *ends, cap=c.vtrace_cap)
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
        c = self.config
        check_rows(logprobs, entropy, values, rows)
        tokens = token_mask(rows.num_steps, *logprobs.shape[1:])
        chunks = element_mask(tokens, "chunk")
        policy, metrics = policy_loss(c, logprobs, rows, tokens)
        terms = LossTerms(
            policy=policy,
            value=clipped_value_loss(values, rows.returns, rows.old_values, chunks, c.value_clip, c.huber_delta),
            entropy=pool(entropy, tokens, "chunk").sum(),
        )
        policy_on = iteration >= c.value_warmup
        loss = total_loss(
            terms,
            elements=counts.elements(c.ratio_level, logprobs.shape[2]),
            chunks=counts.chunks,
            policy_coef=1.0 if policy_on else 0.0,
            value_coef=c.value_coef,
            entropy_coef=c.entropy_coef if policy_on else 0.0,
        )
        return loss, metrics | loss_metrics(terms, element_mask(tokens, c.ratio_level), tokens)
