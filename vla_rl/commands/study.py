"""`vla-rl study`: several variants of a run, each with several seeds.

    study file ──▶ all configs checked ──▶ runs, seed after seed, one or some at a time ──▶ tables, picture, figures

An interrupted study continues: complete runs are not repeated, an incomplete one is resumed. A study of learning
compares success; a study of throughput (``train.max_minutes``, no evaluations) compares rates.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from vla_rl.commands.run_folder import machine_record
from vla_rl.config.run_config import RunConfig
from vla_rl.config.yaml_file import load_model
from vla_rl.core.errors import UserError
from vla_rl.core.files import write_json
from vla_rl.core.shipped import find_config
from vla_rl.observability.console import make_console
from vla_rl.observability.plots import Metrics, draw_study, read_metrics, rollouts_key, series, smoothed
from vla_rl.placement.checks import load_checked_config

WINDOW = 5  # iterations of the moving mean in which a success rate counts as reached
WARMUP = 2  # first iterations, which throughput leaves out: queues are filled
RATES = ("env_steps", "chunks", "episodes", "batches")
STAGES = ("simulate", "render", "reset", "inference", "learner")


class StudyFile(BaseModel):
    """What a study compares."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    config: Path = Field(description="The configuration that all variants share.")
    overrides: list[str] = Field([], description="KEY=VALUE pairs for all variants.")
    variants: dict[str, list[str]] = Field(min_length=2, description="KEY=VALUE pairs of each variant, by its name.")
    seeds: list[int] = Field(min_length=1)
    threshold: float = Field(0.8, gt=0, le=1, description="Success rate of the rollouts up to which time is measured.")


@dataclass(frozen=True, slots=True)
class Run:
    """One variant with one seed."""

    variant: str
    seed: int
    folder: Path
    overrides: list[str]
    config: RunConfig


def study_command(args: Any) -> int:
    """Run what is missing of the study, then show it; see ``vla-rl study --help``."""
    study = read_study(find_config(args.study))
    runs = list(plan_runs(study, args.runs / args.study.stem))
    console = make_console()
    execute_all(study.config, [run for run in runs if not is_complete(run)], args.jobs, console)
    metrics: dict[str, list[Metrics]] = {name: [] for name in study.variants}
    for run in runs:
        metrics[run.variant].append(read_metrics(run.folder))
    rows = {name: summarize(of_seeds, study.threshold) for name, of_seeds in metrics.items()}
    rates = {name: summarize_throughput(of_seeds) for name, of_seeds in metrics.items()}
    console.print(make_table(f"{study.title}: learning", study, rows))
    if any(rates.values()):
        console.print(make_table(f"{study.title}: throughput", study, rates))
    if args.output:
        draw_study(metrics, args.output, study.title)
        console.print(str(args.output))
    if args.json:
        about = {"title": study.title, "study": study.model_dump(mode="json"), "machine": machine_record()}
        found = {name: [evaluations(m) for m in of_seeds] for name, of_seeds in metrics.items()}
        write_json(args.json, about | {"variants": rows, "throughput": rates, "evaluations": found})
    return 0


def read_study(path: Path) -> StudyFile:
    """Raises UserError with all mistakes of the file."""
    return load_model(path, StudyFile, "a study, such as configs/studies/staleness.yaml")


def plan_runs(study: StudyFile, folder: Path) -> Iterator[Run]:
    """All runs, seed after seed, so that an unfinished study holds every variant equally often.

    Raises UserError if a variant's config is refused.
    """
    for seed in study.seeds:
        for variant, changes in study.variants.items():
            name = f"{variant.replace(' ', '_').replace('/', '-')}-seed{seed}"
            overrides = [*study.overrides, *changes, f"seed={seed}", f"log.dir={folder}", f"log.name={name}"]
            config = load_checked_config(study.config, overrides)
            yield Run(variant, seed, folder / name, overrides, config)


def is_complete(run: Run) -> bool:
    """Whether all iterations are done, or the time was up. A run writes ``curves.png`` last."""
    if not (run.folder / "curves.png").is_file():
        return False
    last, train = read_metrics(run.folder)[-1], run.config.train
    time_is_up = train.max_minutes is not None and last["time/seconds"] >= 60 * train.max_minutes
    return last["iteration"] >= train.iterations or (last["iteration"] > 0 and time_is_up)


def execute_all(config: Path, missing: Sequence[Run], jobs: int, console: Console) -> None:
    """``jobs`` runs at a time, in order. If one fails, the running ones are waited for, and no other one starts."""
    started, over = time.monotonic(), Event()
    console.print(f"{len(missing)} runs to do, {jobs} at a time")

    def unless_over(run: Run) -> None:
        if over.is_set():
            return
        try:
            execute(config, run)
        except BaseException:
            over.set()  # before this thread takes the next run
            raise

    with ThreadPoolExecutor(jobs) as pool:
        under_way = {pool.submit(unless_over, run): run for run in missing}
        try:
            for done, future in enumerate(as_completed(under_way), 1):
                future.result()
                run = under_way[future]
                left = (time.monotonic() - started) / done * (len(missing) - done) / 60
                console.print(f"{done} of {len(missing)}: {run.variant}, seed {run.seed}; about {left:.0f} min left")
        except BaseException:
            over.set()
            raise


