"""`vla-rl benchmark overlap`: do simulator, inference and learner run at the same time?

The runtime is the real one (tiny model, Ray, DeepSpeed), on a simulator of known cost, and each stage sleeps for a
known time. The costs of the stages are measured in ``mode=sync``, where they run one after the other; then the same
work runs in ``mode=async``. With perfect overlap an iteration takes as long as its slowest stage; without any, as long
as their sum.
"""

from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from vla_rl.commands.metadata import machine_record
from vla_rl.commands.short_run import short_run
from vla_rl.config.run_config import RunConfig
from vla_rl.core.files import write_json
from vla_rl.observability.console import make_console
from vla_rl.observability.plots import read_metrics

ENVS, BATCH, EPISODES, CHUNKS, CHUNK_SIZE = 8, 4, 16, 2, 8  # an iteration: 16 episodes of 2 chunks of 8 steps
ENV_STEPS = EPISODES * CHUNKS * CHUNK_SIZE  # per iteration
WARMUP = 2  # iterations until queues are filled
COOLDOWN = 3  # last iterations of mode=async, whose episodes have all been played before


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds of sleep that an iteration adds to each stage."""

    simulate: float
    infer: float
    train: float

    def config(self, mode: str) -> RunConfig:
        """A run on the workload simulator with these costs."""
        batches, steps = EPISODES * CHUNKS / BATCH, CHUNKS * CHUNK_SIZE
        env = {"name": "workload", "image_size": 32, "max_episode_steps": steps}
        return RunConfig.model_validate(
            {
                "mode": mode,
                "env": env | {"step_ms": self.simulate / ENV_STEPS * 1e3},
                "policy": {"name": "openvla_oft", "chunk_size": CHUNK_SIZE, "latency_ms": self.infer / batches * 1e3},
                "learner": {"latency_ms": self.train * 1e3, "lr": 0.0},
                "algo": {"name": "ppo", "minibatches": 1},
                "train": {"batch_episodes": EPISODES},
                "placement": {"env_workers": 1, "envs_per_worker": ENVS, "max_batch": BATCH, "max_wait_ms": 50.0},
            }
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds per iteration."""

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


def measure_overlap(costs: StageCosts, iterations: int) -> Outcome:
    """Run both modes, and compare means over ``iterations`` between warm-up and cool-down."""
    sync, overlapped = (
        _steady(costs.config(mode), iterations, after) for mode, after in (("sync", 0), ("async", COOLDOWN))
    )

    def busy(name: str) -> float:
        return fmean(m[f"busy/{name}"] * m["time/iteration_s"] for m in sync)

    stages = busy("env_workers"), busy("inference"), busy("learner")
    return Outcome(*stages, sync=_seconds(sync), asynchronous=_seconds(overlapped))


def _steady(config: RunConfig, iterations: int, after: int) -> list[dict[str, float]]:
    """Metrics of ``iterations`` after the warm-up; ``after``: further ones that are not measured."""
    with short_run(config, WARMUP + iterations + after) as run:
        return [m for m in read_metrics(run) if WARMUP < m["iteration"] <= WARMUP + iterations]


def _seconds(metrics: list[dict[str, float]]) -> float:
    """Seconds per iteration, by what was trained or by what was played, whichever was less."""
    played = sum(m["throughput/env_steps_per_s"] * m["time/iteration_s"] for m in metrics) / ENV_STEPS
    return sum(m["time/iteration_s"] for m in metrics) / min(len(metrics), played)


CASES = {
    "simulator slowest": StageCosts(4.0, 2.0, 2.0),
    "inference slowest": StageCosts(2.0, 4.0, 2.0),
    "learner slowest": StageCosts(2.0, 2.0, 4.0),
    "all alike": StageCosts(3.0, 3.0, 3.0),
}


def overlap_command(args: Any) -> int:
    """Measure all cases and print the table."""
    console = make_console()
    outcomes = {name: measure_overlap(costs, args.iterations) for name, costs in CASES.items()}
    console.print(_table(outcomes))
    if args.json:
        rows = [
            {"case": name} | asdict(o) | {"to_slowest": o.to_slowest, "speedup": o.speedup}
            for name, o in outcomes.items()
        ]
        write_json(args.json, {"machine": machine_record(), "cases": rows})
    return 0


def _table(outcomes: dict[str, Outcome]) -> Table:
    table = Table(title="seconds per iteration; stages slowed to known costs")
    figures = ("simulate", "infer", "train", "sync", "async", "async / slowest stage", "sync / async")
    for name in ("case", *figures):
        table.add_column(name, justify="left" if name == "case" else "right")
    for name, o in outcomes.items():
        seconds = (o.simulate, o.infer, o.train, o.sync, o.asynchronous)
        table.add_row(name, *(f"{s:.2f}" for s in seconds), f"{o.to_slowest:.2f}", f"{o.speedup:.2f}")
    return table
