"""Progress of a run's processes: one that is frozen, or hangs in a call, is found and killed, as if it had died.

    component ──▶ its meter ──observer──▶ Pulse ──▶ [ a row in shared memory ] ◀── Pulses, looked at by the driver

A process writes when it made progress last, and how long what it does now may take. Components know nothing of this:
their meters tell when an activity starts and ends.
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from vla_rl.core.ipc.shared_memory import SharedArrays

_TIMES_LONGEST = 20  # an activity may take so many times its longest recent call
_REMEMBERED = 0.995  # of the longest call's duration, at each later call: half of it after 138 calls
_UNWATCHED = 0  # in place of a limit
_PATIENT_S = 30.0  # whoever looks less often than that was frozen itself, or busy
_BEAT_S = 1.0
_MAY_WAIT_FOREVER = frozenset({"offloaded"})
_LEASES_INSIDE = frozenset({"infer", "train"})  # activities that wait for a device that others may hold


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds without progress that end a process."""

    least: float  # of any activity
    first: float  # of an activity's first call: loading, compiling
    lease: float  # added to activities that wait for a shared device; 0 on a device of its own
    between: float  # two activities


class Pulse:
    """A process's side. Call it as the observer of a ``Meter``, in one thread.

    A process that waits to be called makes no progress of its own: ``beat`` shows that it is not frozen.
    """

    def __init__(self, path: Path, row: int, limits: Limits) -> None:
        self._row = SharedArrays.attach(path)["rows"][row]
        self._row[:] = os.getpid(), time.monotonic_ns(), _UNWATCHED
        self._limits = limits
        self._longest: dict[str, float] = {}
        self._calls: Counter[str] = Counter()
        self._inside: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, activity: str, seconds: float | None) -> None:
        """The activity starts (None), or has ended after so many seconds."""
        with self._lock:
            if seconds is None:
                self._inside.append(activity)
            else:
                self._remember(activity, seconds)
                if self._inside:
                    self._inside.pop()
            self.expect(self._allowed())

    def _remember(self, activity: str, seconds: float) -> None:
        """The first call counts until there is a second one: loading and compiling say nothing of later calls."""
        self._calls[activity] += 1
        longest = self._longest[activity] if self._calls[activity] > 2 else 0.0
        self._longest[activity] = max(seconds, _REMEMBERED * longest)

    def beat(self, alive: Callable[[], object] = lambda: None) -> None:
        """Show progress every second, in a thread, while no activity is under way.

        ``alive``: called before each beat; it returns unless the process hangs.
        """
        threading.Thread(target=self._beat, args=(alive,), name="pulse", daemon=True).start()

    def _beat(self, alive: Callable[[], object]) -> None:
        while True:
            alive()
            with self._lock:
                if not self._inside:
                    self.expect(self._limits.between)
            time.sleep(_BEAT_S)

    def expect(self, seconds: float) -> None:
        """There was progress, and there will be more within so many seconds; infinity: whenever it may be."""
        self._row[2] = _UNWATCHED  # while the other changes
        self._row[1] = time.monotonic_ns()
        self._row[2] = _UNWATCHED if seconds == float("inf") else int(seconds * 1e9)

    def rest(self) -> None:
        """Nothing is expected any more."""
        self._inside.clear()
        self.expect(float("inf"))

    def _allowed(self) -> float:
        limits = self._limits
        if not self._inside:
            return limits.between
        activity = self._inside[-1]
        if activity in _MAY_WAIT_FOREVER:
            return float("inf")
        known = self._longest.get(activity)
        least = limits.first if known is None else max(limits.least, _TIMES_LONGEST * known)
        return least + limits.lease * (activity in _LEASES_INSIDE)


class Pulses:
    """A node's side: all rows."""

    def __init__(self, file: SharedArrays) -> None:
        self._rows = file["rows"]
        self._looked = time.monotonic()

    @classmethod
    def create(cls, path: Path, count: int) -> Self:
        return cls(SharedArrays.create(path, {"rows": ((count, 3), "<i8")}))  # process id, time and limit in ns

    def kill_overdue(self) -> dict[int, float]:
        """Kill the processes that have made no progress for too long; returns for how many seconds, by row.

        If nobody has looked for a while, all processes may have been frozen together: they get another chance.
        """
        now = time.monotonic()
        paused, self._looked = now - self._looked > _PATIENT_S, now
        if paused:
            self._rows[:, 1] = time.monotonic_ns()
            return {}
        killed: dict[int, float] = {}
        for row, (pid, since, limit) in enumerate(self._rows.tolist()):
            silent = time.monotonic_ns() - since
            if limit != _UNWATCHED and silent > limit:
                self._rows[row, 2] = _UNWATCHED
                killed[row] = silent * 1e-9
                _kill(pid)
        return killed


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it is quicker
