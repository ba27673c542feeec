"""A run over several hosts, out of Linux namespaces, while hosts and links fail; a table of what each harm has cost.

    python scripts/chaos_hosts.py [CONFIG] [KEY=VALUE ...] [--hosts 2] [--harms kill,cut_5] [--seconds 60] [--json FILE]

Needs root (tests/hosts). The first host is Ray's head and the driver's; harm comes to the others. Whoever operates the
hosts is played, too: a new host joins for one that was killed, Ray is started again where it has ended, and the command
is resumed if it ends. Exit status 1 if the run did not get over a harm, or an episode was missing.
"""

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import ROOT
from tests.hosts.network import Host, Network, obstacle
from tests.hosts.ray_hosts import join, start_ray
from vla_rl.commands.chaos.training_run import TrainingRun, adds_up, ledger
from vla_rl.commands.metadata import machine_record
from vla_rl.core.errors import RunError
from vla_rl.core.files import write_json

DEADLINE_S = 900.0  # for the next trained batch
_POLL_S = 0.5
_FOLDER = "/tmp/runs/run"
_RESTARTED, _REPLACED = "the run is restarted from", " is replaced"  # lines of a run
T = TypeVar("T")


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
        """Start the command again if it has ended."""
        if self.process.poll() is not None:
            self.start()

    def ask_to_end(self) -> None:
        """The driver itself: what has started it passes no signals on."""
        with contextlib.suppress(psutil.Error):
            for driver in psutil.Process(self.process.pid).children():
                driver.terminate()


class Fleet:
    """The hosts of a run, and who operates them."""

    def __init__(self, network: Network, count: int) -> None:
        self._network, self._number = network, 0
        self.head, *self.others = (self._new() for _ in range(count))
        self.address = start_ray(self.head, self.others)

    def _new(self) -> Host:
        self._number += 1
        return self._network.host(f"host{self._number}")

    def replace(self, host: Host) -> None:
        """Its power fails, and there is another one, which has not joined yet."""
        host.kill()
        self.others[self.others.index(host)] = self._new()

    def look_after(self) -> None:
        """Start Ray where it does not run."""
        idle = [host for host in self.others if "raylet" not in host.processes()]
        for host in idle:
            host.run("ray", "stop", "--force")
        join(self.head, idle)


@dataclass(frozen=True, slots=True)
class Harm:
    """Something that happens to a fleet for some seconds."""

    what: str
    begin: Callable[[Fleet], None] = lambda fleet: None
    end: Callable[[Fleet], None] | None = None
    seconds: float | None = None  # None: as many as the command says
    restarts: bool = False  # whether the run has to restart


def _shape(**shape: float) -> Callable[[Fleet], None]:
    def begin(fleet: Fleet) -> None:
        for host in fleet.others:
            host.shape(**shape)

    return begin


def _cut(seconds: float) -> Harm:
    what = f"one host cut off for {seconds:.0f} s"
    return Harm(what, lambda fleet: fleet.others[-1].cut_off(), lambda fleet: fleet.others[-1].join(), seconds)


