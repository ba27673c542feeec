"""What the sums of a loss are divided by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from vla_rl.core.records import Array

RatioLevel = Literal["token", "action", "chunk"]  # what one probability ratio covers


@dataclass(frozen=True, slots=True)
class LossDenominators:
    """Of one optimizer step. Counts of disjoint rows add up."""

    chunks: int
    steps: int  # executed

    @classmethod
    def of(cls, num_steps: Array) -> LossDenominators:
        """Of chunks with these numbers of executed steps ([m]); those with 0 are padding."""
        return cls(chunks=int(np.count_nonzero(num_steps)), steps=int(np.sum(num_steps)))

    def __add__(self, other: LossDenominators) -> LossDenominators:
        return LossDenominators(self.chunks + other.chunks, self.steps + other.steps)

    def elements(self, level: RatioLevel, action_dim: int) -> int:
        """Number of probability ratios."""
        return {"token": self.steps * action_dim, "action": self.steps, "chunk": self.chunks}[level]
