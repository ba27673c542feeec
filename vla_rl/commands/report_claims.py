"""What a report says first: what training has brought, in a sentence, and what the runs are."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.commands.report_runs import WINDOW, Groups, Run, all_runs
from vla_rl.observability.plots import rollouts_key, series, smoothed

_SHOWN = 3  # tasks


def claims(groups: Groups) -> list[str]:
    """A sentence for each group; and what the numbers are not."""
    said = [f"{label}: {_claim(runs)}" if len(groups) > 1 else _claim(runs) for label, runs in groups.items()]
    if any(run.about.get("assets") == "placeholder" for run in all_runs(groups)):
        said.append("On placeholder assets: these are not benchmark numbers.")
    return said


def facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Name and value of what identifies the runs; what all of them share is said once."""
    found: dict[str, list[Any]] = {
        "algorithm": [run.config.get("algo.name") for run in runs],
        "simulator": [run.about.get("simulator", run.config.get("env.name")) for run in runs],
        "tasks": [_tasks(run) for run in runs],
        "assets": [run.about.get("assets") for run in runs],
        "starts from": [run.config.get("policy.checkpoint") for run in runs],
        "seed": [run.config.get("seed") for run in runs],
        "updates": [_updates(run) for run in runs],
        "minutes": [f"{m['time/seconds'] / 60:.1f}" for run in runs if "time/seconds" in (m := run.metrics[-1])],
        "status": [run.status if len(runs) == 1 else run.status.partition(";")[0] for run in runs],
    }
    unique = {name: dict.fromkeys(str(v) for v in values if v is not None) for name, values in found.items()}
    return [(name, ", ".join(values)) for name, values in unique.items() if values]


def kind_of(runs: Sequence[Run]) -> str:
    """The evaluations to quote."""
    return "greedy" if any("eval/greedy_success" in m for run in runs for m in run.metrics) else "sampled"


def _tasks(run: Run) -> str | None:
    names = [str(name) for name in run.about.get("instructions", ())]
    return "; ".join(names[:_SHOWN] + [f"and {len(names) - _SHOWN} more"] * (len(names) > _SHOWN)) or None


def _updates(run: Run) -> str:
    planned = run.config.get("train.iterations")
    return f"{run.metrics[-1]['iteration']:.0f}" + (f" of {planned}" if planned else "")


def _claim(runs: Sequence[Run]) -> str:
    """Success before and after, of one run or of the seeds of a group."""
    kind = kind_of(runs)
    evaluations = [[m for m in run.metrics if f"eval/{kind}_success" in m] for run in runs]
    found = [of_run for of_run in evaluations if of_run]
    if not found:
        return _claim_of_rollouts(runs)
    what = f"{kind.capitalize()} success"
    if len(runs) > 1:
        starts, ends = (np.array([of_run[end][f"eval/{kind}_success"] for of_run in found]) for end in (0, -1))
        rise = f"{_verb(starts.mean(), ends.mean())} from {starts.mean():.0%} to {ends.mean():.0%}"
        return f"{what} {rise}, mean of {len(found)} seeds; they ended at {ends.min():.0%} to {ends.max():.0%}."
    first, last = found[0][0], found[0][-1]
    (before, low, high), start = _rate(first, kind), moment(first)
    if first is last:
        return f"{what} {start}: {_said(before, low, high)}. No other evaluation has been made."
    after, *limits = _rate(last, kind)
    text = f"{what} {_verb(before, after)} from {_said(before, low, high)} {start} to {_said(after, *limits)} "
    apart = high < limits[0] or limits[1] < low
    return f"{text}{moment(last)}. The intervals {'do not ' if apart else ''}overlap."


def _claim_of_rollouts(runs: Sequence[Run]) -> str:
    curves = [smoothed(series(run.metrics, rollouts_key(run.metrics))[1], WINDOW) for run in runs]
    ends = [(curve[0], curve[-1]) for curve in curves if len(curve)]
    if not ends:
        return "No success has been measured yet."
    first, last = np.mean(ends, axis=0)
    return f"No evaluation was made. Of the rollouts, {first:.0%} succeeded at first and {last:.0%} at last."


def _rate(record: Mapping[str, float], kind: str) -> tuple[float, float, float]:
    """Success and its interval, which ``success_rate`` has computed; no certainty at all where it was not recorded."""
    return (
        record[f"eval/{kind}_success"],
        record.get(f"eval/{kind}_low95", 0.0),
        record.get(f"eval/{kind}_high95", 1.0),
    )


def _said(rate: float, low: float, high: float) -> str:
    return f"{rate:.0%} (95%: {low:.0%} to {high:.0%})"


def moment(record: Mapping[str, float]) -> str:
    """When the record was written."""
    return f"after {record['iteration']:.0f} updates" if record["iteration"] else "before training"


def _verb(before: float, after: float) -> str:
    return "rose" if after > before else "fell" if after < before else "stayed:"
