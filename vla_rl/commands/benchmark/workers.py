"""`vla-rl benchmark workers CONFIG --workers 1,2,4,...`: what the runtime itself costs, and what saturates first.

The simulators of the config sleep, and its devices are virtual: all processor time is the runtime's own. Batches
grow with the number of env workers. A process that exists once per run is at its limit when it needs a whole core; env
workers and inference servers multiply with machines.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from vla_rl.commands.metadata import git_commit, machine_record, package_versions
from vla_rl.commands.short_run import short_run
from vla_rl.config.run_config import RunConfig
from vla_rl.core.files import write_json
from vla_rl.observability.callbacks import Callback
from vla_rl.observability.console import make_console
from vla_rl.observability.plots import figure, read_metrics
from vla_rl.placement.checks import load_checked_config

DRIVER = "driver"
ONCE = (DRIVER, "StoreProcess", "LearnerProcess", "raylet", "gcs_server")  # of which a run, or its machine, has one


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a run with so many env workers. ``milliseconds``: processor time for an episode, by kind of process.

    The clock ticks every 10 ms: a process that needed less in the whole measurement stands there with 0.
    """

    workers: int
    chunks_per_s: float
    episodes_per_s: float
    machine: float  # share of its cores in use
    milliseconds: dict[str, float]

    @property
    def first_limit(self) -> tuple[str, float]:
        """The process that exists once and needs most of a core, and the episodes/s at which it needs all of it."""
        name = max(ONCE, key=lambda kind: self.milliseconds.get(kind, 0.0))
        return name, 1e3 / max(self.milliseconds.get(name, 0.0), 1e-9)


class ProcessorTimes(Callback):
    """Seconds of processor time by kind of process, after each iteration. Ends the run when all has been measured.

    The measurement begins when all env workers have been there for an iteration, and after ``warm_up`` iterations.
    """

    def __init__(self, workers: int, warm_up: int, iterations: int) -> None:
        self._workers, self._warm_up, self._iterations = workers, warm_up, iterations
        self.first: int | None = None  # the iteration after which the measurement begins
        self.after: dict[int, Mapping[str, float]] = {}

    @property
    def last(self) -> int:
        """The last iteration that is measured."""
        return (self.first or 10**6) + self._iterations

    def on_iteration(self, iteration: int, metrics: Mapping[str, float]) -> bool:
        """See ``Callback``."""
        root, total, there = psutil.Process(), Counter[str](), Counter[str]()
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):  # it has ended
                times = process.cpu_times()
                kind = DRIVER if process == root else kind_of(process.cmdline())
                total[kind] += times.user + times.system
                there[kind] += 1
        self.after[iteration] = total
        if self.first is None and there["EnvWorkerProcess"] >= self._workers:
            self.first = max(iteration + 1, self._warm_up)
        return iteration == self.last


def kind_of(command: Sequence[str]) -> str:
    """The class of a Ray actor, or the name of a program."""
    title = command[0] if command else ""
    if title.startswith("ray::"):
        return title.removeprefix("ray::").split(".")[0].removeprefix("Virtual")
    return Path(title).name


def workers_command(args: Any) -> int:
    """Measure each number of env workers, print, draw and write."""
    config, console = load_checked_config(args.config, args.overrides), make_console()
    costs = []
    for workers in args.workers:
        costs.append(cost_of(config, workers, args.iterations))
        console.print(_table(costs))
        if args.json:
            about = {"machine": machine_record(), "packages": package_versions(), "git_commit": git_commit()}
            about |= {"config": config.model_dump(mode="json")}
            write_json(args.json, about | {"costs": [asdict(cost) for cost in costs]})
    if args.output:
        draw_costs(costs, args.output, args.config.stem)
    return 0


def cost_of(config: RunConfig, workers: int, iterations: int) -> Cost:
    """Run with ``workers`` env workers, and as many times the config's episodes in a super-batch."""
    many = config.with_values(
        {"placement.env_workers": workers, "train.batch_episodes": config.train.batch_episodes * workers}
    )
    warm_up = config.max_staleness + 3  # until what was played before the first update is trained
    times = ProcessorTimes(workers, warm_up, iterations)
    with short_run(many, None, [times]) as run:
        first, last = times.first or 0, times.last
        if last not in times.after:
            raise KeyboardInterrupt  # which the run takes for a wish to stop with a checkpoint
        measured = [m for m in read_metrics(run) if first < m["iteration"] <= last]
    seconds = sum(m["time/iteration_s"] for m in measured)

    def played(name: str) -> float:
        return sum(m[f"throughput/{name}_per_s"] * m["time/iteration_s"] for m in measured)

    before, after = times.after[first], times.after[last]
    spent = {kind: 1e3 * (after[kind] - before.get(kind, 0.0)) / played("episodes") for kind in after}
    return Cost(
        workers=workers,
        chunks_per_s=played("chunks") / seconds,
        episodes_per_s=played("episodes") / seconds,
        machine=sum(m["machine/cpu"] for m in measured) / len(measured),
        milliseconds={kind: value for kind, value in sorted(spent.items()) if value >= 0},
    )


def _table(costs: Sequence[Cost]) -> Table:
    table = Table(title="processor time of the runtime, milliseconds for each episode")
    table.add_column("env workers")
    for cost in costs:
        table.add_column(str(cost.workers), justify="right")
    table.add_row("chunks/s", *(f"{cost.chunks_per_s:.4g}" for cost in costs))
    table.add_row("episodes/s", *(f"{cost.episodes_per_s:.3g}" for cost in costs))
    table.add_row("cores in use", *(f"{cost.machine:.0%}" for cost in costs), end_section=True)
    for kind in sorted({kind for cost in costs for kind, spent in cost.milliseconds.items() if spent >= 0.005}):
        table.add_row(kind, *(f"{cost.milliseconds.get(kind, 0.0):.2f}" for cost in costs))
    table.add_row("sum", *(f"{sum(cost.milliseconds.values()):.2f}" for cost in costs), end_section=True)
    table.add_row("first limit", *(cost.first_limit[0] for cost in costs))
    table.add_row("at episodes/s", *(f"{cost.first_limit[1]:.0f}" for cost in costs))
    return table


def draw_costs(costs: Sequence[Cost], path: Path, title: str) -> None:
    """Chunks/s, and milliseconds for an episode by kind of process, over env workers."""
    counts = [cost.workers for cost in costs]
    with figure(path, title, 1, 2, (11, 4.2)) as (rate, spent):
        rate.plot(counts, [cost.chunks_per_s for cost in costs], "o-", label="measured")
        one = costs[0].chunks_per_s / costs[0].workers
        rate.plot(counts, [one * count for count in counts], "k:", label="in proportion to the first")
        rate.set(title="chunks/s", xscale="log", yscale="log")
        for kind in sorted({kind for cost in costs for kind in cost.milliseconds}):
            spent.plot(counts, [cost.milliseconds.get(kind, 0.0) for cost in costs], "o-", label=kind)
        spent.set(title="processor time for an episode, milliseconds", xscale="log", ylim=(0, None))
        for axis in (rate, spent):
            axis.set(xlabel="env workers (super-batches grow with them)")
            axis.set_xticks(counts, [str(count) for count in counts])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
