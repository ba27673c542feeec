"""The interface between algorithm and learner: targets of a super-batch, and a loss that adds up.

    super-batch ──▶ targets ──▶ Targets ──rows──▶ loss(micro-batch) ──▶ share of the optimizer step's loss
                       ▲                             ▲
    log-probabilities under the weights          denominators of the whole optimizer step
    at the start of the update (needs_recompute)
    and of the run (needs_reference)

An algorithm knows neither processes nor devices. ``targets`` sees the whole super-batch, so all of its statistics are
global. ``loss`` sees any subset of rows, and its results add up. Every algorithm defines ``compute_advantages`` and
``policy_loss``; what several of them share is in ``algos.policy_gradient`` and ``algos.actor_critic``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from algos.advantages import episode_returns, explained_variance, imagined_advantages, returns_differ
from algos.checks import check_batch, check_given, check_rows
from algos.config import AlgorithmConfig
from algos.targets import RowTargets, Targets
from vla_rl.core.records import Array, SuperBatch

if TYPE_CHECKING:
    from torch import Tensor

    from algos.denominators import LossDenominators


class Algorithm(ABC):
    """An algorithm and its configuration. Stateless: what changes between updates is passed in."""

    Config: ClassVar[type[AlgorithmConfig]]
    config: AlgorithmConfig
    value_coef = 1.0  # coefficient of the value loss

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.needs_recompute = config.needs_recompute  # a forward pass before the update, for ``targets``
        self.needs_reference = config.kl_coef > 0  # a forward pass of the initial policy, for ``targets``
        self.epochs = config.epochs
        self.minibatches = config.minibatches

    @abstractmethod
    def compute_advantages(
        self, batch: SuperBatch, proximal: Array, values: Array, q: Array | None = None
    ) -> tuple[Array, Array]:
        """What each chunk is trained towards.

        Args:
            batch: the super-batch.
            proximal: [M, K, A], log-probabilities under the proximal policy.
            values: [M], predictions at the start of the update; the critic's, where there is one.
            q: [M, critics], the critic's ratings of the recorded chunks; for algorithms with a critic.

        Returns advantages [M] and returns [M].
        """

    @abstractmethod
    def policy_loss(self, logprobs: Tensor, rows: RowTargets, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy's loss, summed over the elements of some rows, and sums for the metrics (``algos.metrics``).

        Args:
            logprobs: [n, K, A], log pi, under the weights in training.
            rows: targets of these n chunks.
            tokens: bool [n, K, A], the executed tokens.

        Returns scalars.
        """

    def episode_log_weights(self, batch: SuperBatch, proximal: Array) -> Array | None:
        """[M]: log(pi_prox / pi_behaviour) of each chunk's whole episode; None if the algorithm does not use it."""
        return None

    def element_weights(self, batch: SuperBatch) -> Array:
        """[M]: weight of each of a chunk's elements in the averages of surrogate, entropy and divergence."""
        return np.ones(batch.num_chunks)

    def value_loss(self, values: Tensor, rows: RowTargets, chunks: Tensor) -> Tensor:
        """Sum of the loss of ``values`` [n] over the chunks of a mask, bool [n].

        Without a value function it is 0, with a gradient of 0, because engines expect one.
        """
        return 0.0 * values.masked_fill(~chunks, 0.0).sum()

    def choose_conditions(self, batch: SuperBatch, advantages: Array) -> Array:
        """[M]: the condition under which each chunk is trained, an index of ``AlgorithmConfig.conditions``."""
        return np.zeros(batch.num_chunks)

    def trained_chunks(self, targets: Targets) -> Array:
        """Rows of the chunks that the update passes through the policy; the others have no part in the loss."""
        return np.arange(len(targets.num_steps))

    def kept_chunks(self, batch: SuperBatch) -> Array:
        """bool [M]: which chunks may be cloned again later (``bc_coef``); those of successful episodes."""
        return np.repeat(batch.success, np.diff(batch.offsets))

    def trains_value(self, conditions: Array) -> Array:
        """bool [M]: which chunks, trained under these conditions, the value function learns from."""
        return np.ones(len(conditions), bool)

    @property
    def first_policy_version(self) -> int:
        """The first version whose update trains the policy; those before train the value head or the critic alone."""
        return 0

    def trains_policy(self, policy_version: int) -> bool:
        """Whether this update may train the policy."""
        return policy_version >= self.first_policy_version

    def moves_policy(self, targets: Targets, policy_version: int) -> bool:
        """Whether the policy makes steps in this update: not if no chunk is known to be better than another.

        What is left of its loss is then noise, which an optimizer like Adam turns into steps of full length.
        """
        return self.trains_policy(policy_version) and bool(targets.advantages.any() or self.config.bc_coef)

    def targets(
        self,
        batch: SuperBatch,
        logprobs: Array | None = None,
        values: Array | None = None,
        reference_logprobs: Array | None = None,
        q: Array | None = None,
    ) -> Targets:
        """Targets of all M chunks of a super-batch. Imagined chunks have ``imagined_advantages``, and train no value.

        Args:
            batch: its ``bootstrap_value`` is used as given; a learner that recomputes values replaces it first.
            logprobs, values: [M, K, A] and [M], under the weights at the start of the update; if ``needs_recompute``.
            reference_logprobs: [M, K, A], under the initial policy; if ``needs_reference``.
            q: [M, critics], of the recorded chunks; with a critic, from which ``values`` are then, too.

        Raises ValueError if the batch contradicts itself or holds numbers that are not finite.
        """
        check_given(self.needs_recompute, "proximal", logprobs=logprobs, values=values)
        check_given(self.config.num_critics > 0, "critics", q=q)
        check_given(self.needs_reference, "kl_coef", reference_logprobs=reference_logprobs)
        proximal = batch.logprobs
        if logprobs is not None and self.config.recomputes_proximal:
            proximal = np.asarray(logprobs, np.float32)
        old_values = batch.values if values is None else np.asarray(values, np.float32)
        check_batch(batch, recorded=batch.logprobs, proximal=proximal, reference=reference_logprobs)
        real, m = batch.real(), batch.real_chunks
        advantages, returns = self.compute_advantages(real, proximal[:m], old_values[:m], None if q is None else q[:m])
        if m < batch.num_chunks:
            first = real.num_episodes  # of the imagined episodes
            earned = episode_returns(batch.rewards, batch.num_steps, batch.offsets)
            imagined = imagined_advantages(earned, batch.group, first)
            advantages = np.concatenate([advantages, np.repeat(imagined, np.diff(batch.offsets[first:]))])
            returns = np.concatenate([returns, old_values[m:]])
        log_weights = self.episode_log_weights(batch, proximal)
        conditions = self.choose_conditions(batch, advantages)
        return Targets(
            advantages=advantages.astype(np.float32),
            returns=returns.astype(np.float32),
            proximal_logprobs=proximal,
            behaviour_logprobs=batch.logprobs,
            old_values=old_values,
            staleness=batch.staleness.astype(np.float32),
            episode_log_weights=None if log_weights is None else log_weights.astype(np.float32),
            reference_logprobs=reference_logprobs,
            num_steps=batch.num_steps,
            weights=self.element_weights(batch).astype(np.float32),
            condition=conditions.astype(np.int64),
            trains_value=self.trains_value(conditions) & (np.arange(batch.num_chunks) < m),
            judges_values=returns_differ(batch) & (np.arange(batch.num_chunks) < batch.offsets[batch.new_episodes]),
        )

    def loss(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        values: Tensor,
        rows: RowTargets,
        denominators: LossDenominators,
        policy_version: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The share of n chunks in the optimizer step's loss.

        Shares *sum* to the loss. An engine that averages gradients over ranks or micro-batches must be given the share
        times the number it divides by.

        Args:
            logprobs: [n, K, A], of the recorded tokens under the weights in training.
            entropy: [n, K, A], nats.
            values: [n].
            rows: targets of these chunks.
            denominators: of the whole optimizer step.
            policy_version: updates before this one.

        Returns the share, and sums for ``finish_metrics``; all scalars.
        Raises ValueError if shapes disagree.
        """
        from algos.losses import LossTerms, element_mask, pool, reference_divergence, token_mask, total_loss  # torch
        from algos.metrics import loss_metrics

        c = self.config
        check_rows(logprobs, entropy, values, rows)
        tokens = token_mask(rows.num_steps, *logprobs.shape[1:])
        policy, metrics = self.policy_loss(logprobs, rows, tokens)
        valued = element_mask(tokens, "chunk") & rows.trains_value.bool()
        value = self.value_loss(values, rows, valued)
        entropies = pool(entropy, tokens, "chunk")
        divergences = reference_divergence(logprobs, rows, tokens, weighted=c.kl_estimate == "weighted_k3")
        terms = LossTerms(policy, value, (rows.weights * entropies).sum(), (rows.weights * divergences).sum())
        p = float(self.trains_policy(policy_version))
        entropy_coef = p * c.entropy_coef_at(policy_version)
        coefs = {"policy_coef": p, "entropy_coef": entropy_coef, "kl_coef": p * c.kl_coef}
        elements = denominators.elements(c.loss_level, logprobs.shape[2])
        loss = total_loss(terms, elements, denominators.value_chunks, value_coef=self.value_coef, **coefs)
        mask = element_mask(tokens, c.loss_level)
        return loss, metrics | loss_metrics(terms, entropies, divergences, mask, tokens, valued)

    def cloning_loss(
        self, logprobs: Tensor, num_steps: Tensor, steps: int, policy_version: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The share of n cloned chunks in the optimizer step's loss: ``bc_coef`` times the mean of -log pi, by token.

        Args:
            logprobs: [n, K, A], of the tokens to clone under the weights in training.
            num_steps: int64 [n].
            steps: control steps in all chunks that this optimizer step clones.
            policy_version: updates before this one.

        Returns as ``loss``.
        """
        from algos.losses import pool, token_mask  # loads torch

        tokens = token_mask(num_steps, *logprobs.shape[1:])
        total = -pool(logprobs, tokens, "chunk").sum()
        coef = self.config.bc_coef * self.trains_policy(policy_version)
        sums = {"cloning_loss": total.detach().double(), "cloned_tokens": tokens.sum().double()}
        return coef * total / (steps * logprobs.shape[2]), sums

    def finish_metrics(self, sums: Mapping[str, float], targets: Targets) -> dict[str, float]:
        """Metrics of an update, from the sums of all its loss calls on all ranks (see ``algos.metrics``).

        Adds ``explained_variance`` of the old values in chunks that no update has seen. Where their episodes all earned
        the same it is left out: only the values in their returns vary then.
        """
        from algos.metrics import finish_metrics  # loads torch

        metrics = finish_metrics(sums)
        unseen = targets.trains_value & targets.judges_values
        explained = explained_variance(targets.returns[unseen], targets.old_values[unseen])
        return metrics if explained is None else metrics | {"explained_variance": explained}
