"""The faults of `vla-rl chaos`. Each happens once; what it needs is said where it cannot be done just now (None)."""

import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from vla_rl.commands.chaos.training_run import ROLES, TrainingRun
from vla_rl.core.faults import order

_LONGEST_DELAY_S = 3.0
_AGAIN, _LONGEST_START_S = 0.3, 12.0  # probability of a kill while a run starts, and when
_FULL_S = 8.0  # how long a disk stays full
_FULL_BYTES = 512  # no file of the run may grow beyond, as if the disk was full


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that has begun."""

    what: str  # such as "learner"
    is_over: Callable[[], bool] = lambda: True  # whether the next one may come


Fault = Callable[[TrainingRun, random.Random], Injected | None]


def _one(run: TrainingRun, rng: random.Random) -> tuple[str, psutil.Process] | None:
    """A process, every role being as likely as another; None if there is none just now."""
    found = {role: processes for role, name in ROLES.items() if (processes := run.named(name))}
    if not found:
        return None
    role = rng.choice(list(found))
    return role, rng.choice(found[role])


def _kill(run: TrainingRun, rng: random.Random) -> Injected | None:
    if (victim := _one(run, rng)) is None:
        return None
    role, process = victim
    is_over = _replacement(run, role, process)
    process.kill()
    return Injected(role, is_over)


def _freeze(run: TrainingRun, rng: random.Random) -> Injected | None:
    """Until the run itself kills the process."""
    if (victim := _one(run, rng)) is None:
        return None
    role, process = victim
    is_over = _replacement(run, role, process)
    process.suspend()
    return Injected(role, is_over)


def _replacement(run: TrainingRun, role: str, process: psutil.Process) -> Callable[[], bool]:
    """Whether there is another one in the place of ``process``."""
    before = len(run.named(ROLES[role]))

    def found() -> bool:
        now = run.named(ROLES[role])
        return process not in now and len(now) >= before

    return found


def _delay(run: TrainingRun, rng: random.Random) -> Injected | None:
    if (victim := _one(run, rng)) is None:
        return None
    role, process = victim
    process.suspend()
    time.sleep(rng.uniform(0.5, _LONGEST_DELAY_S))
    with contextlib.suppress(psutil.Error):
        process.resume()
    return Injected(role)


def _ordered(kind: str, where: str) -> Fault:
    def fault(run: TrainingRun, rng: random.Random) -> Injected:
        order(run.orders, kind)
        return Injected(where, lambda: not (run.orders / kind).exists())

    return fault


def _full_disk(run: TrainingRun, rng: random.Random) -> Injected | None:
    """For some seconds no file of the driver, the learner and the store can grow: the kernel limits their sizes."""
    writers = [p for role in ("learner", "replay store") for p in run.named(ROLES[role])]
    if not writers:
        return None
    driver = psutil.Process(run.process.pid)
    for process in (driver, *writers):
        _limit_files(process, _FULL_BYTES)
    time.sleep(_FULL_S)
    for process in (driver, *writers):
        _limit_files(process, resource.RLIM_INFINITY)
    return Injected("driver, learner, replay store")


def _limit_files(process: psutil.Process, nbytes: int) -> None:
    with contextlib.suppress(psutil.Error, OSError):
        _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (nbytes if nbytes >= 0 else hard, hard))


def _full_shared_memory(run: TrainingRun, rng: random.Random) -> Injected | None:
    """The next allocation fails as on a full /dev/shm; a killed learner makes the run allocate again."""
    learners = run.named(ROLES["learner"])
    if not learners:
        return None
    order(run.orders, "shared_memory")
    rng.choice(learners).kill()
    return Injected("the start after a learner's death", lambda: not (run.orders / "shared_memory").exists())


def _corrupt_checkpoint(run: TrainingRun, rng: random.Random) -> Injected | None:
    """The newest one, of several; a killed learner makes the run read it."""
    driver = psutil.Process(run.process.pid)
    driver.suspend()  # or it may complete a newer one meanwhile
    try:
        learners, checkpoints = run.named(ROLES["learner"]), run.checkpoints()
        if not learners or len(checkpoints) < 2 or run.is_writing():
            return None
        damaged = _flip_a_byte(checkpoints[-1], rng)
        rng.choice(learners).kill()
    finally:
        driver.resume()
    return Injected(damaged.name, lambda: bool({*run.named(ROLES["learner"])} - {*learners}))


def _flip_a_byte(checkpoint: Path, rng: random.Random) -> Path:
    """Of one of its files; returns which."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
    damaged = rng.choice(files)
    with damaged.open("r+b") as file:
        file.seek(rng.randrange(damaged.stat().st_size))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))
    return damaged


def _driver(run: TrainingRun, rng: random.Random) -> Injected:
    os.kill(run.process.pid, signal.SIGKILL)
    return Injected("driver")


def _node(run: TrainingRun, rng: random.Random) -> Injected | None:
    """On one machine: Ray's own process of the node, with which its actors die."""
    if not (found := run.named("raylet/raylet")):
        return None
    found[0].kill()
    return Injected("raylet")


def _tree(run: TrainingRun, rng: random.Random) -> Injected:
    """All processes at once, some times once more while they start again."""
    run.kill()
    writing = run.is_writing()
    kills = 1
    while rng.random() < _AGAIN:
        run.start()
        time.sleep(rng.uniform(0.0, _LONGEST_START_S))
        run.kill()
        kills += 1
    return Injected(f"all processes, {kills} times{', during a checkpoint' if writing else ''}")


FAULTS: dict[str, Fault] = {
    "kill": _kill,
    "freeze": _freeze,
    "delay": _delay,
    "exception": _ordered("exception", "env worker"),
    "nan_observation": _ordered("nan_observation", "env worker"),
    "nan_loss": _ordered("nan_loss", "learner"),
    "full_disk": _full_disk,
    "full_shared_memory": _full_shared_memory,
    "corrupt_checkpoint": _corrupt_checkpoint,
    "driver": _driver,
    "node": _node,
    "tree": _tree,
}

# of `--faults all`: processes fail more often than disks, and these more often than whole machines
ROUND = [
    *(("kill",) * 4),
    *(("freeze", "delay", "exception", "nan_observation", "nan_loss") * 2),
    "full_disk",
    "full_shared_memory",
    "corrupt_checkpoint",
    "driver",
    "node",
]
