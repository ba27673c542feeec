"""What a run has recorded, as its causes read it, and what a cause says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import yaml

from vla_rl.core.files import json_or_empty
from vla_rl.observability.plots import Metrics, read_metrics, rollouts_key, series

WINDOW = 20  # updates, the last ones, of which a figure is typical; their median ignores single bad ones
PAGE = "docs/troubleshooting.md"


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a run, or limits its speed.

    Attributes:
        cause: its section of docs/troubleshooting.md.
        title: one clause.
        evidence: the recorded figures, and what they are compared with.
        remedy: what to do, or the command that tells more.
        kind: "fault"; "likely" where the figures allow other explanations; "speed" for what is no fault.
    """

    cause: str
    title: str
    evidence: str
    remedy: str
    kind: Literal["fault", "likely", "speed"] = "fault"

    def lines(self) -> tuple[str, str]:
        """Two lines for a terminal."""
        likely = "likely: " if self.kind == "likely" else ""
        return f"{likely}{self.title}. {self.evidence}", f"{self.remedy} ({PAGE}#{self.cause})"


class Verdict(NamedTuple):
    """Evidence and remedy of a cause that applies."""

    evidence: str
    remedy: str
    weaker: bool = False  # than the cause usually has


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run's metrics, and, unless only these were copied, its config as plain data and its metadata."""

    metrics: Metrics
    config: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Path) -> Self:
        """Of a run folder, also of a run under way, or of a copy of its ``metrics.jsonl``. Raises UserError."""
        try:
            config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            config = {}
        config = config if isinstance(config, dict) else {}
        return cls(read_metrics(run), config, json_or_empty(run / "metadata.json"))

    def setting(self, key: str, default: Any = None) -> Any:
        """A key of the config such as "algo.target_kl"; ``default`` where it is null, or not known."""
        group, _, name = key.partition(".")
        keys = self.config.get(group)
        found = keys.get(name) if isinstance(keys, dict) else None
        return default if found is None else found

    def points(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Iterations and values of a metric; the evaluation before the first update left out."""
        return series([m for m in self.metrics if m["iteration"] > 0], key)

    def values(self, key: str) -> np.ndarray:
        return self.points(key)[1]

    def typical(self, key: str) -> float:
        """The median of the last ``WINDOW`` updates; NaN where there are none."""
        recent = self.values(key)[-WINDOW:]
        return float(np.median(recent)) if len(recent) else math.nan

    def last(self, key: str, default: float = 0.0) -> float:
        """The newest value."""
        return next((m[key] for m in reversed(self.metrics) if key in m), default)

    def grown(self, key: str) -> float:
        """By how much a counter has grown in the last ``WINDOW`` updates."""
        values = series(self.metrics, key)[1][-WINDOW - 1 :]
        return float(values[-1] - values[0]) if len(values) else 0.0

    @property
    def success_now(self) -> float:
        """The best of the newest evaluations and the last updates' rollouts."""
        kinds = [self.last(f"eval/{kind}_success") for kind in ("greedy", "sampled")]
        return max(*kinds, float(np.nan_to_num(self.typical(rollouts_key(self.metrics)))))

    @property
    def played(self) -> int:
        """Training episodes, those of updates where no more is known."""
        return int(max(self.last("episodes/played"), self.values("rollout/episodes").sum()))

    @property
    def never_succeeds(self) -> bool:
        """Whether neither a rollout nor an evaluation has ever succeeded."""
        names = ("rollout/success", "rollout/success_played", "eval/greedy_success", "eval/sampled_success")
        return not any(m.get(name) for m in self.metrics for name in names)

    def rise(self, key: str) -> tuple[float, float] | None:
        """Means of a metric over the first and the last third of the updates, if it rose by more than its noise."""
        values = self.values(key)
        if (third := len(values) // 3) < 3:
            return None
        first, last = values[:third], values[-third:]
        noise = math.sqrt((first.var() + last.var()) / third)
        rose = last.mean() - first.mean() > max(3 * noise, 1e-6)
        return (float(first.mean()), float(last.mean())) if rose else None

    @property
    def learns(self) -> bool:
        """Whether the rollouts' success rises."""
        return self.rise(rollouts_key(self.metrics)) is not None
