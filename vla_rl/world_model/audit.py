"""Is the world model right? Judged on real chunks that it has not learned from; no episode is played for it.

For a real chunk the model says how much better it is than B other chunks of the policy from the same state, the
imagined ones: ``Q - m``, with m the mean of their ratings Q_i and v their variance. The real chunk and the others are
independent draws of one policy. With G, what the episode earned after this decision,

    slope = sum((Q - m)(G - m) - v / B) / sum((Q - m)^2 - v / B)

estimates ``Cov(Q, G) / Var(Q)`` over the policy's chunks *within* a state. It is 1 for a right model, 0 for one that
knows nothing about actions, however well it judges states, and negative for one that misleads. The terms v / B take
away what m has in common with itself, so that numerator and denominator are unbiased. The standard error is that of a
ratio of means over chunks.

Few chunks measure the slope badly, so it is combined with an expectation, as normal distributions are: each weighs as
much as the inverse square of its error. Imagined advantages are multiplied by the result, which is their regression on
real returns: a timid model is trusted more, one that exaggerates less, and one that is wrong not at all.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_rl.core.records import Array

LEAST_CHUNKS = 64  # below which the slope is not measured


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the audit has found, over its newest chunks.

    Attributes:
        passed: whether the combined slope is large enough.
        slope, error: as measured, and its standard error; nan as long as there are too few chunks.
        scale: factor for imagined advantages, 0 .. ``max_scale``: the combined slope, 0 unless passed.
        chunks: how many chunks were judged.
        auroc: of the predicted return, for whether the episode succeeded; also a good judge of states has a high one.
        bias: mean of predicted minus real return.
    """

    passed: bool
    slope: float
    error: float
    scale: float
    chunks: int
    auroc: float
    bias: float

    def metrics(self) -> dict[str, float]:
        """For the run's log; figures that do not exist yet are left out."""
        values = {
            "audit_passed": float(self.passed),
            "audit_slope": self.slope,
            "audit_error": self.error,
            "audit_scale": self.scale,
            "audit_chunks": float(self.chunks),
            "audit_auroc": self.auroc,
            "audit_bias": self.bias,
        }
        return {name: value for name, value in values.items() if np.isfinite(value)}


class Audit:
    """The newest ``capacity`` audited chunks."""

    def __init__(self, capacity: int, prior: tuple[float, float], least: float, max_scale: float) -> None:
        """``prior``: the expected slope and its standard error. ``least``: combined slope that passes."""
        self._chunks: deque[tuple[float, ...]] = deque(maxlen=capacity)  # Q, m, v / B and G of each
        self._prior, self._least, self._max_scale = prior, least, max_scale

    def add(self, ratings: Array, others: Array, returns: Array) -> None:
        """n real chunks, of which the model has not learned.

        Args:
            ratings: [n], the model's.
            others: [n, B], its ratings of B other chunks of the policy from the same states.
            returns: [n], what the episodes earned after these decisions.
        """
        mean, own = others.mean(axis=1), others.var(axis=1, ddof=1) / others.shape[1]
        self._chunks.extend(zip(ratings.tolist(), mean.tolist(), own.tolist(), returns.tolist(), strict=True))

    def verdict(self) -> Verdict:
        rating, mean, own, earned = np.array(self._chunks, np.float64).reshape(-1, 4).T
        power = (rating - mean) ** 2 - own
        if len(rating) < LEAST_CHUNKS or power.sum() <= 0.0:
            return self._verdict(np.nan, np.inf, chunks=len(rating), auroc=np.nan, bias=np.nan)
        covariance = (rating - mean) * (earned - mean) - own
        slope = float(covariance.sum() / power.sum())
        error = float(np.sqrt(((covariance - slope * power) ** 2).sum()) / power.sum())
        bias = float((rating - earned).mean())
        return self._verdict(slope, error, chunks=len(rating), auroc=_auroc(rating, earned > 0.0), bias=bias)

    def _verdict(self, slope: float, error: float, **figures: Any) -> Verdict:
        expected, uncertainty = self._prior
        trust = uncertainty**2 / (uncertainty**2 + error**2)  # in the measurement
        combined = expected if trust == 0.0 else expected + trust * (slope - expected)
        passed = combined >= self._least
        return Verdict(passed, slope, error, min(combined, self._max_scale) if passed else 0.0, **figures)

    def state(self) -> list[tuple[float, ...]]:
        """JSON-able, for a checkpoint."""
        return list(self._chunks)

    def restore(self, state: list[Any]) -> None:
        """Continue from ``state()``."""
        self._chunks.clear()
        self._chunks.extend(tuple(map(float, chunk)) for chunk in state)


def _auroc(score: Array, label: Array) -> float:
    """Probability that a positive has a higher score than a negative, ties counted half; nan without both."""
    positives, negatives = int(label.sum()), int((~label).sum())
    if positives == 0 or negatives == 0:
        return float("nan")
    _, place, counts = np.unique(score, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return float((ranks[place][label].sum() - positives * (positives + 1) / 2) / (positives * negatives))
