"""Where a process spends its time: seconds per activity, cheap enough for the inner loops; and, of activities whose
calls have a size, what a straight line of seconds over sizes follows from."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class LineSums:
    """Sums over calls of size n that took t seconds: they add up over processes, and grow with time."""

    calls: float = 0.0
    n: float = 0.0
    nn: float = 0.0
    nt: float = 0.0
    t: float = 0.0

    def add(self, size: float, seconds: float) -> None:
        self.calls += 1
        self.n += size
        self.nn += size * size
        self.nt += size * seconds
        self.t += seconds


@dataclass(slots=True)
class Call:
    """A call that is being timed."""

    size: float | None


@dataclass(slots=True)
class Meter:
    """Accumulated seconds, counts and line sums by name; one writer, read from any thread."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    lines: dict[str, LineSums] = field(default_factory=dict)

    @contextmanager
    def time(self, activity: str, size: float | None = None) -> Iterator[Call]:
        """``size``: how much the call does; where only its result tells, set ``size`` of what is yielded."""
        call = Call(size)
        start = time.perf_counter()
        try:
            yield call
        finally:
            self.add(activity, time.perf_counter() - start, call.size)

    def add(self, activity: str, seconds: float, size: float | None = None) -> None:
        """A call that was timed by other means."""
        self.seconds[activity] += seconds
        if size is None:
            return
        if activity in self.lines:
            self.lines[activity].add(size, seconds)
        else:  # the first call loads and allocates what all others find: no line is to pass through it
            self.lines[activity] = LineSums()

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] += amount

    def snapshot(self) -> dict[str, float]:
        """Totals so far, as ``<activity>_s``, ``<name>`` and, where calls have a size, ``<activity>_calls``, ``_n``,
        ``_nn``, ``_nt`` and ``_t`` (``LineSums``, without each process's first call)."""
        seconds = {f"{name}_s": value for name, value in list(self.seconds.items())}
        counts = {name: float(value) for name, value in list(self.counts.items())}
        lines = {f"{name}_{key}": x for name, sums in list(self.lines.items()) for key, x in asdict(sums).items()}
        return seconds | counts | lines
