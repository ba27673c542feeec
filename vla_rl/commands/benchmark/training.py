"""One training run under several settings of one key, in turns: `vla-rl benchmark training`.

Every variant trains by the given config for a fixed time, without evaluations; what is compared is what the whole
runtime achieves after its first iterations.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from vla_rl.commands.run_folder import machine
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.observability.console import make_console
from vla_rl.placement.checks import load_checked_config

_WARMUP = 2  # iterations until queues are filled
_RATES = ("env_steps", "chunks", "episodes", "batches")
_BUSY = ("simulate", "render", "reset", "inference", "learner")


def training_command(args: Any) -> int:
    """Run all variants ``args.rounds`` times in turns and print the table."""
    variants = load_variants(args.config, args.overrides, args.vary, args.minutes)
    console = make_console()
    rounds = [{name: measure(config) for name, config in variants.items()} for _ in range(args.rounds)]
    medians = {
        name: {key: median(figures[name][key] for figures in rounds) for key in rounds[0][name]} for name in variants
    }
    console.print(_table(medians, f"{args.config}, {args.minutes:g} min each, {args.rounds} round(s), medians"))
    if args.json:
        record = {"machine": machine(), "overrides": args.overrides, "rounds": rounds, "medians": medians}
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


def load_variants(path: Path, overrides: Sequence[str], vary: str, minutes: float) -> dict[str, RunConfig]:
    """The config under each setting, by its ``key=value``. Raises UserError where ``vary`` is no KEY=VALUE,VALUE,..."""
    key, _, values = vary.partition("=")
    settings = [f"{key}={value}" for value in values.split(",") if value]
    if len(settings) < 2:
        raise UserError(f"--vary {vary}: give a key and two values or more, as in env.implementation=fast,reference")
    timed = ("train.iterations=1000000", f"train.max_minutes={minutes}", "train.eval_episodes=0", "log.video=false")
    return {s: load_checked_config(path, [*overrides, *timed, s]) for s in settings}


def measure(config: RunConfig) -> dict[str, float]:
    """Train for the configured time, in a temporary folder; figures as of ``summarize``."""
    from vla_rl.commands.train import train

    with tempfile.TemporaryDirectory() as folder:
        log = config.log.model_copy(update={"dir": folder, "name": "run", "tensorboard": False})
        train(config.model_copy(update={"log": log}))
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return summarize([json.loads(line) for line in lines])


def summarize(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Rates per second and busy shares over the iterations after the first ones, weighed by their duration.

    Raises UserError where there are none.
    """
    total = len(metrics)
    metrics = [m for m in metrics if m["iteration"] > _WARMUP]
    if not metrics:
        raise UserError(f"{total} iterations are too few to measure: give more --minutes, or smaller batches")
    seconds = [m["time/iteration_s"] for m in metrics]

    def over_time(name: str) -> float:
        return sum(m[name] * s for m, s in zip(metrics, seconds, strict=True)) / sum(seconds)

    return (
        {name: over_time(f"throughput/{name}_per_s") for name in _RATES}
        | {f"busy_{name}": over_time(f"busy/{name}") for name in _BUSY}
        | {"memory_gib": max(m["memory/gib"] for m in metrics), "iterations": float(len(metrics))}
    )


def _table(medians: dict[str, dict[str, float]], title: str) -> Table:
    table = Table(title=f"{title}; in brackets: times the last one's")
    table.add_column("in a second")
    for name in medians:
        table.add_column(name.rpartition(".")[2], justify="right")
    last = list(medians.values())[-1]
    for name in _RATES:
        ratios = [f"{m[name]:.3g} ({m[name] / last[name]:.2f}x)" if last[name] else "-" for m in medians.values()]
        table.add_row(name.replace("_", " "), *ratios)
    for name in _BUSY:
        table.add_row(f"busy: {name}", *(f"{m[f'busy_{name}']:.0%}" for m in medians.values()))
    table.add_row("memory of all processes", *(f"{m['memory_gib']:.1f} GiB" for m in medians.values()))
    return table
