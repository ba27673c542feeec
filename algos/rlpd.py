"""RLPD (Ball et al., arXiv:2302.02948): SAC that draws half of each batch from demonstrations.

Its settings: LayerNorm in the critics, an ensemble of ten of which two, drawn at random, make the aim, and no entropy
in the aim. Not its own: the actor stays near executed actions, as in TD3+BC, since it begins as a good policy.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from algos.sac import SAC, SoftConfig
from vla_rl.core.schema import Positive


class RLPDConfig(SoftConfig):
    """Soft actor-critic with demonstrations in each batch."""

    name: Literal["rlpd"] = "rlpd"
    critics: Positive = Field(10, description="Members of the critic's ensemble.")
    critic_subset: Positive | None = Field(
        2, description="Members, drawn at random, whose minimum is the aim (REDQ, arXiv:2101.05982); null: all."
    )
    cloning: float = Field(
        2.0,
        ge=0.0,
        description="Coefficient of the squared distance of the means from executed actions, normalized; published: 0, "
        "with which a fine-tuned policy can be lost.",
    )

    @model_validator(mode="after")
    def _demonstrations_are_given(self) -> Self:
        if not (self.demos and self.demo_share):
            raise ValueError(
                "rlpd learns from demonstrations: name their files in algo.demos, and keep algo.demo_share above 0; "
                "without any, use algo=sac"
            )
        return self


class RLPD(SAC):
    """See the module."""

    Config = RLPDConfig
