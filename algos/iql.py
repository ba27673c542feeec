"""Implicit Q-learning (arXiv:2110.06169) on action chunks: off-policy, from whatever the run has played.

    Q(s, a) <- r + gamma V(s')                        squared error, an ensemble; V(s') = 0 after the end
    V(s)    <- expectile of min Q_target(s, a)        as good as the better chunks that were played
    pi      <- cloning with weights exp(beta (min Q_target(s, a) - V(s)))

The critic rates chunks that were executed, so no chunk of another policy has to be sampled. Q and V are small networks
on the policy's features; ``vla_rl.learner.critic`` trains them by many cheap steps before the policy's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from algos.advantages import chunk_rewards, discounted_returns, return_spread
from algos.critic import CriticAlgorithm, CriticConfig
from vla_rl.core.records import Array, SuperBatch
from vla_rl.core.schema import Fraction, PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor

    from algos.targets import RowTargets


class IQLConfig(CriticConfig):
    """Implicit Q-learning: a critic of chunks, and advantage-weighted cloning."""

    name: Literal["iql"] = "iql"
    gamma: Fraction = Field(0.99, description="Discount per chunk.")
    expectile: float = Field(0.7, gt=0.0, lt=1.0, description="Which expectile of Q the value function learns.")
    beta: PositiveFloat = Field(
        10.0,
        description="The larger, the more the best chunks prevail in cloning; 10 as published for rewards of 0 and 1.",
    )
    max_weight: PositiveFloat = Field(100.0, description="Upper limit of the weights of cloning.")


class IQL(CriticAlgorithm):
    """Clones recorded chunks by their advantage, which a critic of chunks estimates."""

    Config = IQLConfig
    config: IQLConfig

    def compute_advantages(
        self, batch: SuperBatch, proximal: Array, values: Array, q: Array | None = None
    ) -> tuple[Array, Array]:
        """Returns the weights of cloning in place of advantages, and discounted returns, with which V is compared.

        The weights are 0 if all episodes return the same: no chunk is then known to be better than another.
        """
        assert q is not None
        c, better = self.config, q.astype(np.float64).min(axis=1) - values
        returns = discounted_returns(chunk_rewards(batch.rewards, batch.num_steps), batch.offsets, c.gamma)
        differ = return_spread(batch, c.gamma) > 0
        return np.exp(np.minimum(c.beta * better, np.log(c.max_weight))) * differ, returns

    def critic_loss(self, q: Tensor, target_q: Tensor, values: Tensor, next_values: Tensor, rewards: Tensor) -> Tensor:
        """See ``CriticAlgorithm``: half the squared errors of Q, and ``|tau - 1(u < 0)| u^2``, u = min Q_target - V."""
        from algos import td_losses  # loads torch

        aim = rewards + self.config.gamma * next_values.detach()
        better = target_q.detach().min(dim=1).values - values
        return 0.5 * td_losses.td_loss(q, aim) + td_losses.expectile_loss(better, self.config.expectile)

    def policy_loss(self, logprobs: Tensor, rows: RowTargets, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from algos.cloning import weighted_cloning  # loads torch

        return weighted_cloning(logprobs, rows, tokens, rows.advantages)
