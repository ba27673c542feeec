"""TD3+BC (Fujimoto & Gu, arXiv:2106.06860) on action chunks: follow the critic, and stay near what was executed.

L_π = − mean Q(s, π(s)) / mean |Q| + cloning · mean (π(s) − a)²
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from algos.off_policy import Acted, GradientAlgorithm, GradientConfig
from vla_rl.core.schema import PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


class TD3BCConfig(GradientConfig):
    """TD3+BC: a deterministic actor between the critic and cloning."""

    name: Literal["td3_bc"] = "td3_bc"
    cloning: float = Field(
        2.0,
        ge=0.0,
        description="Coefficient of the squared distance from executed actions, normalized; the critic's part has size "
        "1 whatever the returns are.",
    )
    target_noise: float = Field(0.1, ge=0.0, description="Deviation of the noise on the actions after a chunk (TD3).")
    target_clip: PositiveFloat = Field(0.3, description="Limit of that noise.")


class TD3BC(GradientAlgorithm):
    """See the module."""

    Config = TD3BCConfig
    config: TD3BCConfig

    def chunks(self, means: Tensor, deviations: Tensor | None, noise: Tensor) -> Tensor:
        return means

    def chunks_near(self, means: Tensor, deviations: Tensor | None, noise: Tensor) -> Tensor:
        return means + self.config.target_noise * noise

    def chunks_after(self, means: Tensor, deviations: Tensor | None, noise: Tensor) -> Tensor:
        clip = self.config.target_clip
        return means + (self.config.target_noise * noise).clamp(-clip, clip)

    def actor_loss(self, acted: Acted, alpha: float) -> Tensor:
        from algos.td_losses import td3_bc_loss  # loads torch

        return td3_bc_loss(acted.q, acted.means, acted.recorded, acted.executed, self.config.cloning)
