"""Soft actor-critic (arXiv:1801.01290, arXiv:1812.05905) on action chunks: the critic moves mean and deviation.

    a   = mean + deviation · noise                        one chunk, drawn from π(s)
    L_π = − mean Q(s, a) / scale − α · mean H(π(s)) + cloning · mean (mean of π(s) − executed)²
    aim = r + γ^n min Q_target(s', a')                    entropy_in_aim: + γ^n α · mean H(π(s'))

H is the entropy of a normal distribution, which is known exactly. Nothing is squashed: the critic rates chunks within
the simulator's limits, and means beyond are drawn back (``algos.td_losses.excess_loss``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from algos.off_policy import Acted, ActorNeeds, EntropyRule, GradientAlgorithm, GradientConfig
from vla_rl.core.schema import PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


class SoftConfig(GradientConfig):
    """Keys of actors that draw their chunks, and whose entropy counts."""

    actor_needs: ClassVar[ActorNeeds] = "deviations"

    alpha: float = Field(
        0.01,
        ge=0.0,
        description="Coefficient of the entropy, nats an action number; with target_entropy, the first one.",
    )
    target_entropy: float | None = Field(
        None,
        description="Entropy of an action number, nats, to which alpha is tuned: 0.2 is a deviation of 0.3, -1 (as in "
        "SAC) one of 0.09; null: alpha stays.",
    )
    alpha_lr: PositiveFloat = Field(3e-4, description="target_entropy: learning rate of the logarithm of alpha (Adam).")
    entropy_in_aim: bool = Field(
        False,
        description="Count the entropy after a chunk in the critic's aim, as published; false: not, as RLPD does. With "
        "it, alpha and cloning are in units of the reward, not of the mean rating.",
    )
    cloning: float = Field(
        0.0, ge=0.0, description="Coefficient of the squared distance of the means from executed actions, normalized."
    )

    @model_validator(mode="after")
    def _tuned_from_somewhere(self) -> Self:
        if self.target_entropy is not None and not self.alpha:
            raise ValueError("alpha=0 cannot be tuned to target_entropy: its logarithm is; start at alpha=0.01")
        return self


class SACConfig(SoftConfig):
    """Soft actor-critic: the critic moves mean and deviation of the policy; its entropy counts."""

    name: Literal["sac"] = "sac"


class SAC(GradientAlgorithm):
    """See the module."""

    Config: ClassVar[type[SoftConfig]] = SACConfig
    config: SoftConfig

    @property
    def entropy_rule(self) -> EntropyRule:
        c = self.config
        return EntropyRule(c.alpha, c.target_entropy, c.alpha_lr)

    def chunks(self, means: Tensor, deviations: Tensor | None, noise: Tensor) -> Tensor:
        assert deviations is not None  # ``vla_rl.config.checks`` refuses policies without
        return means + deviations * noise

    chunks_near = chunks_after = chunks

    def values_after(self, rated: Tensor, entropy: Tensor, alpha: float) -> Tensor:
        if not self.config.entropy_in_aim:
            return rated
        return rated + alpha * entropy.mean(dim=(1, 2))[:, None]

    def actor_loss(self, acted: Acted, alpha: float) -> Tensor:
        from algos.td_losses import sac_loss  # loads torch

        given = acted.q, acted.means, acted.entropy, acted.recorded, acted.executed
        c = self.config
        return sac_loss(*given, alpha=alpha, cloning=c.cloning, scaled=not c.entropy_in_aim)
