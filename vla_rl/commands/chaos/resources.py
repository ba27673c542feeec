"""What a run holds over time: memory, file descriptors, threads, shared memory. All of it stays flat in a sound run."""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from vla_rl.core.ipc.shared_memory import shared_root
from vla_rl.core.machine import GIB
from vla_rl.observability.plots import figure

_EVERY_S = 5.0
SERIES = {"memory": "memory (GiB)", "descriptors": "file descriptors", "threads": "threads", "shared": "/dev/shm (GiB)"}


@dataclass(slots=True)
class Samples:
    """One entry for each moment, over all processes of a run."""

    seconds: list[float] = field(default_factory=list)  # since the first
    series: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SERIES})
    memory_of: list[dict[str, float]] = field(default_factory=list)  # GiB, by the name of a process

    def growth(self) -> dict[str, float]:
        """Of each series, the median of the last quarter minus that of the second."""
        return {name: _growth(values) for name, values in self.series.items()} if len(self.seconds) >= 4 else {}

    def growth_of_memory(self) -> dict[str, float]:
        """Likewise, in MiB, by the name of the processes; those that are there most of both quarters."""
        names = sorted(set[str]().union(*self.memory_of)) if len(self.seconds) >= 4 else []
        grown = {name: 1024 * _growth([held.get(name, np.nan) for held in self.memory_of]) for name in names}
        return {name: value for name, value in grown.items() if np.isfinite(value)}


def _growth(values: Sequence[float]) -> float:
    """nan if values are missing (nan) in half of either quarter."""
    quarter = len(values) // 4
    late, early = np.array(values[-quarter:]), np.array(values[quarter : 2 * quarter])
    if max(np.isnan(late).mean(), np.isnan(early).mean()) >= 0.5:
        return float("nan")
    return float(np.nanmedian(late) - np.nanmedian(early))


@contextmanager
def sampled(processes: Callable[[], Sequence[psutil.Process]], every: float = _EVERY_S) -> Iterator[Samples]:
    """Within the block, ``processes()`` are looked at every so many seconds."""
    samples, stop, start = Samples(), threading.Event(), time.monotonic()

    def look() -> None:
        while not stop.wait(every):
            found, memory_of = _totals(processes())
            samples.memory_of.append(memory_of)
            samples.seconds.append(time.monotonic() - start)
            for name, value in found.items():
                samples.series[name].append(value)

    thread = threading.Thread(target=look, name="resources", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def _totals(processes: Sequence[psutil.Process]) -> tuple[dict[str, float], dict[str, float]]:
    """Each series, and the memory by the name of the processes."""
    memory_of: dict[str, float] = defaultdict(float)
    descriptors = threads = 0
    folders = set[Path]()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            info = process.memory_info()
            memory_of[_name(process)] += (info.rss - info.shared) / GIB
            descriptors += process.num_fds()
            threads += process.num_threads()
            folders.update(shared_root().glob(f"vla_rl-{process.pid}-*"))
    shared = 0
    for path in (path for folder in folders for path in folder.rglob("*")):
        with contextlib.suppress(OSError):
            shared += path.stat().st_blocks * 512
    totals = {
        "memory": sum(memory_of.values()),
        "descriptors": float(descriptors),
        "threads": float(threads),
        "shared": shared / GIB,
    }
    return totals, dict(memory_of)


def _name(process: psutil.Process) -> str:
    """What a process is, such as "EnvWorkerProcess" or "gcs_server"; "driver" for that of the run."""
    words = " ".join(process.cmdline())
    if words.startswith("ray::"):
        return words.removeprefix("ray::").split(".")[0].split()[0]
    return "driver" if "vla_rl.commands.cli" in words else process.name()


def draw_resources(path: Path, samples: Samples, title: str) -> None:
    """The series over minutes."""
    with figure(path, title, 1, len(SERIES), (14, 3.2)) as axes:
        for axis, (name, label) in zip(axes, SERIES.items(), strict=True):
            axis.plot(np.array(samples.seconds) / 60, samples.series[name])
            axis.set(title=label, xlabel="minutes", ylim=(0, None))
            axis.grid(alpha=0.3)
