"""`vla-rl chaos`: train, do one harm after the other, and report what each has cost.

    fault ──▶ the run copes ──▶ the next trained batch: its cost ──▶ a random pause ──▶ the next fault

Whatever ends the driver is answered as a scheduler does: `vla-rl train --resume RUN`. Beside it, an undisturbed run of
the same config and seed shows what the faults cost in throughput and learning.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from vla_rl.commands.chaos.faults import FAULTS, ROUND, Injected
from vla_rl.commands.chaos.report import is_sound, summarize, write_report
from vla_rl.commands.chaos.resources import Samples, draw_resources, sampled
from vla_rl.commands.chaos.training_run import TrainingRun
from vla_rl.config.loading import dump_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import RunError, UserError
from vla_rl.core.files import new_folder
from vla_rl.observability.console import make_console
from vla_rl.observability.plots import read_metrics
from vla_rl.placement.checks import load_checked_config

_POLL_S = 0.2
_RESTARTS = 1_000_000  # chaos is no reason to give up
_DEADLINE_S = 900.0  # for the next trained batch


@dataclass(frozen=True, slots=True)
class Event:
    """One fault and what it has cost."""

    kind: str
    what: str
    time: float  # seconds since the epoch
    seconds: float  # until the next trained batch
    resumed: int  # how often the command had to be started again


def chaos_command(args: argparse.Namespace) -> int:
    """Status 0 if the run got over every fault, and no episode was missing at any iteration."""
    kinds = chosen(args.faults)
    config = load_checked_config(args.config, args.overrides)
    undisturbed = read_metrics(args.undisturbed) if args.undisturbed else None
    root = _new_folder(config)
    console = make_console()
    console.print(f"chaos for {args.minutes:g} minutes, seed {args.seed}: {root}", highlight=False, markup=False)
    run = _run_in(root, "run", config)
    schedule = Schedule(kinds, 60 * args.minutes, args.every, args.seed, args.count)
    with _observed(run, root / "resources.png", "all processes of the run") as samples:
        events = list(torment(run, schedule, console.print))
    if undisturbed is None and not kinds:
        args.undisturbed, undisturbed = run.folder, run.records()
    growth = {"disturbed" if kinds else "undisturbed": _grown(samples)}
    if undisturbed is None:
        console.print("the same without faults, for comparison")
        calm = _run_in(root, "undisturbed", config)
        with _observed(calm, root / "resources_undisturbed.png", "all processes of the run without faults") as samples:
            list(torment(calm, replace(schedule, kinds=()), console.print))
        args.undisturbed, undisturbed = calm.folder, calm.records()
        growth["undisturbed"] = _grown(samples)
    summary = summarize([asdict(e) for e in events], run.folder, args.undisturbed)
    summary["growth"] = growth
    write_report(root, summary, run.records(), undisturbed, f"chaos, seed {args.seed}")
    console.print((root / "report.md").read_text(), highlight=False, markup=False)
    return 0 if is_sound(summary) else 1


def chosen(faults: str) -> list[str]:
    """The faults of a round, by what ``--faults`` says. Raises UserError for an unknown kind."""
    if faults == "none":
        return []
    kinds = list(ROUND) if faults == "all" else faults.split(",")
    if unknown := [kind for kind in kinds if kind not in FAULTS]:
        raise UserError(f"--faults {faults}: {unknown[0]!r} is none; choose from all, none, {', '.join(FAULTS)}")
    return kinds


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which faults happen when."""

    kinds: Sequence[str]  # of a round, in which each comes as often as it stands here, in random order
    seconds: float  # of training
    every: float  # mean pause before a fault, in seconds
    seed: int
    count: int | None = None  # of faults, after which the run goes on alone; None: as many as there is time for


