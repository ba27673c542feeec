"""Group-relative policy optimization (arXiv:2402.03300) on action chunks, and its relatives.

A return is compared with the returns of other episodes from the same start; there is no value function.
"""

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from algos.advantages import Baseline, Scale, episode_returns, group_advantages
from algos.config import PolicyGradientConfig
from algos.denominators import LossDenominators
from algos.policy_gradient import PolicyGradient
from vla_rl.core.records import Array, GroupRules, SuperBatch
from vla_rl.core.schema import Fraction, NonNegative, PositiveFloat


class GroupRelativeConfig(PolicyGradientConfig):
    """Algorithms that compare the episodes of a group."""

    clip_high: PositiveFloat = Field(
        0.28, description="See clip_low. Above clip_low, rare actions may become likely (clip-higher)."
    )
    group_size: int = Field(8, ge=2, description="Episodes of one task and start that are compared.")
    baseline: Baseline = Field(
        "mean", description="What a return is compared with: the mean of its group, with or without itself."
    )
    scale: Scale = Field(
        "group", description="What advantages are divided by: their deviation in the group, in the batch, or 1."
    )
    average: Literal["elements", "episodes", "constant"] = Field(
        "elements",
        description="How the loss is averaged. elements: over all ratios. episodes: within each episode, then over "
        "episodes. constant: sum over ratios divided by the number that the time limit allows (Dr. GRPO).",
    )
    success_low: Fraction = Field(0.0, description="Groups with a lower success rate are replaced, too.")
    success_high: Fraction = Field(1.0, description="Groups with a higher success rate are replaced, too.")
    max_filtered: NonNegative = Field(
        64,
        description="Dynamic sampling: groups whose episodes all have the same return are replaced by others. After "
        "this many in a row, the next group is trained on in any case; 0: none is replaced.",
    )

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.success_low > self.success_high:
            raise ValueError(
                f"success_low={self.success_low} above success_high={self.success_high} would filter out every group"
            )
        return self

    @property
    def groups(self) -> GroupRules:
        return GroupRules(self.group_size, self.success_low, self.success_high, self.max_filtered)


class GroupRelative(PolicyGradient):
    """Every chunk of an episode gets the episode's advantage over its group."""

    config: GroupRelativeConfig

    def compute_advantages(
        self, batch: SuperBatch, proximal: Array, values: Array, q: Array | None = None
    ) -> tuple[Array, Array]:
        returns = episode_returns(batch.rewards, batch.num_steps, batch.offsets)
        c = self.config
        advantages = group_advantages(returns, batch.group, baseline=c.baseline, scale=c.scale)
        return np.repeat(advantages, np.diff(batch.offsets)), np.zeros(batch.num_chunks)

    def element_weights(self, batch: SuperBatch) -> Array:
        """1 gives the mean over all elements of the batch."""
        level, dim = self.config.ratio_level, batch.logprobs.shape[2]
        episodes = np.split(batch.num_steps, batch.offsets[1:-1])
        elements = np.array([LossDenominators.of(steps).elements(level, dim) for steps in episodes])
        match self.config.average:
            case "elements":
                return np.ones(batch.num_chunks)
            case "episodes":
                return np.repeat(elements.mean() / elements, np.diff(batch.offsets))
            case "constant":
                chunks, steps = -(-batch.max_episode_steps // batch.rewards.shape[1]), batch.max_episode_steps
                longest = LossDenominators(chunks=chunks, steps=steps, value_chunks=chunks).elements(level, dim)
                return np.full(batch.num_chunks, elements.mean() / longest)


class GRPOConfig(GroupRelativeConfig):
    """Group-relative policy optimization, by default with the settings of DAPO (arXiv:2503.14476).

    DAPO: clip-higher, dynamic sampling, and the mean over all ratios. GRPO as published is average=episodes, and so is
    SimpleVLA-RL (arXiv:2509.09674). Dr. GRPO (arXiv:2503.20783) is scale=none average=constant. REINFORCE++ with a
    group baseline (arXiv:2501.03262) is scale=batch.
    """

    name: Literal["grpo"] = "grpo"


class GRPO(GroupRelative):
    """See ``GRPOConfig``."""

    Config = GRPOConfig
