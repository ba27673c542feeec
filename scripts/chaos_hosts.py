"""A run whose simulators are on other hosts, out of Linux namespaces, while hosts and links fail; what each harm costs.

    python scripts/chaos_hosts.py [CONFIG] [KEY=VALUE ...] [--hosts 4] [--harms kill,late] [--seconds 60] [--json FILE]

Needs root (tests/hosts). The first host is Ray's head, and has driver, learner and inference. The others only simulate
(`vla-rl join`, placement.env_hosts), and harm comes to them. Who operates the command is played, too: it is resumed if
it ends. Exit status 1 if the run did not get over a harm, was restarted, or an episode was missing.
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import ROOT
from tests.hosts.fleet import Fleet
from tests.hosts.network import Host, Network, obstacle
from vla_rl.commands.chaos.training_run import TrainingRun, adds_up, ledger
from vla_rl.commands.metadata import git_commit, machine_record
from vla_rl.core.errors import RunError
from vla_rl.core.files import write_json

DEADLINE_S = 300.0  # for the next trained batch, and for hosts that come back
_POLL_S = 0.5
_FOLDER = "/tmp/runs/run"
_FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")  # Debian's libfaketime
_RESTARTED, _REPLACED = "the run is restarted from", " is replaced"  # lines of a run


class HostRun(TrainingRun):
    """`vla-rl train` on a host."""

    def __init__(self, host: Host, arguments: Sequence[str], log: Path) -> None:
        super().__init__(Path(arguments[0]), host.path(_FOLDER), log.with_name("orders"))
        self.host, self.arguments, self.log = host, arguments, log

    def start(self) -> None:
        resumed = (self.folder / "config.yaml").is_file()
        what = ["--resume", _FOLDER] if resumed else [*self.arguments, "log.dir=/tmp/runs", "log.name=run"]
        with self.log.open("ab") as out:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            self.process = self.host.start("vla-rl", "train", *what, folder=str(ROOT), **options)
        self.starts += 1

    def go_on(self) -> None:
        """Start the command again if it has ended. Raises RunError if it was refused."""
        if self.process.poll() is not None:
            if not (self.folder / "config.yaml").is_file():
                raise RunError(self.tail())
            self.start()

    def ask_to_end(self) -> None:
        """The driver itself: what has started it passes no signals on."""
        with contextlib.suppress(psutil.Error):
            for driver in psutil.Process(self.process.pid).children():
                driver.terminate()


@dataclass(frozen=True, slots=True)
class Harm:
    """Something that happens to a fleet for some seconds."""

    what: str
    begin: Callable[[Fleet], None] = lambda fleet: None
    end: Callable[[Fleet], None] = lambda fleet: None
    seconds: float | None = None  # None: as many as the command says


def _another_clock(fleet: Fleet) -> None:
    fleet.replace(LD_PRELOAD=str(_FAKETIME), FAKETIME="+10m", FAKETIME_DONT_FAKE_MONOTONIC="1")


HARMS = {
    "kill": Harm("power of one host fails", Fleet.lose),
    "late": Harm("another host joins", Fleet.replace),
    "preempt": Harm("one host is told to go, then another joins", Fleet.take_away, Fleet.replace),
    "cut_5": Harm("one host cut off for 5 s", Fleet.cut_off, Fleet.reconnect, 5),
    "cut_60": Harm("one host cut off for 60 s", Fleet.cut_off, Fleet.reconnect, 60),
    "cut": Harm("one host cut off and never back; another joins after 90 s", Fleet.cut_off, Fleet.replace, 90),
    "loss": Harm("1 % loss", lambda fleet: fleet.shape(loss=0.01), Fleet.shape),
    "delay": Harm("50 ms round trip", lambda fleet: fleet.shape(round_trip_ms=50), Fleet.shape),
    "rate": Harm("100 Mbit/s", lambda fleet: fleet.shape(mbit=100), Fleet.shape),
    "disk": Harm("disk of one host full", Fleet.fill_disk, Fleet.empty_disk),
    "clock": Harm("a host joins whose clock is 10 minutes ahead", _another_clock),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a harm has cost."""

    what: str
    longest: float  # seconds without a trained batch, until the first one after the harm
    back: float  # seconds from the end of the harm until all hosts played that can
    restarts: int  # of the run
    replaced: int  # processes
    resumed: int  # how often the command had to be started again
    lost: int  # episodes that are played again
    steps_per_s: float  # control steps that were trained on during the harm
    ledger: dict[str, int]  # at the last batch


def torment(run: HostRun, fleet: Fleet, harms: Sequence[str], seconds: float) -> Iterator[Outcome]:
    """Train for ``seconds`` without harm, then under one harm after the other.

    Raises RunError if no batch is trained in time, or a host does not come back.
    """
    run.start()
    _wait(run, partial(_trained, run, fleet, 0.0), "all hosts play")
    for harm in (Harm("no harm"), *(HARMS[name] for name in harms)):
        counts, began = _counts(run), time.time()
        harm.begin(fleet)
        _pass(run, seconds if harm.seconds is None else harm.seconds)
        ended = time.time()
        harm.end(fleet)
        back = _wait(run, partial(_trained, run, fleet, ended), f"{harm.what}: all hosts play")
        yield _outcome(harm, run, counts, (began, ended, back))
    run.stop()


def _trained(run: HostRun, fleet: Fleet, when: float) -> float | None:
    """When the first batch after ``when`` was trained while all hosts played that can."""
    can = len(fleet.others) - fleet.gone
    times = (r["time"] for r in run.records() if r["time"] > when and r["placement/env_hosts"] == can)
    return next(times, None)