HARMS = {
    "kill": Harm("one host killed, another joins", lambda fleet: fleet.replace(fleet.others[-1]), None, 0, True),
    "cut_5": _cut(5),
    "cut_60": _cut(60),
    "loss": Harm("1 % loss", _shape(loss=0.01), _shape()),
    "delay": Harm("50 ms round trip", _shape(round_trip_ms=50), _shape()),
    "rate": Harm("100 Mbit/s", _shape(mbit=100), _shape()),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a harm has cost."""

    what: str
    seconds: float  # until the next trained batch, since the harm began; of one that cuts a host off, since it ended
    restarts: int  # of the run
    replaced: int  # processes
    resumed: int  # how often the command had to be started again
    steps_per_s: float  # control steps that were trained on, until the harm was over and a batch was trained
    ledger: dict[str, int]  # at the last batch


def torment(run: HostRun, fleet: Fleet, harms: Sequence[str], seconds: float) -> Iterator[Outcome]:
    """Train for ``seconds`` without harm, then under one harm after the other.

    Raises RunError if no batch is trained in time.
    """
    run.start()
    _next_batch(run, fleet, 0.0)
    for harm in (Harm("no harm"), *(HARMS[name] for name in harms)):
        before, began = _counts(run), time.time()
        harm.begin(fleet)
        _pass(run, seconds if harm.seconds is None else harm.seconds)
        if harm.end is not None and harm.seconds is not None:
            harm.end(fleet)
        since = began if harm.seconds is None or harm.restarts else time.time()
        if harm.restarts:  # a batch from before the run has noticed does not count
            _wait(run, fleet, partial(_came_back, run, before))
        trained = _next_batch(run, fleet, time.time() if harm.restarts else since)
        until, records = time.time(), run.records()
        steps = sum(record["rollout/env_steps"] for record in records if began < record["time"] <= until)
        restarts, replaced, resumed = (after - earlier for after, earlier in zip(_counts(run), before, strict=True))
        rate, balance = steps / (until - began), ledger(records[-1])
        yield Outcome(harm.what, trained["time"] - since, restarts, replaced, resumed, rate, balance)
        if harm.end is not None and harm.seconds is None:
            harm.end(fleet)
        _next_batch(run, fleet, time.time())
    run.stop()


def _counts(run: HostRun) -> tuple[int, int, int]:
    """How often the run was restarted, a process was replaced, and the command was started, so far."""
    said = run.log.read_text(errors="replace")
    return said.count(_RESTARTED), said.count(_REPLACED), run.starts


def _came_back(run: HostRun, before: tuple[int, int, int]) -> bool | None:
    """True when the run was restarted, or its command was started again, since then; else None."""
    (restarts, _, starts), (restarts_before, _, starts_before) = _counts(run), before
    return restarts + starts > restarts_before + starts_before or None


def _pass(run: HostRun, seconds: float) -> None:
    """Let time go by; nobody repairs anything but the command meanwhile."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        run.go_on()
        time.sleep(min(_POLL_S, max(0.0, end - time.monotonic())))


def _next_batch(run: HostRun, fleet: Fleet, when: float) -> Mapping[str, float]:
    """The record of the first batch that was trained after ``when``."""
    return _wait(run, fleet, lambda: run.trained_after(when))


def _wait(run: HostRun, fleet: Fleet, ready: Callable[[], T | None]) -> T:
    """The first answer of ``ready``; the hosts and the command are looked after meanwhile."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if (answer := ready()) is not None:
            return answer
        run.go_on()
        fleet.look_after()
        time.sleep(_POLL_S)
    raise RunError(f"no batch was trained for {DEADLINE_S:.0f} s; the run has said:\n{run.tail()}")


def table(outcomes: Sequence[Outcome]) -> str:
    """In Markdown. Throughput is also given as a share of that without harm, which comes first."""
    lines = [
        "| what happened | s until the next batch | restarts | replaced | resumed | steps/s | | missing episodes |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in outcomes:
        share = one.steps_per_s / outcomes[0].steps_per_s if outcomes[0].steps_per_s else 0.0
        numbers = f"{one.seconds:.1f} | {one.restarts} | {one.replaced} | {one.resumed} | {one.steps_per_s:.1f}"
        lines.append(f"| {one.what} | {numbers} | {share:.0%} | {one.ledger['missing']} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", nargs="?", default=str(ROOT / "configs/tabletop.yaml"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--hosts", type=int, default=2, help="how many, all of which the run uses")
    parser.add_argument("--harms", default=",".join(HARMS), help="in this order")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a harm that lasts, and without harm")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    harms = args.harms.split(",")
    if unknown := [name for name in harms if name not in HARMS]:
        parser.error(f"--harms: {unknown[0]!r} is none; choose from {', '.join(HARMS)}")
    if args.hosts < 2:
        parser.error("--hosts: harm comes to hosts that are not the first; use at least 2")
    if reason := obstacle():
        parser.error(f"no hosts can be made here: {reason}")
    outcomes = []
    try:
        with TemporaryDirectory() as folder, Network() as network:
            fleet = Fleet(network, args.hosts)
            values = [*args.overrides, f"placement.nodes={args.hosts}", f"placement.ray_address={fleet.address}"]
            run = HostRun(fleet.head, [str(Path(args.config).absolute()), *values], Path(folder, "run.log"))
            for outcome in torment(run, fleet, harms, args.seconds):
                print(f"{outcome.what}: {outcome.seconds:.1f} s until the next trained batch", flush=True)
                outcomes.append(outcome)
    except RunError as error:
        print(f"the run did not get over it: {error}", file=sys.stderr)
    if outcomes:
        print(table(outcomes))
    if args.json is not None:
        write_json(args.json, {"machine": machine_record(), "outcomes": [asdict(one) for one in outcomes]})
    return 0 if len(outcomes) == len(harms) + 1 and all(adds_up(one.ledger) for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
