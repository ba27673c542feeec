"""Does everything really run at the same time? `vla-rl benchmark overlap`.

Simulator, inference and learner are the real ones (tiny model, Ray, DeepSpeed), each slowed by sleeping to a known
cost. What the stages cost is measured in ``mode=sync``, where they take turns; then the same work runs in
``mode=async``. Perfect overlap takes the time of the slowest stage, none takes their sum.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from vla_rl.commands.run_folder import machine
from vla_rl.config.run_config import RunConfig
from vla_rl.observability.console import make_console

SLOTS, BATCH, EPISODES, CHUNKS, CHUNK_SIZE = 8, 4, 16, 2, 8  # an iteration: 16 episodes of 2 chunks of 8 steps
ENV_STEPS = EPISODES * CHUNKS * CHUNK_SIZE  # of an iteration
WARMUP = 2  # iterations until queues are filled
COOLDOWN = 3  # last iterations of mode=async, for which everything has been played before


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of sleep that an iteration adds to each stage."""

    simulate: float
    infer: float
    train: float

    def config(self, mode: str, iterations: int, folder: str) -> RunConfig:
        batches = EPISODES * CHUNKS / BATCH
        return RunConfig.model_validate(
            {
                "mode": mode,
                "env": {
                    "name": "workload",
                    "image_size": 32,
                    "max_episode_steps": CHUNKS * CHUNK_SIZE,
                    "step_ms": self.simulate / ENV_STEPS * 1e3,
                },
                "policy": {"chunk_size": CHUNK_SIZE, "latency_ms": self.infer / batches * 1e3},
                "learner": {"latency_ms": self.train * 1e3, "lr": 0.0},
                "algo": {"name": "ppo", "minibatches": 1},
                "train": {
                    "iterations": iterations,
                    "batch_episodes": EPISODES,
                    "eval_episodes": 0,
                    "checkpoint_every": 10**6,
                },
                "placement": {
                    "env_workers": 1,
                    "envs_per_worker": SLOTS,
                    "max_batch": BATCH,
                    "max_wait_ms": 50.0,
                },
                "log": {"dir": folder, "name": mode, "tensorboard": False},
            }
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds an iteration."""

    simulate: float  # busy time of the stage, with its real work
    infer: float
    train: float
    sync: float
    asynchronous: float

    @property
    def slowest(self) -> float:
        return max(self.simulate, self.infer, self.train)

    @property
    def to_slowest(self) -> float:
        """1.0 would be perfect overlap."""
        return self.asynchronous / self.slowest

    @property
    def speedup(self) -> float:
        return self.sync / self.asynchronous


def measure(costs: Costs, iterations: int) -> Outcome:
    """Run both modes and compare means over ``iterations`` between warm-up and cool-down."""
    from vla_rl.commands.train import train

    with tempfile.TemporaryDirectory() as folder:
        for mode, after in (("sync", 0), ("async", COOLDOWN)):
            train(costs.config(mode, WARMUP + iterations + after, folder))
        sync = _steady(Path(folder) / "sync", iterations)
        overlapped = _steady(Path(folder) / "async", iterations)

    def busy(name: str) -> float:
        return fmean(m[f"busy/{name}"] * m["time/iteration_s"] for m in sync)

    return Outcome(
        simulate=busy("env_workers"),
        infer=busy("inference"),
        train=busy("learner"),
        sync=_seconds(sync),
        asynchronous=_seconds(overlapped),
    )


def _steady(run: Path, iterations: int) -> list[dict[str, float]]:
    metrics = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [m for m in metrics if WARMUP < m["iteration"] <= WARMUP + iterations]


def _seconds(metrics: list[dict[str, float]]) -> float:
    """Time of an iteration, by what was trained or by what was played, whichever was less: none lives on a surplus."""
    played = sum(m["throughput/env_steps_per_s"] * m["time/iteration_s"] for m in metrics) / ENV_STEPS
    return sum(m["time/iteration_s"] for m in metrics) / min(len(metrics), played)


CASES = {
    "simulator slowest": Costs(4.0, 2.0, 2.0),
    "inference slowest": Costs(2.0, 4.0, 2.0),
    "learner slowest": Costs(2.0, 2.0, 4.0),
    "all alike": Costs(3.0, 3.0, 3.0),
}


def overlap_command(args: Any) -> int:
    """Measure all cases and print the table."""
    console = make_console()
    outcomes = {name: measure(costs, args.iterations) for name, costs in CASES.items()}
    console.print(_table(outcomes))
    if args.json:
        rows = [
            {"case": name} | asdict(o) | {"to_slowest": o.to_slowest, "speedup": o.speedup}
            for name, o in outcomes.items()
        ]
        args.json.write_text(json.dumps({"machine": machine(), "cases": rows}, indent=2) + "\n")
    return 0


def _table(outcomes: dict[str, Outcome]) -> Table:
    table = Table(title="seconds an iteration; stages slowed to known costs")
    columns: Sequence[str] = (
        "case",
        "simulate",
        "infer",
        "train",
        "sync",
        "async",
        "async / slowest stage",
        "sync / async",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "case" else "right")
    for name, o in outcomes.items():
        seconds = (o.simulate, o.infer, o.train, o.sync, o.asynchronous)
        table.add_row(name, *(f"{s:.2f}" for s in seconds), f"{o.to_slowest:.2f}", f"{o.speedup:.2f}")
    return table
