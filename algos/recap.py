"""Advantage-conditioned cloning, after RECAP (pi*0.6, arXiv:2511.14759).

Every recorded chunk is cloned, good and bad ones, under an instruction that says which it was. The policy then acts
under the instruction for good ones. Unlike advantage-weighted regression, it learns from failures as well: they teach
what the other instruction means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from algos.actor_critic import ClippedValue, ClippedValueConfig
from vla_rl.core.records import Array, SuperBatch
from vla_rl.core.schema import Fraction, NonNegative

if TYPE_CHECKING:
    from torch import Tensor

    from algos.targets import RowTargets

_ANY, _GOOD, _BAD = range(3)
_ALSO_BAD = 0.1  # share of a warm start's chunks


class RECAPConfig(ClippedValueConfig):
    """Cloning conditioned on the sign of the advantage."""

    conditions: ClassVar[tuple[str, ...]] = ("", " advantage: positive", " advantage: negative")

    name: Literal["recap"] = "recap"
    positive_share: Fraction = Field(
        0.3, description="Share of a task's chunks that are called good: those with the highest advantages."
    )
    bad_weight: float = Field(
        1.0,
        ge=0.0,
        le=1.0,
        description="Weight of the chunks that are not called good, under their own condition. 1: as published. As "
        "long as a policy does not tell the conditions apart, good and bad chunks then cancel: it clones itself.",
    )
    condition_after: NonNegative = Field(
        0,
        description="First iterations, in which the policy acts without a condition: needed if the warm start does not "
        "know the conditions.",
    )
    condition_dropout: Fraction = Field(
        0.3,
        gt=0.0,
        description="Share of chunks that are cloned without a condition. The value function learns from these alone: "
        "a condition would tell it how the episode went on.",
    )

    @model_validator(mode="after")
    def _no_reference(self) -> Self:
        if self.kl_coef:
            raise ValueError(
                f"kl_coef={self.kl_coef}: the policy learns what conditions mean, of which the initial one knows "
                "nothing; set kl_coef=0, or hold the policy by bc_coef"
            )
        return self

    @property
    def needs_recompute(self) -> bool:
        return True

    def acting_condition(self, policy_version: int) -> int:
        return _GOOD if policy_version >= self.condition_after else _ANY

    def demonstration_conditions(self, draws: Array) -> Array:
        return np.where(draws < self.condition_dropout, _ANY, _GOOD)

    def warm_start_conditions(self, draws: Array) -> Array:
        """Some under the condition for bad chunks as well: a run then teaches the difference alone.

        Under words that the policy has never met it acts at random, and what corrects that disturbs all that it knows.
        """
        return np.where(draws >= 1.0 - _ALSO_BAD, _BAD, self.demonstration_conditions(draws))


class RECAP(ClippedValue):
    """Maximizes the log-probability of all recorded actions, each under the condition that it meets."""

    Config = RECAPConfig
    config: RECAPConfig

    def compute_advantages(
        self, batch: SuperBatch, proximal: Array, values: Array, q: Array | None = None
    ) -> tuple[Array, Array]:
        """0 if all episodes return the same."""
        advantages, returns = self.gae(batch, values)
        return advantages * (self.spread(batch) > 0), returns

    def choose_conditions(self, batch: SuperBatch, advantages: Array) -> Array:
        """Good: the highest ``positive_share`` of its task's advantages in the super-batch, ties by lot.

        Chunks of a task whose advantages are all equal have no condition.
        """
        conditions = np.full(batch.num_chunks, _BAD)
        rng = np.random.default_rng((batch.policy_version, batch.num_chunks))
        dropped = rng.random(batch.num_chunks) < self.config.condition_dropout
        for task in np.unique(batch.task):
            rows = rng.permutation(np.flatnonzero(batch.task == task))
            best = rows[np.argsort(-advantages[rows], kind="stable")]
            conditions[best[: round(self.config.positive_share * len(rows))]] = _GOOD
            if np.ptp(advantages[rows]) == 0:
                conditions[rows] = _ANY
        conditions[dropped] = _ANY
        return conditions

    def trains_value(self, conditions: Array) -> Array:
        return conditions == _ANY

    def policy_loss(self, logprobs: Tensor, rows: RowTargets, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from algos.cloning import weighted_cloning  # loads torch

        bad = rows.condition == _BAD
        weights = rows.weights.where(~bad, self.config.bad_weight * rows.weights)
        acted = rows.condition == _GOOD  # the others would be compared across prompts
        return weighted_cloning(logprobs, rows, tokens, weights, compared=acted)
