"""`vla-rl world-model`: what a run's world model has learned, and what its audit says about it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from vla_rl.commands.checkpoints import Checkpoints
from vla_rl.core.errors import UserError
from vla_rl.observability.console import make_console
from vla_rl.observability.plots import Metrics, figure, read_metrics, rollouts_key, series, smoothed
from vla_rl.world_model.futures import Future, read_futures

_LEDGER = ("delivered", "trained", "unused", "lost", "waiting")
_MOST_COLUMNS = 8  # frames in a row of the picture
_LOSSES = {"event": "event", "value": "value to go", "proprio": "proprioception", "goal": "hindsight"}
_DEPTH = {
    "predicted": "error of changed pixels",
    "copied": "of copying",
    "shuffled": "of other chunks' frames",
    "gap": "share of the policy's change that is wrong",
}
_MOST_DEPTHS = 8
_WINDOW = 5


def world_model_command(args: Any) -> int:
    """Print the last verdict and the ledger, draw both over the run, and predicted frames beside real ones.

    Raises UserError without a model.
    """
    metrics = read_metrics(args.run)
    if not any("world_model/version" in m for m in metrics):
        raise UserError(f"{args.run} has no world model: start a run with algo=world_model, or world_model={{}}")
    make_console().print(_table(metrics))
    draw_world_model(metrics, args.output, args.run.name)
    print(args.output)
    futures = _newest_futures(args.run)
    if futures is not None:
        pictures = args.output.with_stem(f"{args.output.stem}_futures")
        draw_futures(read_futures(futures), pictures, args.run.name)
        print(pictures)
    return 0


def _newest_futures(run: Path) -> Path | None:
    checkpoints = Checkpoints(run / "checkpoints", keep=0)
    try:
        path = checkpoints.newest() / "world_model" / "futures.npz"
    except UserError:  # the run has no checkpoint yet
        return None
    return path if path.is_file() else None


def _table(metrics: Metrics) -> Table:
    last = metrics[-1]
    table = Table(title=f"World model after update {int(last['iteration'])}", show_header=False)
    rows = {
        "audit": "passes" if last.get("world_model/audit_passed") else "fails: only real data is trained on",
        "slope ± standard error": _pair(last, "world_model/audit_slope", "world_model/audit_error"),
        "factor on imagined advantages": _number(last, "world_model/audit_scale"),
        "audited chunks": _number(last, "world_model/audit_chunks", ".0f"),
        "AUROC of success": _number(last, "world_model/audit_auroc"),
        "predicted minus real return": _number(last, "world_model/audit_bias", "+.3f"),
        "real episodes in the archive": _number(last, "world_model/archive_episodes", ".0f"),
        "updates with imagined chunks": f"{sum('imagined/chunks' in m for m in metrics)} of {int(last['iteration'])}",
        "imagined episodes": ", ".join(f"{last.get(f'episodes/imagined_{name}', 0):.0f} {name}" for name in _LEDGER),
        "real control steps": _number(last, "episodes/control_steps", ",.0f"),
    }
    for name, value in (rows | _depths(last)).items():
        table.add_row(name, value)
    return table


def _depths(last: dict[str, float]) -> dict[str, str]:
    """What the gate of the horizon has found; nothing where imagined episodes are one chunk long."""
    if "world_model/horizon" not in last:
        return {}
    rows = {"horizon in use": f"{last['world_model/horizon']:.0f} chunks"}
    for depth in range(1, 1 + sum(f"world_model/depth{d}_passed" in last for d in range(1, _MOST_DEPTHS))):
        found = {name: last.get(f"world_model/depth{depth}_{name}") for name in _DEPTH}
        figures = ", ".join(f"{label} {found[name]:.2f}" for name, label in _DEPTH.items() if found[name] is not None)
        passed = "passes" if last[f"world_model/depth{depth}_passed"] else "fails"
        rows[f"frames after {depth} chunk{'s' * (depth > 1)}"] = f"{passed}: {figures}" if figures else "not known yet"
    return rows


def _number(record: dict[str, float], key: str, form: str = ".2f") -> str:
    return format(record[key], form) if key in record else "not known yet"


def _pair(record: dict[str, float], key: str, error: str) -> str:
    return f"{record[key]:.2f} ± {record[error]:.2f}" if key in record else "not known yet"


def draw_futures(futures: Sequence[Future], path: Path, title: str) -> None:
    """A grid of futures: each has a row of real frames and below it one of predicted frames, from the real state on."""
    length = max(len(f.real) for f in futures)
    per_row = max(1, min(len(futures), _MOST_COLUMNS // length))
    rows, columns = 2 * math.ceil(len(futures) / per_row), per_row * length
    size = (1.6 * columns + 1.0, 1.7 * rows)
    with figure(path, f"{title}: frames after 0, 1, ... chunks", rows, columns, size, squeeze=False) as axes:
        for ax in axes.flat:
            ax.set_axis_off()
        for number, future in enumerate(futures):
            row, column = 2 * (number // per_row), length * (number % per_row)
            for below, (label, frames) in enumerate((("real", future.real), ("predicted", future.predicted))):
                axes[row + below, column].set_title(label, fontsize=8, loc="left")
                for ax, frame in zip(axes[row + below, column:], frames, strict=False):
                    ax.imshow(frame)


def draw_world_model(metrics: Metrics, path: Any, title: str) -> None:
    """Audit, success and share of real data, losses, and returns, over updates."""
    with figure(path, title, 2, 2, (12, 7.5)) as axes:
        audit, success, losses, returns = axes.flat
        x, slope = series(metrics, "world_model/audit_slope")
        _, error = series(metrics, "world_model/audit_error")
        audit.axhline(0.0, color="gray", linewidth=0.8)
        audit.axhline(1.0, color="gray", linewidth=0.8, linestyle=":")
        audit.fill_between(x, slope - error, slope + error, alpha=0.25)
        audit.plot(x, slope, label="slope ± standard error (1: right, 0: knows nothing about actions)")
        audit.step(*series(metrics, "world_model/audit_scale"), where="mid", label="factor in use")
        if len(slope):
            audit.set_ylim(min(-1.0, float(np.quantile(slope, 0.05))), max(2.0, float(np.quantile(slope, 0.95))) + 0.5)
        x, played = series(metrics, rollouts_key(metrics))
        success.plot(x, smoothed(played, _WINDOW), label=f"success of the rollouts (moving mean of {_WINDOW})")
        success.step(*series(metrics, "imagined/real_fraction"), where="mid", label="real share of the super-batch")
        success.set_ylim(0.0, 1.02)
        for name, label in _LOSSES.items():
            losses.plot(*series(metrics, f"world_model/loss_{name}"), label=label)
        losses.set_title("losses, mean over the ensemble")
        returns.plot(*series(metrics, "rollout/return"), label="real return")
        returns.plot(*series(metrics, "imagined/return"), label="imagined return (scaled)")
        returns.plot(*series(metrics, "imagined/return_spread"), label="its spread within a state")
        for ax in axes.flat:
            ax.set_xlabel("update")
            ax.grid(alpha=0.3)
            ax.legend(fontsize=8)
