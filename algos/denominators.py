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
    value_chunks: int  # chunks that the value function learns from

    @classmethod
    def of(cls, num_steps: Array, trains_value: Array | None = None) -> Self:
        """Counts of chunks with these numbers of executed steps (int [m]); 0 marks padding.

        ``trains_value``: bool [m]; None: the value function learns from all of them.
        """
        chunks = int(np.count_nonzero(num_steps))
        value_chunks = chunks if trains_value is None else int(np.count_nonzero(num_steps[trains_value]))
        return cls(chunks=chunks, steps=int(np.sum(num_steps)), value_chunks=value_chunks)

    def elements(self, level: RatioLevel, action_dim: int) -> int:
        """Number of probability ratios at ``level``."""
        return {"token": self.steps * action_dim, "action": self.steps, "chunk": self.chunks}[level]
