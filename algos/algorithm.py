"""What an algorithm is to the learner: targets of a super-batch, and a loss that adds up.

    collate ──▶ targets(super-batch) ──▶ Targets ──rows──▶ loss(micro-batch) ──▶ share of the step's loss
                     ▲                                        ▲
       what the weights at the update's start,         counts(optimizer step)
       and the run's first ones, say of the batch
       (only where needs_recompute, needs_reference)

An algorithm knows neither processes nor devices. ``targets`` sees the whole super-batch, so every statistic in it is
global; ``loss`` sees any subset of rows, and its results add up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from algos.advantages import chunk_log_ratios, explained_variance
from algos.checks import check_batch, check_given, check_rows
from algos.config import AlgorithmConfig
from algos.denominators import LossDenominators
from algos.losses import (
    LOG_RATIO_LIMIT,
    LossTerms,
    behaviour_weights,
    clipped_surrogate,
    element_mask,
    gaussian_surrogate,
    k3_divergence,
    log_ratio,
    pool,
    soft_surrogate,
    token_mask,
    total_loss,
)
from algos.metrics import finish_metrics, loss_metrics, ratio_metrics, weight_metrics
from algos.targets import RowTargets, Targets
from vla_rl.core.records import Array, SuperBatch


class Algorithm(ABC):
    """One algorithm's macro flow. Stateless: what changes from update to update is passed in."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.needs_recompute = config.proximal == "recomputed"
        self.needs_reference = config.kl_coef > 0
        self.epochs = config.epochs  # passes over a super-batch
        self.minibatches = config.minibatches  # optimizer steps a pass

    @abstractmethod
    def targets(
        self,
        batch: SuperBatch,
        logprobs: Array | None = None,
        values: Array | None = None,
        reference_logprobs: Array | None = None,
    ) -> Targets:
        """Targets of all M chunks of a super-batch.

        ``logprobs`` [M, K, A] and ``values`` [M] come from a forward pass of the weights that the update starts from,
        and are given exactly where ``needs_recompute``; ``reference_logprobs`` [M, K, A] from one of the weights that
        the run began with, exactly where ``needs_reference``. The values of final observations stay
        ``batch.bootstrap_value``: a caller that recomputes those too passes them with ``dataclasses.replace``.

        Raises ValueError where the batch contradicts itself or holds numbers that are not finite.
        """

    @abstractmethod
    def loss(
        self,
        logprobs: Tensor,  # [n, K, A], of the recorded tokens under the weights in training
        entropy: Tensor,  # [n, K, A], nats
        values: Tensor,  # [n]
        rows: RowTargets,
        counts: LossDenominators,  # of the whole optimizer step: all micro-batches of all ranks
        iteration: int,  # updates before this one
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """These n chunks' share of the optimizer step's loss (a scalar), and sums for ``finish_metrics`` (scalars).

        Shares *sum* to the loss: a data-parallel engine that averages gradients over its ranks, or over accumulated
        micro-batches, has to be given the share times the number it divides by.
        """

    def finish_metrics(self, sums: Mapping[str, float], targets: Targets) -> dict[str, float]:
        """Figures of an update from the metric sums of all its loss calls, on all ranks (see ``algos.metrics``).

        Adds ``explained_variance`` of the values from which the update started, where the returns differ at all.
        """
        metrics = finish_metrics(sums)
        explained = explained_variance(targets.returns, targets.old_values)
        return metrics if explained is None else metrics | {"explained_variance": explained}


class SurrogateAlgorithm(Algorithm):
    """Ratios, clipping and weights are the same for all; the settings know the advantages and the value's loss."""

    def targets(
        self,
        batch: SuperBatch,
        logprobs: Array | None = None,
        values: Array | None = None,
        reference_logprobs: Array | None = None,
    ) -> Targets:
        check_given(self.needs_recompute, "proximal", logprobs=logprobs, values=values)
        check_given(self.needs_reference, "kl_coef", reference_logprobs=reference_logprobs)
        proximal = batch.logprobs if logprobs is None else np.asarray(logprobs, np.float32)
        old_values = batch.values if values is None else np.asarray(values, np.float32)
        check_batch(batch, recorded=batch.logprobs, proximal=proximal, reference=reference_logprobs)
        advantages, returns = self.config.compute_advantages(batch, proximal, old_values)
        whole_episodes = self.config.importance_level == "episode"
        return Targets(
            advantages=advantages.astype(np.float32),
            returns=returns.astype(np.float32),
            proximal_logprobs=proximal,
            behaviour_logprobs=batch.logprobs,
            old_values=old_values,
            staleness=batch.staleness.astype(np.float32),
            episode_log_weights=episode_log_weights(batch, proximal) if whole_episodes else None,
            reference_logprobs=reference_logprobs,
            num_steps=batch.num_steps,
        )

    def loss(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        values: Tensor,
        rows: RowTargets,
        counts: LossDenominators,
        iteration: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        check_rows(logprobs, entropy, values, rows)
        tokens = token_mask(rows.num_steps, *logprobs.shape[1:])
        policy, metrics = policy_loss(c, logprobs, rows, tokens)
        value = c.value_loss(values, rows, element_mask(tokens, "chunk"))
        terms = LossTerms(
            policy, value, pool(entropy, tokens, "chunk").sum(), reference_divergence(logprobs, rows, tokens)
        )
        policy_coef, value_coef = c.coefficients(iteration)
        loss = total_loss(
            terms,
            elements=counts.elements(c.ratio_level, logprobs.shape[2]),
            chunks=counts.chunks,
            policy_coef=policy_coef,
            value_coef=value_coef,
            entropy_coef=policy_coef * c.entropy_coef,
            kl_coef=policy_coef * c.kl_coef,
        )
        return loss, metrics | loss_metrics(terms, element_mask(tokens, c.ratio_level), tokens)


def policy_loss(
    config: AlgorithmConfig, logprobs: Tensor, rows: RowTargets, tokens: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negated surrogate, summed over the elements of some rows, and sums about its ratios for the metrics.

    Plain, the ratio to the policy that acted is held near 1. The decoupled objective holds the ratio to a proximal
    policy near 1 and weighs each element by pi_proximal / pi_behaviour, so that stale data neither are clipped away at
    once nor pull the policy back to the one that acted.

    ``logprobs`` [n, K, A]; ``tokens`` bool [n, K, A], the executed ones.
    """
    c, mask = config, element_mask(tokens, config.ratio_level)
    proximal = proximal_logprobs(c, logprobs, rows)
    log_ratios = log_ratio(logprobs, proximal, tokens, c.ratio_level)
    log_weights = weights = None
    if c.proximal != "behaviour":
        log_weights = behaviour_log_weights(c, proximal, rows, tokens).expand_as(log_ratios)
        weights = behaviour_weights(log_weights, c.importance_cap, c.importance_band)
    match c.objective:
        case "clip":
            loss = clipped_surrogate(log_ratios, rows.advantages, mask, c.clip_low, c.clip_high, weights, c.dual_clip)
        case "sapo":
            loss = soft_surrogate(log_ratios, rows.advantages, mask, c.tau_positive, c.tau_negative, weights)
        case "gipo":
            loss = gaussian_surrogate(log_ratios, rows.advantages, mask, c.gipo_sigma, weights)
    metrics = ratio_metrics(log_ratios, mask, c.clip_low, c.clip_high, log_weights)
    if log_weights is not None:
        metrics |= weight_metrics(log_weights, mask, c.importance_cap, c.importance_band)
    return loss, metrics


def proximal_logprobs(config: AlgorithmConfig, logprobs: Tensor, rows: RowTargets) -> Tensor:
    """[n, K, A], without gradient: of the policy around which ratios are held.

    Interpolated, it lies between the policy that acted, ``age`` versions before the update's start, and the one in
    training, one version after it: at the fraction age / (age + 1) of the way in log-probability (as in RLinf's
    asynchronous PPO). Fresh data have the policy that acted; no forward pass is spent.
    """
    if config.proximal != "interpolated":
        return rows.proximal_logprobs
    way = (rows.staleness / (rows.staleness + 1.0))[:, None, None]
    return rows.behaviour_logprobs + way * (logprobs.detach() - rows.behaviour_logprobs)


def behaviour_log_weights(config: AlgorithmConfig, proximal: Tensor, rows: RowTargets, tokens: Tensor) -> Tensor:
    """Logarithm of pi_prox / pi_behaviour at ``importance_level``, in a shape that broadcasts to ``ratio_level``."""
    level = config.importance_level or config.ratio_level
    if level == "episode":
        assert rows.episode_log_weights is not None  # targets gives them for this level
        weights = rows.episode_log_weights.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    else:
        weights = log_ratio(proximal, rows.behaviour_logprobs, tokens, level)
    dims = {"token": 3, "action": 2, "chunk": 1}[config.ratio_level]
    return weights.reshape(*weights.shape, *(1,) * (dims - weights.dim()))


def episode_log_weights(batch: SuperBatch, proximal: Array) -> Array:
    """float32 [M]: log of pi_prox / pi_behaviour of all executed tokens of the episode that a chunk belongs to."""
    per_chunk = chunk_log_ratios(proximal, batch.logprobs, batch.num_steps)
    per_episode = np.add.reduceat(per_chunk, batch.offsets[:-1])
    return np.repeat(per_episode, np.diff(batch.offsets)).astype(np.float32)


def reference_divergence(logprobs: Tensor, rows: RowTargets, tokens: Tensor) -> Tensor:
    """Sum over executed tokens of the divergence from the reference policy; 0 where there is none."""
    if rows.reference_logprobs is None:
        return logprobs.new_zeros(())
    return k3_divergence(logprobs, rows.reference_logprobs, tokens)
