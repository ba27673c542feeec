"""Proximal policy optimization on action chunks (arXiv:1707.06347), plain and decoupled (arXiv:2505.24298)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from algos.advantages import chunk_log_ratios, chunk_rewards, gae, normalize, vtrace
from algos.config import AlgorithmConfig
from vla_rl.core.records import Array, BootstrapRule, SuperBatch
from vla_rl.core.schema import Fraction, NonNegative, PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor

    from algos.targets import RowTargets


class PPO(AlgorithmConfig):
    """Advantages over a value function, by generalized estimation or V-trace."""

    name: Literal["ppo"] = "ppo"
    gamma: Fraction = Field(0.99, description="Discount per chunk.")
    gae_lambda: Fraction = 0.95
    estimator: Literal["gae", "vtrace"] = Field(
        "gae",
        description="vtrace corrects returns for the data's age (arXiv:1802.01561); needs proximal=recomputed.",
    )
    vtrace_cap: PositiveFloat = Field(1.0, description="Largest weight pi_prox / pi_behaviour of a chunk in vtrace.")
    bootstrap: BootstrapRule = Field(
        "truncated",
        description="truncated: an episode cut by its time limit ends with the value of its final observation. "
        "never: with 0, where the limit is part of the task, as in LIBERO's benchmark. always: any episode does, as in "
        "RLinf's recipes.",
    )
    value_clip: PositiveFloat | None = Field(0.2, description="Clip range of the value update; null: unclipped.")
    huber_delta: PositiveFloat = Field(10.0, description="Where the value loss turns from squared to absolute.")
    value_coef: float = Field(0.5, ge=0.0)
    normalize_advantages: bool = True
    value_warmup: NonNegative = Field(0, description="Iterations that train the value head only.")

    @model_validator(mode="after")
    def _vtrace_needs_recompute(self) -> Self:
        if self.estimator == "vtrace" and self.proximal != "recomputed":
            raise ValueError(
                f"estimator=vtrace weighs by recomputed log-probabilities, proximal={self.proximal} has none: "
                "set proximal=recomputed"
            )
        return self

    def compute_advantages(self, batch: SuperBatch, proximal: Array, values: Array) -> tuple[Array, Array]:
        rewards = chunk_rewards(batch.rewards, batch.num_steps)
        ends = batch.offsets, batch.bootstrap_value, self._bootstrap_mask(batch), self.gamma, self.gae_lambda
        match self.estimator:
            case "gae":
                advantages, returns = gae(rewards, values, *ends)
            case "vtrace":
                weights = chunk_log_ratios(proximal, batch.logprobs, batch.num_steps)
                advantages, returns = vtrace(rewards, values, weights, *ends, cap=self.vtrace_cap)
        if self.normalize_advantages:
            # Each chunk counts as often as the surrogate counts it: the loss at ratio 1 is then exactly 0.
            advantages = normalize(advantages, None if self.ratio_level == "chunk" else batch.num_steps)
        return advantages, returns

    def _bootstrap_mask(self, batch: SuperBatch) -> Array:
        """bool [B]: which episodes end with the value of their final observation instead of 0."""
        match self.bootstrap:
            case "truncated":
                return batch.truncated
            case "always":
                return np.ones_like(batch.truncated)
            case "never":
                return np.zeros_like(batch.truncated)

    def value_loss(self, values: Tensor, rows: RowTargets, chunks: Tensor) -> Tensor:
        from algos.losses import clipped_value_loss  # loads torch

        return clipped_value_loss(values, rows.returns, rows.old_values, chunks, self.value_clip, self.huber_delta)

    def coefficients(self, iteration: int) -> tuple[float, float]:
        return (1.0 if iteration >= self.value_warmup else 0.0), self.value_coef

    @property
    def bootstrap_rule(self) -> BootstrapRule:
        return self.bootstrap
