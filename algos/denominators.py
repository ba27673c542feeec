"""What the sums of a loss are divided by."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from algos.config import RatioLevel
from vla_rl.core.records import Array


@dataclass(frozen=True, slots=True)
class LossDenominators:
    """Counts of one optimizer step, over all micro-batches and ranks."""

    chunks: int  # with at least one executed step
    steps: int  # executed

    @classmethod
    def of(cls, num_steps: Array) -> Self:
        """Counts of chunks with these numbers of executed steps (int [m]); 0 marks padding."""
        return cls(chunks=int(np.count_nonzero(num_steps)), steps=int(np.sum(num_steps)))

    def elements(self, level: RatioLevel, action_dim: int) -> int:
        """Number of probability ratios at ``level``."""
        return {"token": self.steps * action_dim, "action": self.steps, "chunk": self.chunks}[level]
