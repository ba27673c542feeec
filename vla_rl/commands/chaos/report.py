"""The report of `vla-rl chaos`: a table of faults and costs, the ledger, and a run beside one without faults."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.commands.chaos.training_run import adds_up, ledger
from vla_rl.commands.checkpoints import Checkpoints
from vla_rl.commands.metadata import machine_record
from vla_rl.core.files import write_json
from vla_rl.observability.plots import Metrics, figure, read_metrics, rollouts_key, smoothed

_WINDOW = 5  # iterations of the moving mean


def summarize(events: Sequence[Mapping[str, Any]], run: Path, undisturbed: Path) -> dict[str, Any]:
    """The figures of a report, JSON-able. ``run``, ``undisturbed``: the folders."""
    disturbed, calm = read_metrics(run), read_metrics(undisturbed)
    costs: dict[str, list[float]] = {}
    for event in events:
        costs.setdefault(event["kind"], []).append(event["seconds"])
    usual = float(np.median(np.diff([r["time"] for r in calm if r["iteration"] > 0]) if len(calm) > 2 else [0.0]))
    rates = {"disturbed": _per_minute(disturbed), "undisturbed": _per_minute(calm)}
    steps = {"disturbed": _steps_per_second(disturbed), "undisturbed": _steps_per_second(calm)}
    return {
        "faults": {
            kind: {"count": len(s), "mean_s": float(np.mean(s)), "median_s": float(np.median(s)), "max_s": max(s)}
            for kind, s in sorted(costs.items())
        },
        "count": len(events),
        "resumed": sum(event["resumed"] for event in events),
        "usual_iteration_s": usual,
        "updates_per_minute": rates,
        "trained_steps_per_s": steps,
        "longest_pause_s": {"disturbed": _longest_pause(disturbed), "undisturbed": _longest_pause(calm)},
        "throughput": steps["disturbed"] / steps["undisturbed"] if steps["undisturbed"] else None,
        "ledger": ledger(disturbed[-1]),
        "unbalanced_iterations": [int(r["iteration"]) for r in disturbed if not adds_up(ledger(r))],
        "set_aside": int(disturbed[-1].get("episodes/set_aside", 0)),
        "success": {"disturbed": _last_success(disturbed), "undisturbed": _last_success(calm)},
        "equal_weights": _equal_weights(run, undisturbed),
        "machine": machine_record(),
        "events": list(events),
    }


def is_sound(summary: Mapping[str, Any]) -> bool:
    """Whether no episode was missing, at the end and at any iteration."""
    return adds_up(summary["ledger"]) and not summary["unbalanced_iterations"]


def write_report(folder: Path, summary: Mapping[str, Any], disturbed: Metrics, calm: Metrics, title: str) -> None:
    """report.json, report.md and report.png in ``folder``."""
    write_json(folder / "report.json", summary)
    (folder / "report.md").write_text(_markdown(summary, title))
    _draw(folder / "report.png", summary["events"], disturbed, calm, title)


def _per_minute(metrics: Metrics) -> float:
    """Updates that were kept, between the first record and the last."""
    times = [r["time"] for r in metrics]
    span = times[-1] - times[0]
    return 60 * (metrics[-1]["iteration"] - metrics[0]["iteration"]) / span if span > 0 else 0.0


def _steps_per_second(metrics: Metrics) -> float:
    """Control steps that kept updates were trained on: updates themselves get shorter as a policy gets better."""
    span = metrics[-1]["time"] - metrics[0]["time"]
    return sum(r.get("rollout/env_steps", 0.0) for r in metrics[1:]) / span if span > 0 else 0.0


def _longest_pause(metrics: Metrics) -> float:
    """Between two updates, in seconds."""
    times = [r["time"] for r in metrics]
    return max((after - before for before, after in pairwise(times)), default=0.0)


def _last_success(metrics: Metrics) -> float | None:
    key = rollouts_key(metrics)
    values = [r[key] for r in metrics if key in r][-_WINDOW:]
    return float(np.mean(values)) if values else None


def _equal_weights(run: Path, undisturbed: Path) -> bool | None:
    """Whether both runs ended with the same policy, bit for bit; None if not at the same iteration."""
    last = [Checkpoints(folder / "checkpoints", 1).complete()[-1:] for folder in (run, undisturbed)]
    if not all(last) or last[0][0].name != last[1][0].name:
        return None
    first, second = ((path[0] / "policy/model.safetensors").read_bytes() for path in last)
    return first == second


def _markdown(summary: Mapping[str, Any], title: str) -> str:
    rates, success, pauses = summary["updates_per_minute"], summary["success"], summary["longest_pause_s"]
    steps = summary["trained_steps_per_s"]
    rows = [
        f"| {kind} | {f['count']} | {f['median_s']:.1f} | {f['mean_s']:.1f} | {f['max_s']:.1f} |"
        for kind, f in summary["faults"].items()
    ]
    table = [
        "| fault | count | median | mean | longest |",
        "| --- | ---: | ---: | ---: | ---: |",
        *rows,
    ]
    counted = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in summary["ledger"].items())
    lines = [
        f"## {title}",
        "",
        f"{summary['count']} faults. Seconds until the next trained batch (an iteration without faults takes "
        f"{summary['usual_iteration_s']:.1f} s):",
        "",
        *table,
        "",
        f"- The command was started again {summary['resumed']} times (after the driver had been killed).",
        f"- Ledger at the end: {counted}. Iterations at which it did not add up: "
        f"{len(summary['unbalanced_iterations'])}. Set aside: {summary['set_aside']}.",
        f"- Throughput, control steps trained on per second: {steps['disturbed']:.1f} with faults, "
        f"{steps['undisturbed']:.1f} without" + (f" ({summary['throughput']:.0%})." if summary["throughput"] else "."),
        f"- Updates per minute: {rates['disturbed']:.2f} with faults, {rates['undisturbed']:.2f} without. They take "
        "fewer steps as a policy gets better.",
        f"- Longest time between two updates: {pauses['disturbed']:.1f} s with faults, "
        f"{pauses['undisturbed']:.1f} s without.",
        f"- Success of the last {_WINDOW} iterations: {_percent(success['disturbed'])} with faults, "
        f"{_percent(success['undisturbed'])} without.",
    ]
    for run, growth in summary.get("growth", {}).items():
        totals = ", ".join(f"{name} {value:+.2f}" for name, value in growth["totals"].items())
        of_each = ", ".join(f"{name} {value:+.1f}" for name, value in growth["memory_mib"].items())
        lines.append(
            f"- From the second quarter to the last, {run} run (memory and shared memory in GiB, over all processes): "
            f"{totals}. Memory in MiB, by process: {of_each}."
        )
    if summary["equal_weights"] is not None:
        equal = "equal bit for bit" if summary["equal_weights"] else "not equal"
        lines.append(f"- Final weights of both runs: {equal}.")
    return "\n".join(lines) + "\n"


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"


def _draw(path: Path, events: Sequence[Mapping[str, Any]], disturbed: Metrics, calm: Metrics, title: str) -> None:
    with figure(path, title, 1, 2, (12, 4.2)) as (curve, cost):
        for name, metrics in (("without faults", calm), ("with faults", disturbed)):
            key = rollouts_key(metrics)
            points = [(r["time"] - metrics[0]["time"], r[key]) for r in metrics if key in r]
            if points:
                x, y = np.array(points).T
                curve.plot(x / 60, smoothed(y, _WINDOW), label=name)
        begin = disturbed[0]["time"]
        curve.plot([(e["time"] - begin) / 60 for e in events], [0.0] * len(events), "|", color="black", label="fault")
        curve.set(xlabel="minutes", title=f"success of the rollouts (moving mean of {_WINDOW})", ylim=(-0.03, 1.03))
        curve.legend()
        kinds = sorted({e["kind"] for e in events})
        cost.plot([e["seconds"] for e in events], [kinds.index(e["kind"]) for e in events], "o", alpha=0.6)
        cost.set(
            xlabel="seconds until the next trained batch", yticks=range(len(kinds)), yticklabels=kinds, xscale="log"
        )
        cost.grid(alpha=0.3)
