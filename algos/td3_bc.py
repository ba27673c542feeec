"""TD3+BC (Fujimoto & Gu, arXiv:2106.06860) on action chunks: follow the critic, and stay near what was executed.

L_π = − mean Q(s, π(s)) / mean |Q| + cloning · mean (π(s) − a)²
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from algos.off_policy import OffPolicyAlgorithm, OffPolicyConfig

if TYPE_CHECKING:
    from torch import Tensor


class TD3BCConfig(OffPolicyConfig):
    """TD3+BC: a deterministic actor between the critic and cloning."""

    name: Literal["td3_bc"] = "td3_bc"
    cloning: float = Field(
        2.0,
        ge=0.0,
        description="Coefficient of the squared distance from executed actions, normalized; the critic's part has size "
        "1 whatever the returns are.",
    )


class TD3BC(OffPolicyAlgorithm):
    """See the module."""

    Config = TD3BCConfig
    config: TD3BCConfig

    def actor_loss(self, q: Tensor, actions: Tensor, recorded: Tensor, executed: Tensor) -> Tensor:
        from algos.td_losses import td3_bc_loss  # loads torch

        return td3_bc_loss(q, actions, recorded, executed, self.config.cloning)
