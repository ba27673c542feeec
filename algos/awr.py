"""Advantage-weighted regression (arXiv:1910.00177): cloning of the run's own chunks, the better ones more.

It needs no probability ratios, so it takes any data, and a policy that almost never succeeds learns from its few
successes. Cloning the successful episodes alone (rejection-sampling fine-tuning) is the case ``weighting=success``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from algos.actor_critic import ClippedValue, ClippedValueConfig
from algos.advantages import normalize
from vla_rl.core.records import Array, SuperBatch
from vla_rl.core.schema import PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor

    from algos.targets import RowTargets


class AWRConfig(ClippedValueConfig):
    """Advantage-weighted regression, and success-filtered cloning."""

    name: Literal["awr"] = "awr"
    weighting: Literal["advantage", "success"] = Field(
        "advantage",
        description="How much each chunk is cloned. advantage: by exp(A / beta), A normalized. success: chunks of "
        "successful episodes alike, others not at all.",
    )
    beta: PositiveFloat = Field(1.0, description="advantage: the smaller, the more the best chunks prevail.")
    max_weight: PositiveFloat = Field(20.0, description="advantage: upper limit of exp(A / beta).")

    @property
    def needs_recompute(self) -> bool:
        return self.weighting == "advantage"


class AWR(ClippedValue):
    """Maximizes the log-probability of recorded actions, weighted by how good they turned out to be."""

    Config = AWRConfig
    config: AWRConfig

    def compute_advantages(
        self, batch: SuperBatch, proximal: Array, values: Array, q: Array | None = None
    ) -> tuple[Array, Array]:
        """Returns the weights of the chunks in place of their advantages.

            w = min(exp(A / beta), max_weight)                     weighting=advantage
            w = 1 / mean(1 if successful else 0), or 0             weighting=success

        Both means, that of A's normalization and that of success, are over executed control steps.
        """
        c = self.config
        advantages, returns = self.gae(batch, values)
        match c.weighting:
            case "advantage":
                scaled = normalize(advantages, batch.num_steps) / c.beta
                return np.exp(np.minimum(scaled, np.log(c.max_weight))), returns
            case "success":
                successful = np.repeat(batch.success, np.diff(batch.offsets)).astype(np.float64)
                share = np.average(successful, weights=batch.num_steps)
                return successful / share if share else successful, returns

    def policy_loss(self, logprobs: Tensor, rows: RowTargets, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from algos.cloning import weighted_cloning  # loads torch

        return weighted_cloning(logprobs, rows, tokens, rows.advantages)
