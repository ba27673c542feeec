"""Configuration keys that all algorithms share: the policy's objective."""

from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from vla_rl.core.records import BootstrapRule, GroupRules
from vla_rl.core.schema import ConfigGroup, Positive, PositiveFloat

RatioLevel = Literal["token", "action", "chunk"]  # what one probability ratio covers
WeightLevel = Literal[RatioLevel, "episode"]  # what one importance weight covers, the finest first


class AlgorithmConfig(ConfigGroup):
    """The policy's objective. Each algorithm derives its own configuration from this (``algos.ppo``)."""

    name: str

    objective: Literal["clip", "sapo", "gipo"] = Field(
        "clip",
        description="What keeps probability ratios near 1. clip: a hard limit. sapo (arXiv:2511.20347) and gipo "
        "(arXiv:2603.03955): gradients that fade with the distance.",
    )
    tau_positive: PositiveFloat = Field(
        1.0, description="sapo: how fast gradients fade where the advantage is positive."
    )
    tau_negative: PositiveFloat = Field(1.05, description="sapo: how fast gradients fade where it is negative.")
    clip_low: PositiveFloat = Field(0.2, description="Ratios are clipped to [1 - clip_low, 1 + clip_high].")
    clip_high: PositiveFloat = Field(0.2, description="See clip_low.")
    gipo_sigma: PositiveFloat = Field(0.5, description="gipo: log-ratio at which the gradient has fallen to 61 %.")
    dual_clip: float | None = Field(
        None, gt=1.0, description="Upper limit of ratios where the advantage is negative (arXiv:1912.09729)."
    )
    ratio_level: RatioLevel = Field("action", description="What one probability ratio covers.")
    entropy_coef: float = Field(0.0, ge=0.0, description="Coefficient of the entropy bonus.")
    epochs: Positive = Field(1, description="Passes over a super-batch.")
    minibatches: Positive = Field(4, description="Optimizer steps per epoch.")
    proximal: Literal["behaviour", "recomputed", "interpolated"] = Field(
        "behaviour",
        description="The policy that ratios are relative to. behaviour: the one that acted. The other two decouple it "
        "from the behaviour policy (arXiv:2505.24298). recomputed: the policy at the start of the update, by one more "
        "forward pass. interpolated: between the policy that acted and the one in training, by staleness.",
    )
    importance_level: WeightLevel | None = Field(
        None, description="What one weight pi_prox / pi_behaviour covers; ratio_level or coarser; null: ratio_level."
    )
    importance_cap: PositiveFloat | None = Field(None, description="Upper limit of the weights pi_prox / pi_behaviour.")
    importance_band: float | None = Field(None, gt=1.0, description="Weights outside [1/band, band] count as 0.")
    kl_coef: float = Field(
        0.0, ge=0.0, description="Coefficient of the KL divergence from the initial policy; costs a forward pass."
    )

    @model_validator(mode="after")
    def _weights_exist(self) -> Self:
        for name in ("importance_level", "importance_cap", "importance_band"):
            value = getattr(self, name)
            if value is not None and self.proximal == "behaviour":
                raise ValueError(
                    f"{name}={value} is about weights pi_prox / pi_behaviour, which are all 1 with proximal=behaviour: "
                    f"set proximal=recomputed, or {name}=null"
                )
        return self

    @model_validator(mode="after")
    def _weights_cover_whole_ratios(self) -> Self:
        if self.importance_level is not None:
            levels = get_args(WeightLevel)
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

    @property
    def groups(self) -> GroupRules:
        """Which episodes form a group."""
        return GroupRules()

    @property
    def bootstrap_rule(self) -> BootstrapRule:
        """Which episodes end with the value of their final observation."""
        return "never"
