"""Where a process spends its time: seconds per activity, cheap enough for inner loops.

For activities whose calls have a size, a meter also keeps the sums from which a line ``fixed + each * size`` is fitted.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from vla_rl.observability.spans import SpanLog


@dataclass(slots=True)
class LineSums:
    """Sums over calls of size n that took t seconds, for a linear fit. They add up over processes."""

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
    """Accumulated seconds, counts and line sums by name. One thread writes; any thread may read."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    lines: dict[str, LineSums] = field(default_factory=dict)
    observer: Callable[[str, float | None], None] | None = None  # told of each start (None) and end (seconds)
    spans: SpanLog | None = None  # where timed blocks are recorded, too

    @contextmanager
    def time(self, activity: str, size: float | None = None) -> Iterator[Call]:
        """Time the block. ``size``: how much it does; if only the result tells, set ``size`` of the yielded call."""
        call = Call(size)
        start = time.perf_counter_ns()
        try:
            with self.shown(activity):
                yield call
        finally:
            duration = time.perf_counter_ns() - start
            self.add(activity, duration * 1e-9, call.size)
            if self.spans is not None:
                self.spans.add(activity, start, duration, call.size)

    @contextmanager
    def shown(self, activity: str) -> Iterator[None]:
        """Show the block to the observer."""
        observer = self.observer
        if observer is None:
            yield
            return
        observer(activity, None)
        start = time.perf_counter()
        try:
            yield
        finally:
            observer(activity, time.perf_counter() - start)

    def add(self, activity: str, seconds: float, size: float | None = None) -> None:
        """Add a call that was timed by other means."""
        self.seconds[activity] += seconds
        if size is None:
            return
        if activity in self.lines:
            self.lines[activity].add(size, seconds)
        else:  # Skip the first call: one-time loading would skew the fit.
            self.lines[activity] = LineSums()

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] += amount

    def snapshot(self) -> dict[str, float]:
        """Totals so far: ``<activity>_s``, ``<name>``, and for calls with a size ``<activity>_calls``, ``_n``, ``_nn``,
        ``_nt`` and ``_t`` (``LineSums``, without each process's first call); ``cpu_s``, processor time of the process.
        """
        seconds = {f"{name}_s": value for name, value in list(self.seconds.items())}
        counts = {name: float(value) for name, value in list(self.counts.items())}
        lines = {f"{name}_{key}": x for name, sums in list(self.lines.items()) for key, x in asdict(sums).items()}
        return seconds | counts | lines | {"cpu_s": time.process_time()}
