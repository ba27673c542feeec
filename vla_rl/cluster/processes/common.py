"""What all processes share: where they run, time limits, and the lease of the device that a process computes on."""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vla_rl.cluster.processes.pulse import Limits, Pulse
from vla_rl.core.devices.lock import DeviceLease, DeviceLock
from vla_rl.observability.spans import SpanLog
from vla_rl.placement.plan import Process

CALL_TIMEOUT_S = 60.0  # a call that only reads or writes state
LEASE_TIMEOUT_S = 600.0  # longer than any micro-batch
_MOST_NOTES = 20


def working_in(folder: Path, cls: type) -> type:
    """``cls``, made in the driver's working directory, so that relative paths of a config mean the same everywhere.

    On a node that has no such folder it stays where Ray has started it.
    """

    class Working(cls):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            with contextlib.suppress(OSError):
                os.chdir(folder)
            super().__init__(*args)

    Working.__name__ = Working.__qualname__ = cls.__name__  # what Ray calls the process
    return Working


class Notes(logging.Handler):
    """The warnings of this project's own code in a process, for the lines of the run: a process's log is not read."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: deque[str] = deque(maxlen=_MOST_NOTES)
        for package in ("algos", "envs", "vla_rl"):
            logging.getLogger(package).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())

    def take(self) -> list[str]:
        """Those since the last call; of very many, the last ones."""
        return [self._texts.popleft() for _ in range(len(self._texts))]


class Vital:
    """A process without which the run cannot go on."""

    def stay(self) -> None:
        """Does not return: whoever has called it sees the process die, whatever else is waited for."""
        threading.Event().wait()


class Traced:
    """A process that records its activities if that is wanted (``log.trace``)."""

    spans: SpanLog | None = None

    def record_spans(self, process: Process, wanted: bool) -> None:
        """Call first; ``spans`` is then for the meters of the process."""
        self.spans = SpanLog(process.role, process.index, process.node) if wanted else None

    def take_spans(self) -> bytes:
        """See ``SpanLog.take``."""
        return b"" if self.spans is None else self.spans.take()


@dataclass(frozen=True, slots=True)
class PulseAddress:
    """Where a process shows its progress."""

    path: Path
    row: int
    stall_s: float  # placement.stall_timeout_s
    setup_s: float

    def open(self, process: Process) -> Pulse:
        lease = 0.0 if process.lock is None else LEASE_TIMEOUT_S
        limits = Limits(self.stall_s, max(self.stall_s, self.setup_s), lease, self.stall_s + lease)
        return Pulse(self.path, self.row, limits)


def device_lease(process: Process, lock_server: Path, spans: SpanLog | None = None) -> DeviceLease:
    """Lease a shared device through the lock server; on a device of its own, a process computes at any time.

    ``spans``: where to record how long each lease was waited for.
    """
    if process.lock is None:
        return nullcontext
    lock = DeviceLock(lock_server, process.lock, f"{process.role} {process.index}")
    lease = partial(lock.lease, LEASE_TIMEOUT_S)
    return lease if spans is None else partial(_recorded, lease, spans)


@contextlib.contextmanager
def _recorded(lease: DeviceLease, spans: SpanLog) -> Iterator[None]:
    start = time.perf_counter_ns()
    with lease():
        spans.add("lease", start, time.perf_counter_ns() - start)
        yield
