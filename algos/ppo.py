"""Proximal policy optimization on action chunks (arXiv:1707.06347), plain and decoupled (arXiv:2505.24298).

A, R = gae(r, V)                                     compute_advantages     (algos.advantages)
A = (A - mean(A)) / max(std(A), 0.1 std of the episodes' returns); 0 if all returns are equal
for each minibatch:                                  Algorithm.loss         (algos.algorithm)
    ratio = pi(a) / pi_prox(a)                       surrogate.policy_loss  (algos.surrogate)
    L_pi = -min(ratio A, clip(ratio) A)              clipped_surrogate      (algos.losses)
    L_V = max(huber(V - R), huber(clipped V - R))    clipped_value_loss
    step on  mean(L_pi) + value_coef mean(L_V) - entropy_coef mean(H) + kl_coef mean(KL)      total_loss
"""

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from algos.actor_critic import ClippedValue, ClippedValueConfig
from algos.advantages import chunk_log_ratios, chunk_rewards, normalize_within, vtrace
from algos.config import PolicyGradientConfig, WeightLevel
from algos.policy_gradient import PolicyGradient
from vla_rl.core.records import Array, SuperBatch
from vla_rl.core.schema import PositiveFloat


class PPOConfig(PolicyGradientConfig, ClippedValueConfig):
    """Proximal policy optimization: advantages relative to a value function."""

    name: Literal["ppo"] = "ppo"
    estimator: Literal["gae", "vtrace"] = Field(
        "gae",
        description="gae: generalized advantage estimation. vtrace: corrects returns for staleness (arXiv:1802.01561); "
        "needs proximal=recomputed.",
    )
    vtrace_cap: PositiveFloat = Field(
        1.0,
        description="vtrace: upper limit of a chunk's weight pi_prox / pi_behaviour. The surrogate's weights, too, are "
        "then those of chunks with this limit, unless importance_level or importance_cap say otherwise.",
    )
    normalize_advantages: bool = Field(True, description="Normalize advantages over the super-batch.")
    advantage_scale: Literal["batch", "task"] = Field(
        "batch",
        description="What advantages are normalized within. task: by mean and deviation of the chunks of their own "
        "task, so that tasks with small advantages count like the others.",
    )
    values: Literal["behaviour", "recomputed"] = Field(
        "behaviour",
        description="The values from which advantages are formed, and near which the value head is held. behaviour: "
        "those of the version that acted. recomputed: those at the start of the update, by one more forward pass; "
        "with proximal=recomputed or value_memory always.",
    )

    @model_validator(mode="after")
    def _vtrace_needs_recompute(self) -> Self:
        if self.estimator == "vtrace" and self.proximal != "recomputed":
            raise ValueError(
                f"estimator=vtrace weighs by recomputed log-probabilities, proximal={self.proximal} has none: "
                "set proximal=recomputed"
            )
        return self

    @model_validator(mode="after")
    def _scale_is_used(self) -> Self:
        if self.advantage_scale == "task" and not self.normalize_advantages:
            raise ValueError(
                "advantage_scale=task says within what advantages are normalized, and normalize_advantages=false: set "
                "it to true, or advantage_scale=batch"
            )
        return self

    @property
    def needs_recompute(self) -> bool:
        return super().needs_recompute or self.values == "recomputed"

    @property
    def weight_level(self) -> WeightLevel:
        return self.importance_level or ("chunk" if self.estimator == "vtrace" else self.ratio_level)

    @property
    def weight_cap(self) -> float | None:
        default = self.vtrace_cap if self.estimator == "vtrace" else None
        return default if self.importance_cap is None else self.importance_cap


class PPO(PolicyGradient, ClippedValue):
    """Advantages by generalized advantage estimation or V-trace."""

    Config = PPOConfig
    config: PPOConfig

    def compute_advantages(
        self, batch: SuperBatch, proximal: Array, values: Array, q: Array | None = None
    ) -> tuple[Array, Array]:
        c = self.config
        match c.estimator:
            case "gae":
                advantages, returns = self.gae(batch, values)
            case "vtrace":
                rewards = chunk_rewards(batch.rewards, batch.num_steps)
                weights = chunk_log_ratios(proximal, batch.logprobs, batch.num_steps)
                ends = batch.offsets, batch.bootstrap_value, self.bootstrap_mask(batch)
                advantages, returns = vtrace(rewards, values, weights, *ends, c.gamma, c.gae_lambda, c.vtrace_cap)
        spread = self.spread(batch)
        if c.normalize_advantages:
            # Each chunk counts as often as in the surrogate, so that the loss at ratio 1 is exactly 0.
            weights = np.ones(batch.num_chunks) if c.ratio_level == "chunk" else batch.num_steps
            parts = batch.task if c.advantage_scale == "task" else np.zeros(batch.num_chunks)
            advantages = normalize_within(parts, advantages, weights, spread)
        return advantages * (spread > 0), returns
