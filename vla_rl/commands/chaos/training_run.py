"""A training run as an operator sees it: its processes, its folder, and the command that continues it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from vla_rl.commands.checkpoints import Checkpoints
from vla_rl.core.faults import VARIABLE
from vla_rl.observability.metrics_file import read_records

ROLES = {
    "env worker": "EnvWorkerProcess",
    "inference server": "InferenceProcess",
    "learner": "LearnerProcess",
    "replay store": "StoreProcess",
    "world model": "WorldModelProcess",
    "gateway": "GatewayProcess",
    "request relay": "RequestRelayProcess",
}
_STOP_S = 300.0  # for the update under way, and the last checkpoint


class TrainingRun:
    """`vla-rl train` in a process of its own; started again, it resumes."""

    def __init__(self, config: Path, folder: Path, orders: Path) -> None:
        """``config``: a file whose run is written to ``folder``. ``orders``: where faults are ordered."""
        self.config, self.folder, self.orders = config, folder, orders
        self.log = folder.with_suffix(".log")
        self.starts = 0
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        resumed = (self.folder / "config.yaml").is_file()
        what = ["--resume", str(self.folder)] if resumed else [str(self.config)]
        command = [sys.executable, "-m", "vla_rl.commands.cli", "train", *what]
        self.orders.mkdir(exist_ok=True)
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                command,
                env=os.environ | {VARIABLE: str(self.orders)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the command that watches
            )
        self.starts += 1

    def stop(self) -> int:
        """Ask the run to end with a checkpoint; its exit status."""
        if self.process.poll() is None:
            self.ask_to_end()
        try:
            return self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait()

    def ask_to_end(self) -> None:
        """As a scheduler does."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """The whole tree, at once, and the process that would clean up after it."""
        for process in [*self.processes(), *self._reapers()]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()

    def processes(self) -> list[psutil.Process]:
        """The driver and all that it has started."""
        with contextlib.suppress(psutil.Error):
            driver = psutil.Process(self.process.pid)
            return [driver, *driver.children(recursive=True)]
        return []

    def _reapers(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if str(self.process.pid) in words and any(word.endswith("cluster/reaper.py") for word in words):
                found.append(process)
        return found

    def named(self, name: str) -> list[psutil.Process]:
        """Those whose command line names ``name``."""
        found = []
        for process in self.processes()[1:]:
            with contextlib.suppress(psutil.Error):
                if name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def checkpoints(self) -> list[Path]:
        """The complete ones, oldest first."""
        return Checkpoints(self.folder / "checkpoints", 1).complete()

    def is_writing(self) -> bool:
        """Whether a checkpoint is on its way: one that is newer than the newest; an older one has been given up."""
        newest = max((int(path.name) for path in self.checkpoints()), default=-1)
        return any(int(p.name.split(".")[1]) > newest for p in (self.folder / "checkpoints").glob(".*.partial"))

    def records(self) -> list[dict[str, float]]:
        """Metrics of the iterations so far."""
        with contextlib.suppress(FileNotFoundError):
            return read_records(self.folder / "metrics.jsonl")
        return []

    def trained_after(self, when: float) -> dict[str, float] | None:
        """The first record of a trained batch later than ``when``, in seconds since the epoch."""
        later = (r for r in self.records() if r["iteration"] > 0 and r["time"] > when)
        return next(later, None)

    def tail(self) -> str:
        """The end of what the run has said."""
        return self.log.read_text(errors="replace")[-2000:]


def ledger(record: dict[str, float]) -> dict[str, int]:
    """Where all episodes went, by the counters of an iteration; ``missing`` is 0 if they add up.

    With a world model also ``imagined_missing``, of its episodes.
    """
    names = ("trained", "stale", "filtered", "evaluated", "lost", "running", "buffered", "in_training")
    found = {name: int(record[f"episodes/{name}"]) for name in names}
    started = int(record["episodes/started"])
    balance = {"started": started, **found, "missing": started - sum(found.values())}
    if "episodes/imagined_delivered" in record:
        ended = sum(int(record[f"episodes/imagined_{name}"]) for name in ("trained", "unused", "lost", "waiting"))
        balance["imagined_missing"] = int(record["episodes/imagined_delivered"]) - ended
    return balance


def adds_up(balance: Mapping[str, int]) -> bool:
    """Whether no episode of a ``ledger`` is missing."""
    return not any(count for name, count in balance.items() if name.endswith("missing"))
