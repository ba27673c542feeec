"""Actor-critic: algorithms with a value function, whose advantages say how much better a chunk did than expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from algos.advantages import chunk_rewards, gae, return_spread
from algos.algorithm import Algorithm
from algos.config import AlgorithmConfig
from algos.targets import Targets
from vla_rl.core.records import Array, BootstrapRule, SuperBatch
from vla_rl.core.schema import Fraction, NonNegative, Positive, PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor

    from algos.targets import RowTargets


class ActorCriticConfig(AlgorithmConfig):
    """The value function and what it learns."""

    gamma: Fraction = Field(0.99, description="Discount per chunk.")
    gae_lambda: Fraction = Field(0.95, description="Lambda of the generalized advantage estimation, per chunk.")
    bootstrap: BootstrapRule = Field(
        "never",
        description="Which episodes end with the value of their final observation instead of 0. never: none, since "
        "success within the time limit is what counts. truncated: those that the time limit ended, if it is no part "
        "of the task. always: all, as in RLinf's recipes.",
    )
    value_coef: float = Field(0.5, ge=0.0, description="Coefficient of the value loss.")
    value_warmup: NonNegative = Field(0, description="First iterations, in which only the value head is trained.")

    def chunk_discount(self, chunk_size: int) -> float:
        return self.gamma  # once per chunk, however long it is

    @property
    def bootstrap_rule(self) -> BootstrapRule:
        return self.bootstrap


class ActorCritic(Algorithm):
    """Bootstraps from a value head."""

    config: ActorCriticConfig

    def __init__(self, config: ActorCriticConfig) -> None:
        super().__init__(config)
        self.value_coef = config.value_coef

    def bootstrap_mask(self, batch: SuperBatch) -> Array:
        """bool [B]: which episodes end with the value of their final observation instead of 0."""
        rule = self.config.bootstrap
        return batch.truncated if rule == "truncated" else np.full_like(batch.truncated, rule == "always")

    def gae(self, batch: SuperBatch, values: Array) -> tuple[Array, Array]:
        """Advantages and lambda-returns of all chunks, float64 [M] each, by the config's gamma and gae_lambda."""
        rewards = chunk_rewards(batch.rewards, batch.num_steps)
        ends = batch.offsets, batch.bootstrap_value, self.bootstrap_mask(batch)
        return gae(rewards, values, *ends, self.config.gamma, self.config.gae_lambda)

    def lambda_returns(
        self, rewards: Array, values: Array, offsets: Array, bootstrap_value: Array, bootstrap_mask: Array
    ) -> Array:
        """float64 [M]: the lambda-returns of any chunks, arguments and errors as ``algos.advantages.gae``."""
        ends = offsets, bootstrap_value, bootstrap_mask
        return gae(rewards, values, *ends, self.config.gamma, self.config.gae_lambda)[1]

    def spread(self, batch: SuperBatch) -> float:
        """``return_spread`` by the config's gamma."""
        return return_spread(batch, self.config.gamma)

    @property
    def first_policy_version(self) -> int:
        return self.config.value_warmup

    def finish_metrics(self, sums: Mapping[str, float], targets: Targets) -> dict[str, float]:
        """Adds ``advantage_std``, of the advantages before any normalization."""
        real = targets.trains_value
        raw = targets.returns[real] - targets.old_values[real]
        return super().finish_metrics(sums, targets) | ({"advantage_std": float(raw.std())} if raw.size else {})


class ClippedValueConfig(ActorCriticConfig):
    """A value function that learns lambda-returns by a clipped Huber loss."""

    value_clip: PositiveFloat | None = Field(0.2, description="Clip range of the value update; null: no clipping.")
    huber_delta: PositiveFloat = Field(10.0, description="Error at which the value loss turns from squared to linear.")
    value_memory: NonNegative = Field(
        0,
        description="Episodes, the newest ones, on whose features the value head makes further steps after each "
        "update; 0: it makes none. Values are then always those at the start of the update, by one more forward pass.",
    )
    value_steps: Positive = Field(40, description="value_memory: these steps (Adam), in each update.")
    value_batch: Positive = Field(256, description="value_memory: chunks of one of these steps.")
    value_memory_lr: PositiveFloat = Field(3e-4, description="value_memory: learning rate of these steps.")

    @property
    def needs_recompute(self) -> bool:
        return super().needs_recompute or self.needs_features

    @property
    def needs_features(self) -> bool:
        return super().needs_features or self.value_memory > 0


class ClippedValue(ActorCritic):
    """Trains the value head by a clipped Huber loss."""

    config: ClippedValueConfig

    def value_loss(self, values: Tensor, rows: RowTargets, chunks: Tensor) -> Tensor:
        from algos.losses import clipped_value_loss  # loads torch

        clip, delta = self.config.value_clip, self.config.huber_delta
        return clipped_value_loss(values, rows.returns, rows.old_values, chunks, clip, delta)

    def memory_loss(self, values: Tensor, returns: Tensor) -> Tensor:
        """Mean loss of ``values`` [n] on kept episodes (``value_memory``): Huber's, without a clip."""
        from torch.nn.functional import huber_loss  # loads torch

        return huber_loss(values, returns, delta=self.config.huber_delta)
