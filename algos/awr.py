"""Advantage-weighted regression (arXiv:1910.00177): cloning of the run's own chunks, the better ones more.

It needs no probability ratios, so it takes any data. With weights 0 and 1 by success it is ``algos.rft``.
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
    """Advantage-weighted regression."""

    name: Literal["awr"] = "awr"
    beta: PositiveFloat = Field(
        1.0,
        description="A chunk counts exp(A / beta) times, A normalized: the smaller, the more the best prevail.",
    )
    max_weight: PositiveFloat = Field(20.0, description="Upper limit of exp(A / beta).")

    @property
    def needs_recompute(self) -> bool:
        return True


class AWR(ClippedValue):
    """Maximizes the log-probability of recorded actions, weighted by how good they turned out to be."""

    Config = AWRConfig
    config: AWRConfig

    def compute_advantages(
        self, batch: SuperBatch, proximal: Array, values: Array, q: Array | None = None
    ) -> tuple[Array, Array]:
        """Returns ``min(exp(A / beta), max_weight)`` in place of advantages; A is normalized over control steps.

        0 if all episodes return the same: no chunk is then known to be better than another.
        """
        advantages, returns = self.gae(batch, values)
        spread = self.spread(batch)
        scaled = normalize(advantages, batch.num_steps, spread) / self.config.beta
        return np.exp(np.minimum(scaled, np.log(self.config.max_weight))) * (spread > 0), returns

    def policy_loss(self, logprobs: Tensor, rows: RowTargets, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from algos.cloning import weighted_cloning  # loads torch

        return weighted_cloning(logprobs, rows, tokens, rows.advantages)
