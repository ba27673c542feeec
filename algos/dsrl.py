"""DSRL (Wagenmaker et al., arXiv:2506.15799): SAC on the noise from which a frozen flow policy denoises.

    noise = mean(s) + deviation · normal numbers          a small network's; the chunk follows from it
    Q(s, noise), L_π, L_α                                 as SAC, with the noise in the chunk's place

To memory and critic, the noise is the action. The policy's own weights stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from algos.config import UpdateWork
from algos.off_policy import ActorNeeds
from algos.sac import SAC, SoftConfig
from vla_rl.core.schema import Fraction, Positive


class DSRLConfig(SoftConfig):
    """Soft actor-critic on the noise from which a flow policy denoises; the policy itself is frozen."""

    actor_needs: ClassVar[ActorNeeds] = "steering"

    name: Literal["dsrl"] = "dsrl"
    critic_reads: Literal["images", "features", "state"] = Field(
        "features",
        description="features: the policy's; each observation passes through it once, since it is frozen. images: the "
        "critic has an encoder of its own, and each step passes the images through the policy, too. state: the "
        "simulator's state.",
    )
    critics: Positive = Field(10, description="Members of the critic's ensemble.")
    target_rate: Fraction = Field(
        0.005, description="How far Q_target moves towards Q in each step; in the critic's warm-up they are equal."
    )

    def work(self, chunk_size: int) -> UpdateWork:
        work = super().work(chunk_size)
        if self.critic_reads == "images":
            return work
        # Only what embeds a new observation passes the policy. A step of the actor is as large as one of the critic.
        rated = work.critic_rows + work.epochs
        return replace(work, epochs=0, extra_passes=1, critic_rows=rated, critic_passes=0)


class DSRL(SAC):
    """See the module."""

    Config = DSRLConfig
