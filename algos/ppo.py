"""Proximal policy optimization on action chunks (arXiv:1707.06347), plain and decoupled (arXiv:2505.24298)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from algos.advantages import chunk_log_ratios, chunk_rewards, gae, normalize, vtrace
from algos.algorithm import Algorithm
from algos.config import AlgorithmConfig, WeightLevel
from vla_rl.core.records import Array, BootstrapRule, SuperBatch
from vla_rl.core.schema import Fraction, NonNegative, PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor

    from algos.targets import RowTargets


class PPOConfig(AlgorithmConfig):
    """Proximal policy optimization: advantages relative to a value function."""

    name: Literal["ppo"] = "ppo"
    gamma: Fraction = Field(0.99, description="Discount per chunk.")
    gae_lambda: Fraction = Field(0.95, description="Lambda of the generalized advantage estimation, per chunk.")
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
    bootstrap: BootstrapRule = Field(
        "truncated",
        description="Which episodes end with the value of their final observation instead of 0. truncated: those "
        "that a time limit ended. never: none, if the time limit is part of the task, as in LIBERO's benchmark. "
        "always: all, as in RLinf's recipes.",
    )
    value_clip: PositiveFloat | None = Field(0.2, description="Clip range of the value update; null: no clipping.")
    huber_delta: PositiveFloat = Field(10.0, description="Error at which the value loss turns from squared to linear.")
    value_coef: float = Field(0.5, ge=0.0, description="Coefficient of the value loss.")
    normalize_advantages: bool = Field(True, description="Normalize advantages over the super-batch.")
    value_warmup: NonNegative = Field(0, description="First iterations, in which only the value head is trained.")

    @model_validator(mode="after")
    def _vtrace_needs_recompute(self) -> Self:
        if self.estimator == "vtrace" and self.proximal != "recomputed":
            raise ValueError(
                f"estimator=vtrace weighs by recomputed log-probabilities, proximal={self.proximal} has none: "
                "set proximal=recomputed"
            )
        return self

    @property
    def weight_level(self) -> WeightLevel:
        return self.importance_level or ("chunk" if self.estimator == "vtrace" else self.ratio_level)

    @property
    def weight_cap(self) -> float | None:
        default = self.vtrace_cap if self.estimator == "vtrace" else None
        return default if self.importance_cap is None else self.importance_cap

    @property
    def bootstrap_rule(self) -> BootstrapRule:
        return self.bootstrap


class PPO(Algorithm):
    """Advantages by generalized advantage estimation or V-trace, and a clipped value loss."""

    Config = PPOConfig
    config: PPOConfig

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.value_coef = config.value_coef

    def compute_advantages(self, batch: SuperBatch, proximal: Array, values: Array) -> tuple[Array, Array]:
        c = self.config
        rewards = chunk_rewards(batch.rewards, batch.num_steps)
        ends = batch.offsets, batch.bootstrap_value, self._bootstrap_mask(batch), c.gamma, c.gae_lambda
        match c.estimator:
            case "gae":
                advantages, returns = gae(rewards, values, *ends)
            case "vtrace":
                weights = chunk_log_ratios(proximal, batch.logprobs, batch.num_steps)
                advantages, returns = vtrace(rewards, values, weights, *ends, cap=c.vtrace_cap)
        if c.normalize_advantages:
            # Each chunk counts as often as in the surrogate, so that the loss at ratio 1 is exactly 0.
            advantages = normalize(advantages, None if c.ratio_level == "chunk" else batch.num_steps)
        return advantages, returns

    def _bootstrap_mask(self, batch: SuperBatch) -> Array:
        """bool [B]: which episodes end with the value of their final observation instead of 0."""
        rule = self.config.bootstrap
        return batch.truncated if rule == "truncated" else np.full_like(batch.truncated, rule == "always")

    def value_loss(self, values: Tensor, rows: RowTargets, chunks: Tensor) -> Tensor:
        from algos.losses import clipped_value_loss  # loads torch

        clip, delta = self.config.value_clip, self.config.huber_delta
        return clipped_value_loss(values, rows.returns, rows.old_values, chunks, clip, delta)

    def trains_policy(self, policy_version: int) -> bool:
        return policy_version >= self.config.value_warmup