def torment(run: TrainingRun, schedule: Schedule, say: Callable[[str], object]) -> Iterator[Event]:
    """Let ``run`` train under these faults, round by round, and stop it.

    Ends earlier if the run is complete. Raises RunError if it does not get over a fault.
    """
    kinds, every, done = schedule.kinds, schedule.every, 0
    rng = random.Random(schedule.seed)
    deck: list[str] = []
    run.start()
    try:
        _next_batch(run, time.time())
        end = time.monotonic() + schedule.seconds
        while kinds and done != schedule.count and time.monotonic() < end and run.process.poll() is None:
            _sleep(run, min(rng.expovariate(1 / every), end - time.monotonic()))
            deck = deck or rng.sample(kinds, len(kinds))
            kind = deck.pop()
            began = time.time()
            if run.process.poll() is not None or (injected := inject(kind, run, rng)) is None:
                deck.insert(0, kind)
                continue
            event = _await_recovery(run, kind, injected, began)
            say(f"{kind} ({event.what}): {event.seconds:.1f} s until the next trained batch")
            yield event
            done += 1
        _sleep(run, max(0.0, end - time.monotonic()))
        run.stop()
    finally:
        run.kill()


def _await_recovery(run: TrainingRun, kind: str, injected: Injected, began: float) -> Event:
    starts = run.starts
    trained = _next_batch(run, began)
    while run.process.poll() not in (None, 0):  # that batch was trained before the fault took effect
        trained = _next_batch(run, time.time())
    if not _is_over(injected):  # that batch came from before the run had noticed
        deadline = time.monotonic() + _DEADLINE_S
        while run.process.poll() is None and time.monotonic() < deadline and not _is_over(injected):
            time.sleep(_POLL_S)
        trained = _next_batch(run, time.time())
    return Event(kind, injected.what, began, trained - began, run.starts - starts)


def inject(kind: str, run: TrainingRun, rng: random.Random) -> Injected | None:
    """A fault of this kind, from now on; None if there is nothing yet that it could hurt."""
    try:
        return FAULTS[kind](run, rng)
    except psutil.NoSuchProcess:  # its victim has ended before it came
        return None


def _is_over(injected: Injected) -> bool:
    try:
        return injected.is_over()
    except psutil.NoSuchProcess:
        return True


def _next_batch(run: TrainingRun, when: float) -> float:
    """When the first batch after ``when`` was trained. Resumes a run that has ended before."""
    deadline = time.monotonic() + _DEADLINE_S
    failures = 0
    while time.monotonic() < deadline:
        if (record := run.trained_after(when)) is not None:
            return record["time"]
        if (status := run.process.poll()) is not None:
            if status == 0:
                return time.time()
            failures += status > 0
            if failures > 2:
                break
            run.start()
        time.sleep(_POLL_S)
    raise RunError(f"{run.folder} did not train another batch (its log: {run.log}):\n{run.tail()}")


def _sleep(run: TrainingRun, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and run.process.poll() is None:
        time.sleep(min(_POLL_S, max(0.0, end - time.monotonic())))


def _new_folder(config: RunConfig) -> Path:
    parent = Path(config.log.dir)
    try:
        return new_folder(parent, config.log.name or f"chaos-{config.env.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    except OSError as error:
        raise UserError(f"log.dir={parent}: no folder can be made there ({error})") from None


@contextmanager
def _observed(run: TrainingRun, picture: Path, title: str) -> Iterator[Samples]:
    """Within the block, what ``run`` holds is sampled; it is drawn then."""
    with sampled(run.processes) as samples:
        yield samples
    draw_resources(picture, samples, title)


def _grown(samples: Samples) -> dict[str, dict[str, float]]:
    return {"totals": samples.growth(), "memory_mib": samples.growth_of_memory()}


def _run_in(root: Path, name: str, config: RunConfig) -> TrainingRun:
    values = {"log.dir": str(root.absolute()), "log.name": name, "train.restarts": _RESTARTS}
    file = root / f"{name}.yaml"
    file.write_text(dump_config(config.with_values(values)))
    return TrainingRun(file, root / name, root / "orders")
