"""What a study's finished runs have in common: figures of every variant, tables, and control steps saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from vla_rl.observability.plots import Metrics, first_reached, rollouts_key, series

WINDOW, EPISODES = 5, 120  # at least so many iterations, and episodes, whose mean success counts as reached
WARMUP = 2  # first iterations, which throughput leaves out: queues are filled
RATES = ("env_steps", "chunks", "episodes", "batches")
STAGES = ("simulate", "render", "reset", "inference", "learner")
_RESAMPLES = 10_000


def summarize(of_seeds: list[Metrics], threshold: float) -> dict[str, list[float]]:
    """Values of every seed, by figure; figures that no run has are left out.

    ``threshold``: success rate of the rollouts up to which minutes and control steps are measured.
    """

    def last(key: str) -> list[float]:
        return [float(y[-1]) for y in (series(m, key)[1] for m in of_seeds) if len(y)]

    def mean(key: str) -> list[float]:
        return [float(y.mean()) for y in (series(m, key)[1] for m in of_seeds) if len(y)]

    def total(key: str, unit: float) -> list[float]:
        return [float(y.sum()) / unit for y in (series(m, key)[1] for m in of_seeds) if len(y)]

    def ratio(of: str, to: str) -> list[float]:  # of frames, one chunk ahead
        return [a / b for a, b in zip(*(last(f"world_model/depth1_{name}") for name in (of, to)), strict=True)]

    reached = [time_to(m, threshold) for m in of_seeds]
    played = [steps_to(m, threshold) for m in of_seeds]
    figures = {
        "greedy success": last("eval/greedy_success"),
        "sampled success": last("eval/sampled_success"),
        f"minutes to {threshold:.0%}": [t for t in reached if t is not None],
        f"steps to {threshold:.0%}": [float(n) for n in played if n is not None],
        "steps in all": last("episodes/control_steps"),
        "audit's slope": mean("world_model/audit_slope"),
        "frames' error to copying's": ratio("predicted", "copied"),
        "shuffled frames' error to copying's": ratio("shuffled", "copied"),
        "frames' gap to copying's": last("world_model/depth1_gap"),
        "minutes in all": [m[-1]["time/seconds"] / 60 for m in of_seeds],
        "minutes without evaluations": total("time/iteration_s", 60.0),
        "minutes of a core": total("time/iteration_cpu_s", 60.0),
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
    _, seconds = series(metrics, "time/iteration_s")
    reached = _reached(metrics, threshold)
    return None if reached is None else float(seconds[: reached + 1].sum() / 60)


def steps_to(metrics: Metrics, threshold: float) -> float | None:
    """Control steps played, likewise; None also for runs that did not count them."""
    steps, _ = series(metrics, rollouts_key(metrics), "episodes/control_steps")
    reached = _reached(metrics, threshold) if len(steps) else None
    return None if reached is None else float(steps[reached])


def _reached(metrics: Metrics, threshold: float) -> int | None:
    """The middle of the first window of iterations whose success is as high: in small batches, a few are by chance."""
    _, success = series(metrics, rollouts_key(metrics))
    _, episodes = series(metrics, "rollout/episodes")
    half = WINDOW // 2
    if len(episodes):
        half = max(half, math.ceil((EPISODES / float(np.median(episodes)) - 1) / 2))
    width = 2 * half + 1
    if len(success) < width:
        return None
    above = np.flatnonzero(np.convolve(success, np.full(width, 1 / width), "valid") >= threshold - 1e-9)
    return half + int(above[0]) if len(above) else None


@dataclass(frozen=True, slots=True)
class Saving:
    """How many times fewer control steps than the baseline a variant takes until evaluations reach a success rate.

    Attributes:
        steps: mean over the seeds that reach it; None if none does.
        reached: how many of the variant's seeds do.
        ratio: mean steps of the baseline to those of the variant. A baseline's seed that does not reach it counts with
            all of its steps, so the ratio is then too small; a variant's seed that does not makes it 0.
        low, high: 95 % bootstrap interval of the ratio, over seeds.
    """

    steps: float | None
    reached: int
    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, baseline: Sequence[Metrics], variant: Sequence[Metrics], kind: str, threshold: float) -> Saving:
        """``kind``: greedy or sampled success."""
        found = [[evaluated_steps(m, kind, threshold) for m in runs] for runs in (baseline, variant)]
        ends = [m[-1]["episodes/control_steps"] for m in baseline]
        theirs = np.array([end if steps is None else steps for steps, end in zip(found[0], ends, strict=True)])
        ours = np.array([np.inf if steps is None else steps for steps in found[1]])
        rng = np.random.default_rng(0)
        means = [x[rng.integers(len(x), size=(_RESAMPLES, len(x)))].mean(axis=1) for x in (theirs, ours)]
        low, high = np.quantile(means[0] / means[1], (0.025, 0.975))
        reached = [steps for steps in found[1] if steps is not None]
        return cls(
            steps=float(np.mean(reached)) if reached else None,
            reached=len(reached),
            ratio=float(theirs.mean() / ours.mean()),
            low=float(low),
            high=float(high),
        )


def evaluated_steps(metrics: Metrics, kind: str, threshold: float) -> float | None:
    """Control steps played until evaluations, joined by straight lines, reach a success rate; None: never."""
    return first_reached(*series(metrics, f"eval/{kind}_success", "episodes/control_steps"), threshold)


def savings_table(title: str, seeds: int, savings: Mapping[str, Mapping[str, Saving]]) -> Table:
    """``savings``: of every variant, by what is reached."""
    table = Table(title=f"{title}; ratio to the baseline, and its 95 % bootstrap interval over {seeds} seeds")
    table.add_column("variant")
    for name in next(iter(savings.values())):
        table.add_column(f"steps to {name}", justify="right")
        table.add_column("ratio", justify="right")
    for variant, found in savings.items():
        cells = []
        for saving in found.values():
            missing = f" ({saving.reached} of {seeds})" if saving.reached < seeds else ""
            cells.append("never" if saving.steps is None else f"{saving.steps:,.0f}{missing}")
            cells.append(f"{saving.ratio:.2f} ({saving.low:.2f} to {saving.high:.2f})")
        table.add_row(variant, *cells)
    return table


def make_table(title: str, seeds: int, rows: Mapping[str, dict[str, list[float]]]) -> Table:
    """Mean and standard error over the seeds; a row per variant."""
    table = Table(title=f"{title}; mean of {seeds} seeds ± standard error")
    table.add_column("variant")
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    for name in names:
        table.add_column(name, justify="right")
    for variant, row in rows.items():
        table.add_row(variant, *(_cell(name, row.get(name, []), seeds) for name in names))
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