def execute(config: Path, run: Run) -> None:
    """Train in a process of its own; its output goes to a file. Raises UserError if it fails or is stopped."""
    command = [sys.executable, "-m", "vla_rl.commands.cli", "train"]
    if list((run.folder / "checkpoints").glob("*")):
        command += ["--resume", str(run.folder)]
    elif run.folder.exists():
        raise UserError(f"{run.folder} holds an unfinished run without a checkpoint: remove it, then start again")
    else:
        command += [str(config), *run.overrides]
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    log = run.folder.with_suffix(".log")
    with log.open("ab") as out:  # Ctrl-C reaches the run as well: it writes a checkpoint and ends
        status = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False
        ).returncode
    if status or not is_complete(run):
        raise UserError(
            f"{run.folder} ended early with status {status}; see {log}, then start the study again to go on"
        )


def summarize(of_seeds: list[Metrics], threshold: float) -> dict[str, list[float]]:
    """Values of every seed, by figure; figures that no run has are left out. ``threshold``: see ``StudyFile``."""

    def last(key: str) -> list[float]:
        return [float(y[-1]) for y in (series(m, key)[1] for m in of_seeds) if len(y)]

    def mean(key: str) -> list[float]:
        return [float(y.mean()) for y in (series(m, key)[1] for m in of_seeds) if len(y)]

    reached = [time_to(m, threshold) for m in of_seeds]
    played = [steps_to(m, threshold) for m in of_seeds]
    figures = {
        "greedy success": last("eval/greedy_success"),
        "sampled success": last("eval/sampled_success"),
        f"minutes to {threshold:.0%}": [t for t in reached if t is not None],
        f"steps to {threshold:.0%}": [float(n) for n in played if n is not None],
        "steps in all": last("episodes/control_steps"),
        "audit's slope": mean("world_model/audit_slope"),
        "minutes in all": [m[-1]["time/seconds"] / 60 for m in of_seeds],
        "mean staleness": mean("rollout/staleness_mean"),
        "effective samples": mean("learner/ess"),
        "clipped": mean("learner/clip_fraction"),
        "explained variance": mean("learner/explained_variance"),
    }
    return {name: values for name, values in figures.items() if values}


def evaluations(metrics: Metrics) -> list[dict[str, float]]:
    """All evaluations of a run, with the updates and the training episodes' control steps before each."""
    names = ("iteration", "episodes/control_steps", "eval/greedy_success", "eval/sampled_success")
    return [{name: m[name] for name in names if name in m} for m in metrics if "eval/greedy_success" in m]


def summarize_throughput(of_seeds: list[Metrics]) -> dict[str, list[float]]:
    """Rates per second, busy shares and memory of every seed, by figure.

    Means over the iterations after the first ones, weighted by their duration. Empty if a run has too few of them.
    """
    figures: dict[str, list[float]] = {}
    for metrics in of_seeds:
        steady = [m for m in metrics if m["iteration"] > WARMUP]
        if not steady:
            return {}
        seconds = [m["time/iteration_s"] for m in steady]

        def mean(name: str, steady: Metrics = steady, seconds: list[float] = seconds) -> float:
            return float(np.average([m[name] for m in steady], weights=seconds))

        values = {f"{name.replace('_', ' ')}/s": mean(f"throughput/{name}_per_s") for name in RATES}
        values |= {f"busy: {name}": mean(f"busy/{name}") for name in STAGES}
        values["memory, GiB"] = max(m["memory/gib"] for m in steady)
        for name, value in values.items():
            figures.setdefault(name, []).append(value)
    return figures


def time_to(metrics: Metrics, threshold: float) -> float | None:
    """Minutes of training, without evaluations, until the rollouts' moving mean reaches a success rate; None: never."""
    _, success = series(metrics, rollouts_key(metrics))
    _, seconds = series(metrics, "time/iteration_s")
    above = np.flatnonzero(smoothed(success, WINDOW) >= threshold)
    return float(seconds[: above[0] + 1].sum() / 60) if len(above) else None


def steps_to(metrics: Metrics, threshold: float) -> float | None:
    """Control steps played, likewise; None also for runs that did not count them."""
    steps, success = series(metrics, rollouts_key(metrics), "episodes/control_steps")
    above = np.flatnonzero(smoothed(success, WINDOW) >= threshold)
    return float(steps[above[0]]) if len(above) else None


def make_table(title: str, study: StudyFile, rows: Mapping[str, dict[str, list[float]]]) -> Table:
    """Mean and standard error over the seeds; a row per variant."""
    table = Table(title=f"{title}; mean of {len(study.seeds)} seeds ± standard error")
    table.add_column("variant")
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    for name in names:
        table.add_column(name, justify="right")
    for variant, row in rows.items():
        table.add_row(variant, *(_cell(name, row.get(name, []), len(study.seeds)) for name in names))
    return table


def _cell(name: str, values: list[float], seeds: int) -> str:
    if not values:
        return "never"
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
    missing = f" ({len(values)} of {seeds})" if len(values) < seeds else ""
    if name.endswith("/s"):
        return f"{np.mean(values):.3g} ± {error:.2g}{missing}"
    if name.startswith("steps"):
        return f"{np.mean(values):,.0f} ± {error:,.0f}{missing}"
    if name.startswith("minutes") or name in ("mean staleness", "memory, GiB", "audit's slope"):
        return f"{np.mean(values):.2f} ± {error:.2f}{missing}"
    return f"{100 * np.mean(values):.1f} ± {100 * error:.1f} %{missing}"