def _outcome(harm: Harm, run: HostRun, counts: Sequence[int], times: tuple[float, float, float]) -> Outcome:
    began, ended, back = times
    records = run.records()
    trained = [record["time"] for record in records]
    first = max(i for i, when in enumerate(trained) if when <= began)
    last = min(i for i, when in enumerate(trained) if when > ended)
    during = records[first + 1 : last + 1]
    restarts, replaced, resumed = (after - before for after, before in zip(_counts(run), counts, strict=True))
    before, balance = ledger(records[first]), ledger(records[-1])
    return Outcome(
        what=harm.what,
        longest=max(later - earlier for earlier, later in pairwise(trained[first : last + 1])),
        back=back - ended,
        restarts=restarts,
        replaced=replaced,
        resumed=resumed,
        lost=balance["lost"] - before["lost"],
        steps_per_s=sum(record["rollout/env_steps"] for record in during) / (trained[last] - trained[first]),
        ledger=balance,
    )


def _counts(run: HostRun) -> tuple[int, int, int]:
    """How often the run was restarted, a process was replaced, and the command was started, so far."""
    said = run.log.read_text(errors="replace")
    return said.count(_RESTARTED), said.count(_REPLACED), run.starts


def _pass(run: HostRun, seconds: float) -> None:
    """Let time go by; nobody repairs anything but the command meanwhile."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        run.go_on()
        time.sleep(min(_POLL_S, max(0.0, end - time.monotonic())))


def _wait(run: HostRun, ready: Callable[[], float | None], what: str) -> float:
    """The first answer of ``ready``; the command is resumed if it ends. Raises RunError if there is none in time."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if (answer := ready()) is not None:
            return answer
        _pass(run, _POLL_S)
    raise RunError(f"not within {DEADLINE_S:.0f} s: {what}; the run has said:\n{run.tail()}")


def table(outcomes: Sequence[Outcome]) -> str:
    """In Markdown. Throughput is also given as a share of that without harm, which comes first."""
    lines = [
        "| what happened | longest wait for a batch, s | all hosts back after, s | restarts | resumed | replaced |"
        " played again | steps/s | | missing |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in outcomes:
        share = one.steps_per_s / outcomes[0].steps_per_s if outcomes[0].steps_per_s else 0.0
        numbers = f"{one.longest:.1f} | {one.back:.1f} | {one.restarts} | {one.resumed} | {one.replaced} | {one.lost}"
        lines.append(f"| {one.what} | {numbers} | {one.steps_per_s:.1f} | {share:.0%} | {one.ledger['missing']} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    harms = [name for name in HARMS if name != "clock" or _FAKETIME.exists()]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("config", nargs="?", default=str(ROOT / "configs/tabletop.yaml"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--hosts", type=int, default=4, help="how many, the first included")
    parser.add_argument("--harms", type=lambda text: text.split(","), default=harms, help="in this order")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a harm that lasts, and without harm")
    parser.add_argument("--keep", type=Path, help="copy what the run has said, and its metrics, into this folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.harms if name not in HARMS]:
        parser.error(f"--harms: {unknown[0]!r} is none; choose from {', '.join(HARMS)}")
    if "clock" in args.harms and not _FAKETIME.exists():
        parser.error(f"--harms clock: {_FAKETIME} is not there; install libfaketime")
    if args.hosts < 3:
        parser.error("--hosts: harm comes to one that only simulates, while another one goes on; use at least 3")
    if reason := obstacle():
        parser.error(f"no hosts can be made here: {reason}")
    outcomes, about = [], {"machine": machine_record(), "git_commit": git_commit()}
    try:
        with TemporaryDirectory() as folder, Network() as network:
            fleet = Fleet(network, args.hosts - 1)
            run = HostRun(fleet.head, _command(args, fleet), Path(folder, "run.log"))
            with _kept(run, args.keep):
                for outcome in torment(run, fleet, args.harms, args.seconds):
                    print(f"{outcome.what}: {outcome.longest:.1f} s without a trained batch", flush=True)
                    outcomes.append(outcome)
                    if args.json is not None:
                        write_json(args.json, about | {"outcomes": [asdict(one) for one in outcomes]})
    except RunError as error:
        print(f"the run did not get over it: {error}", file=sys.stderr)
    if outcomes:
        print(table(outcomes))
    complete = len(outcomes) == len(args.harms) + 1
    return int(not complete or any(one.restarts or one.resumed or not adds_up(one.ledger) for one in outcomes))


@contextlib.contextmanager
def _kept(run: HostRun, folder: Path | None) -> Iterator[None]:
    try:
        yield
    finally:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for file in (run.log, run.folder / "metrics.jsonl"):
                shutil.copy(file, folder)


def _command(args: argparse.Namespace, fleet: Fleet) -> list[str]:
    """Arguments of `vla-rl train`: as many env workers as other hosts; no end and no evaluations of its own."""
    others = args.hosts - 1
    hosts = [f"placement.env_hosts={{min: 1, max: {others}}}", "placement.env_host_cores=1"]
    hosts.append(f"placement.env_workers={others}")
    endless = ["train.iterations=1000000", "train.eval_every=0", f"placement.ray_address={fleet.address}"]
    return [str(Path(args.config).absolute()), *hosts, *endless, *args.overrides]


if __name__ == "__main__":
    sys.exit(main())
