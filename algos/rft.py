"""Rejection-sampling fine-tuning (arXiv:2308.01825): cloning of the run's own successful episodes, and of no others.

Advantage-weighted regression (``algos.awr``) with weights 0 and 1. It needs neither a value function nor recent data,
and chunks of failures cost the learner nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from algos.algorithm import Algorithm
from algos.config import AlgorithmConfig
from algos.targets import Targets
from vla_rl.core.records import Array, SuperBatch

if TYPE_CHECKING:
    from torch import Tensor

    from algos.targets import RowTargets


class RFTConfig(AlgorithmConfig):
    """Success-filtered cloning."""

    name: Literal["rft"] = "rft"


class RFT(Algorithm):
    """Maximizes the log-probability of the chunks of successful episodes."""

    Config = RFTConfig
    config: RFTConfig

    def compute_advantages(
        self, batch: SuperBatch, proximal: Array, values: Array, q: Array | None = None
    ) -> tuple[Array, Array]:
        """Returns 1 for the chunks of successful episodes and 0 for others in place of advantages."""
        successful = np.repeat(batch.success, np.diff(batch.offsets)).astype(np.float64)
        return successful, np.zeros(batch.num_chunks)

    def trained_chunks(self, targets: Targets) -> Array:
        return np.flatnonzero(targets.advantages)

    def policy_loss(self, logprobs: Tensor, rows: RowTargets, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from algos.cloning import weighted_cloning  # loads torch

        return weighted_cloning(logprobs, rows, tokens, rows.advantages)
