"""Best of N: the critic chooses among chunks that the policy draws, and the choice is cloned. For every kind of policy.

    aim = r + γ^n V(s')                                   Q(s, a) moves towards it, on executed chunks
    V(s)  moves towards the expectile of min Q_target(s, a), a executed       (IQL, arXiv:2110.06169)
    a*  = argmax min Q(s, a), a among N draws from π(s) and, in a success, the executed chunk
    L_π = − mean log π(a* | s)

Choosing among a policy's own chunks is IDQL's way (arXiv:2304.10573); cloning the choice is policy-agnostic RL's
(arXiv:2412.06685). No gradient passes through an action, so that actions may be tokens or denoised.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from algos.config import UpdateWork
from algos.off_policy import ActorNeeds, OffPolicyAlgorithm, OffPolicyConfig
from vla_rl.core.schema import Positive

if TYPE_CHECKING:
    from torch import Tensor


class BestOfNConfig(OffPolicyConfig):
    """Best of N: the critic chooses among chunks of the policy, which clones the choice."""

    actor_needs: ClassVar[ActorNeeds] = "nothing"
    rates_states: ClassVar[bool] = True

    name: Literal["best_of_n"] = "best_of_n"
    candidates: Positive = Field(
        8, description="Chunks that the policy draws in each state of the actor's batch: as many passes."
    )
    expectile: float = Field(
        0.7, gt=0.0, lt=1.0, description="Which expectile of the executed chunks' ratings the value function learns."
    )

    def work(self, chunk_size: int) -> UpdateWork:
        work = super().work(chunk_size)
        return replace(work, extra_passes=work.extra_passes + work.epochs * self.candidates)


class BestOfN(OffPolicyAlgorithm):
    """See the module."""

    Config = BestOfNConfig
    config: BestOfNConfig

    def critic_loss(self, td: Tensor, target_q: Tensor, values: Tensor) -> Tensor:
        """The loss of Q and V, a scalar.

        Args:
            td: the loss of the executed chunks towards their aims, a scalar.
            target_q: [n, members], of the executed chunks, by the target networks.
            values: [n], V in the same states.
        """
        from algos import td_losses  # loads torch

        better = target_q.detach().min(dim=1).values - values
        return td + td_losses.expectile_loss(better, self.config.expectile)

    def actor_loss(self, logprobs: Tensor, counted: Tensor) -> Tensor:
        """Cloning, nats an action number: ``logprobs`` [n, K, A] of the choices, of which steps ``counted`` [n, K]."""
        from algos import td_losses  # loads torch

        return -td_losses.executed_mean(logprobs, counted)
