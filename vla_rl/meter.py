"""Where a process spends its time: seconds per activity, cheap enough for the inner loops."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Meter:
    """Accumulated seconds and counts by name; one writer, read from any thread."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @contextmanager
    def time(self, activity: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[activity] += time.perf_counter() - start

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] += amount

    def snapshot(self) -> dict[str, float]:
        """Totals so far, as ``<activity>_s`` and ``<name>``."""
        seconds = {f"{name}_s": value for name, value in list(self.seconds.items())}
        return seconds | {name: float(value) for name, value in list(self.counts.items())}
