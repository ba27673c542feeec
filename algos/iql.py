"""Implicit Q-learning (arXiv:2110.06169) on action chunks: off-policy, from whatever the run has played.

The critic rates a chunk that was executed, so no chunk of another policy has to be sampled. The policy is then cloned
from the recorded chunks by how much better each is than the state's value.

    Q(s, a) <- r + gamma V(s')                    by squared error, an ensemble
    V(s)    <- expectile of min Q(s, a) over a    as good as the better chunks that were played
    pi      <- cloning with weights exp(beta (min Q(s, a) - V(s)))

The targets are computed with the weights before the update, which take the place of target networks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from algos.actor_critic import ActorCritic, ActorCriticConfig
from vla_rl.core.records import Array, SuperBatch
from vla_rl.core.schema import Fraction, Positive, PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor

    from algos.targets import RowTargets


class IQLConfig(ActorCriticConfig):
    """Implicit Q-learning: a critic of chunks, and advantage-weighted cloning."""

    name: Literal["iql"] = "iql"
    gae_lambda: Fraction = Field(
        0.0,
        description="Lambda of the critic's targets, per chunk; 0: one step, as published; more is faster and biased.",
    )
    critics: Positive = Field(2, description="Members of the critic's ensemble; their minimum counts.")
    expectile: float = Field(0.7, gt=0.0, lt=1.0, description="Which expectile of Q the value function learns.")
    beta: PositiveFloat = Field(3.0, description="The larger, the more the best chunks prevail in cloning.")
    max_weight: PositiveFloat = Field(100.0, description="Upper limit of the weights of cloning.")

    @property
    def num_critics(self) -> int:
        return self.critics

    @property
    def needs_recompute(self) -> bool:
        return True


class IQL(ActorCritic):
    """Clones recorded chunks by their advantage, which a critic of chunks estimates."""

    Config = IQLConfig
    config: IQLConfig

    def compute_advantages(
        self, batch: SuperBatch, proximal: Array, values: Array, q: Array | None = None
    ) -> tuple[Array, Array]:
        """Returns the weights of cloning in place of advantages, and min Q(s, a), whose expectile the values learn."""
        assert q is not None
        least, c = q.astype(np.float64).min(axis=1), self.config
        return np.minimum(np.exp(c.beta * (least - values)), c.max_weight), least

    def critic_targets(self, batch: SuperBatch, values: Array) -> Array:
        """[M]: what Q(s, a) learns; the lambda-return, which is r + gamma V(s') for lambda 0."""
        return self.gae(batch, values)[1]

    def value_loss(self, values: Tensor, q: Tensor | None, rows: RowTargets, chunks: Tensor) -> Tensor:
        """Expectile loss of V, and squared error of the critics."""
        from algos.losses import expectile_loss, squared_loss  # loads torch

        assert q is not None
        assert rows.critic_targets is not None
        value = expectile_loss(values, rows.returns, chunks, self.config.expectile)
        return value + squared_loss(q, rows.critic_targets[:, None], chunks[:, None])

    def policy_loss(self, logprobs: Tensor, rows: RowTargets, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from algos.cloning import weighted_cloning  # loads torch

        return weighted_cloning(logprobs, rows, tokens, rows.advantages)
