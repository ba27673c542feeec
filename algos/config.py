"""What an algorithm is: its keys in the configuration, and the advantages that it makes of a super-batch.

Everything here is read wherever a configuration is, also in processes that do without torch: it stays out of this file
and of those of the algorithms (``algos.algorithm`` has the tensors' side).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from vla_rl.core.records import Array, BootstrapRule, GroupRules, SuperBatch
from vla_rl.core.schema import ConfigGroup, Positive, PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor

    from algos.targets import RowTargets


class AlgorithmConfig(ConfigGroup, ABC):
    """The policy's objective, which all algorithms share; a derived class is one algorithm (``algos.ppo``)."""

    name: str

    objective: Literal["clip", "sapo", "gipo"] = Field(
        "clip",
        description="What keeps ratios near 1: a limit, or, in sapo (arXiv:2511.20347) and gipo (arXiv:2603.03955), "
        "gradients that fade with the distance.",
    )
    tau_positive: PositiveFloat = Field(1.0, description="How fast, in sapo, where the advantage is positive.")
    tau_negative: PositiveFloat = Field(1.05, description="How fast, in sapo, where it is negative.")
    clip_low: PositiveFloat = Field(0.2, description="Ratios are clipped to [1 - clip_low, 1 + clip_high].")
    clip_high: PositiveFloat = 0.2
    gipo_sigma: PositiveFloat = Field(0.5, description="Log-ratio at which, in gipo, the gradient has fallen to 61 %.")
    dual_clip: float | None = Field(
        None, gt=1.0, description="Where the advantage is negative, ratios count as this at most (arXiv:1912.09729)."
    )
    ratio_level: Literal["token", "action", "chunk"] = Field("action", description="What one probability ratio covers.")
    entropy_coef: float = Field(0.0, ge=0.0)
    epochs: Positive = 1
    minibatches: Positive = Field(4, description="Optimizer steps per epoch.")
    proximal: Literal["behaviour", "recomputed", "interpolated"] = Field(
        "behaviour",
        description="The policy around which ratios are held. behaviour: the one that acted. Decoupled from it "
        "(arXiv:2505.24298): that of the update's start, recomputed by one more forward pass, or interpolated between "
        "the one that acted and the one in training by the data's age.",
    )
    importance_level: Literal["token", "action", "chunk", "episode"] | None = Field(
        None, description="What one weight pi_prox / pi_behaviour covers, ratio_level or more; null: ratio_level."
    )
    importance_cap: PositiveFloat | None = Field(None, description="Largest weight pi_prox / pi_behaviour.")
    importance_band: float | None = Field(None, gt=1.0, description="Weights outside [1/band, band] count as 0.")
    kl_coef: float = Field(
        0.0, ge=0.0, description="Of the divergence from the policy that the run began with; costs a forward pass."
    )

    @model_validator(mode="after")
    def _weights_are_there(self) -> Self:
        for name in ("importance_level", "importance_cap", "importance_band"):
            value = getattr(self, name)
            if value is not None and self.proximal == "behaviour":
                raise ValueError(
                    f"{name}={value} is about weights pi_prox / pi_behaviour, which are all 1 with proximal=behaviour: "
                    f"set proximal=recomputed, or {name}=null"
                )
        return self

    @model_validator(mode="after")
    def _level_of_weights(self) -> Self:
        if self.importance_level is not None:
            levels = ("token", "action", "chunk", "episode")
            if levels.index(self.importance_level) < levels.index(self.ratio_level):
                raise ValueError(
                    f"importance_level={self.importance_level} is finer than ratio_level={self.ratio_level}: "
                    "one ratio has one weight; set it to the same or a coarser level"
                )
        if self.importance_level == "episode" and self.proximal == "interpolated":
            raise ValueError(
                "importance_level=episode needs all chunks of an episode at once, which proximal=interpolated never "
                "has: set proximal=recomputed, or importance_level=chunk"
            )
        return self

    @abstractmethod
    def compute_advantages(self, batch: SuperBatch, proximal: Array, values: Array) -> tuple[Array, Array]:
        """Advantages and returns [M] each, from log-probabilities [M, K, A] and values [M] at the update's start."""

    def value_loss(self, values: Tensor, rows: RowTargets, chunks: Tensor) -> Tensor:
        """Sum over the chunks [n] of a mask. Without a value function 0, with gradients: engines expect them."""
        return 0.0 * values.masked_fill(~chunks, 0.0).sum()

    def coefficients(self, iteration: int) -> tuple[float, float]:
        """Of the policy's part of the loss (with the entropy's) and of the value's."""
        return 1.0, 1.0

    @property
    def groups(self) -> GroupRules:
        """Which episodes belong together."""
        return GroupRules()

    @property
    def bootstrap_rule(self) -> BootstrapRule:
        """Which episodes end with the value of their final observation."""
        return "never"
