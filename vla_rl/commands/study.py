"""`vla-rl study`: several variants of a run, each with several seeds.

    study file ──▶ all configs checked ──▶ runs, seed after seed, one or some at a time ──▶ tables, picture, figures

An interrupted study continues: complete runs are not repeated, an incomplete one is resumed. A study of learning
compares success; a study of throughput (``train.max_minutes``, no evaluations) compares rates.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from rich.console import Console

from vla_rl.commands.metadata import machine_record
from vla_rl.commands.study_figures import (
    Saving,
    evaluations,
    make_table,
    savings_table,
    summarize,
    summarize_throughput,
)
from vla_rl.config.run_config import RunConfig
from vla_rl.config.yaml_file import load_model
from vla_rl.core.errors import UserError
from vla_rl.core.files import write_json
from vla_rl.core.shipped import find_config
from vla_rl.observability.console import ProgressDisplay, make_console, say
from vla_rl.observability.plots import Metrics, draw_study, read_metrics
from vla_rl.placement.checks import load_checked_config

_LOOK_S = 3.0  # between two looks at what runs have behind them


class StudyFile(BaseModel):
    """What a study compares."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    config: Path = Field(description="The configuration that all variants share.")
    overrides: list[str] = Field([], description="KEY=VALUE pairs for all variants.")
    variants: dict[str, list[str]] = Field(min_length=2, description="KEY=VALUE pairs of each variant, by its name.")
    seeds: list[int] = Field(min_length=1)
    threshold: float = Field(0.8, gt=0, le=1, description="Success rate of the rollouts up to which time is measured.")
    baseline: str | None = Field(None, description="The variant with which control steps are compared.")
    thresholds: dict[Literal["greedy", "sampled"], Annotated[float, Field(gt=0, le=1)]] = Field(
        {}, description="Success rates of evaluations up to which control steps are compared with the baseline's."
    )

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.baseline is not None and self.baseline not in self.variants:
            raise ValueError(f"baseline {self.baseline!r} is none of the variants {', '.join(self.variants)}")
        if (self.baseline is None) != (not self.thresholds):
            raise ValueError("baseline and thresholds are given together, or neither")
        return self


@dataclass(frozen=True, slots=True)
class Run:
    """One variant with one seed."""

    variant: str
    seed: int
    folder: Path
    overrides: list[str]
    config: RunConfig

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


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
    seeds = len(study.seeds)
    console.print(make_table(f"{study.title}: learning", seeds, rows))
    savings = compare_steps(study, metrics)
    if savings:
        console.print(savings_table(study.title, seeds, savings))
    if any(rates.values()):
        console.print(make_table(f"{study.title}: throughput", seeds, rates))
    if args.output:
        draw_study(metrics, args.output, study.title)
        console.print(str(args.output))
    if args.json:
        about = {"title": study.title, "study": study.model_dump(mode="json"), "machine": machine_record()}
        found = {name: [evaluations(m) for m in of_seeds] for name, of_seeds in metrics.items()}
        saved = {name: {kind: asdict(s) for kind, s in of.items()} for name, of in savings.items()}
        write_json(args.json, about | {"variants": rows, "savings": saved, "throughput": rates, "evaluations": found})
    return 0


def compare_steps(study: StudyFile, metrics: Mapping[str, Sequence[Metrics]]) -> dict[str, dict[str, Saving]]:
    """Control steps of every variant, compared with the baseline, by what is reached; empty without a baseline."""
    if study.baseline is None:
        return {}
    baseline = metrics[study.baseline]
    return {
        variant: {f"{at:.0%} {kind}": Saving.of(baseline, runs, kind, at) for kind, at in study.thresholds.items()}
        for variant, runs in metrics.items()
    }


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
    over = Event()
    console.print(f"{len(missing)} runs to do, {jobs} at a time")
    if not missing:
        return
    before = sum(map(_iterations, missing))
    to_do = sum(run.config.train.iterations for run in missing) - before

    def unless_over(run: Run) -> None:
        if over.is_set():
            return
        try:
            execute(config, run)
        except BaseException:
            over.set()  # before this thread takes the next run
            raise

    with ThreadPoolExecutor(jobs) as pool, ProgressDisplay(console, "iterations of all runs", to_do) as progress:
        runs = {pool.submit(unless_over, run): run for run in missing}
        under_way, reached = set(runs), {future: _iterations(run) for future, run in runs.items()}
        try:
            while under_way:
                ended, under_way = wait(under_way, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                for future in ended:
                    future.result()
                    reached[future] = runs[future].config.train.iterations  # also if its time was up before
                    say(console, f"{len(missing) - len(under_way)} of {len(missing)}: {runs[future]} is complete")
                running = {future: runs[future] for future in under_way if future.running()}
                reached |= {future: _iterations(run) for future, run in running.items()}
                progress.update(sum(reached.values()) - before, ", ".join(map(str, running.values())))
        except BaseException:
            over.set()
            raise


def _iterations(run: Run) -> int:
    """How many it has behind it."""
    try:
        return int(read_metrics(run.folder)[-1]["iteration"])
    except UserError:  # it has not recorded any
        return 0


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
    log = run.folder.with_name(f"{run.folder.name}.log")  # a variant's name may have dots
    with log.open("ab") as out:  # Ctrl-C reaches the run as well: it writes a checkpoint and ends
        status = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False
        ).returncode
    if status or not is_complete(run):
        raise UserError(
            f"{run.folder} ended early with status {status}; see {log}, then start the study again to go on"
        )
