"""ConfigGroup-relative policy optimization (arXiv:2402.03300) on action chunks, with the settings that turn it into its kin.

A return is compared with those of the other episodes from the same start; there is no value function.
"""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from algos.advantages import episode_returns, group_advantages
from algos.config import AlgorithmConfig
from algos.denominators import LossDenominators
from vla_rl.core.records import Array, GroupRules, SuperBatch
from vla_rl.core.schema import Fraction, NonNegative, PositiveFloat


class GroupRelative(AlgorithmConfig):
    """Every chunk of an episode has the episode's advantage."""

    clip_high: PositiveFloat = Field(0.28, description="Above clip_low: rare actions may become likely (clip-higher).")
    group_size: int = Field(8, ge=2, description="Episodes of one task and placement that are compared.")
    baseline: Literal["mean", "leave_one_out"] = Field(
        "mean", description="What a return is compared with: its group's mean, with or without itself."
    )
    scale: Literal["group", "batch", "none"] = Field(
        "group", description="What advantages are divided by: their unbiased deviation in the group, in the batch, 1."
    )
    average: Literal["elements", "episodes", "constant"] = Field(
        "elements",
        description="The loss is the mean over all ratios; over episodes, of each one's mean; or, as in Dr. GRPO, the "
        "sum over ratios by what the longest episode of the batch has.",
    )
    success_low: Fraction = Field(0.1, description="Groups with a lower success rate are replaced (dynamic sampling).")
    success_high: Fraction = Field(0.9, description="Groups with a higher success rate are replaced.")
    max_filtered: NonNegative = Field(
        64, description="Groups replaced in a row, after which any group is trained on, until a better one comes."
    )

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.success_low > self.success_high:
            raise ValueError(
                f"success_low={self.success_low} above success_high={self.success_high} would filter out every group"
            )
        return self

    def compute_advantages(self, batch: SuperBatch, proximal: Array, values: Array) -> tuple[Array, Array]:
        returns = episode_returns(batch.rewards, batch.num_steps, batch.offsets)
        advantages = group_advantages(returns, batch.group, baseline=self.baseline, scale=self.scale)
        # The surrogate scales with the advantage, so an episode's weight in the average can be a part of it.
        per_chunk = np.repeat(advantages * self._weights(batch), np.diff(batch.offsets))
        return per_chunk, np.zeros(batch.num_chunks)

    def _weights(self, batch: SuperBatch) -> Array:
        """float64 [B]: how much each of an episode's elements counts, where 1 is the mean over all elements."""
        dim = batch.tokens.shape[2]
        elements = np.array(
            [
                LossDenominators.of(batch.num_steps[first:last]).elements(self.ratio_level, dim)
                for first, last in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
            ]
        )
        match self.average:
            case "elements":
                return np.ones(len(elements))
            case "episodes":
                return elements.mean() / elements
            case "constant":
                return np.full(len(elements), elements.mean() / elements.max())

    @property
    def groups(self) -> GroupRules:
        return GroupRules(self.group_size, self.success_low, self.success_high, self.max_filtered)


class GRPO(GroupRelative):
    """The defaults are DAPO's (arXiv:2503.14476): a higher upper clip, groups without a difference replaced, the mean
    over all ratios.

    GRPO as published is average=episodes, and so is SimpleVLA-RL (arXiv:2509.09674); Dr. GRPO (arXiv:2503.20783)
    scale=none, average=constant; REINFORCE++ with a group baseline (arXiv:2501.03262) scale=batch.
    """

    name: Literal["grpo"] = "grpo"
