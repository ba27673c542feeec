"""Pictures of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_rl.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Metrics = Sequence[dict[str, float]]


def series(metrics: Metrics, key: str, x: str = "iteration") -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of all records that hold ``key``."""
    points = [(m[x], m[key]) for m in metrics if key in m and x in m]
    return (np.array([p[0] for p in points]), np.array([p[1] for p in points]))


def smoothed(y: np.ndarray, window: int) -> np.ndarray:
    """Centred moving mean; windows are cut at the ends, so nothing is shifted."""
    half = window // 2
    return np.array([y[max(0, i - half) : i + half + 1].mean() for i in range(len(y))])


def draw_curves(metrics: Metrics, path: Path, title: str) -> None:
    """Success, throughput, use of the machine and the update's health, against minutes of wall-clock time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 7.5), constrained_layout=True)
    _success(axes[0, 0], metrics)
    _lines(axes[0, 1], metrics, "throughput", {"throughput/env_steps_per_s": "env steps/s"})
    _lines(
        axes[1, 0],
        metrics,
        "busy share of the time",
        {"busy/env_workers": "simulators", "busy/inference": "inference", "busy/learner": "learner"},
    )
    axes[1, 0].set_ylim(0, 1)
    _lines(
        axes[1, 1],
        metrics,
        "updates",
        {
            "learner/approx_kl": "KL",
            "learner/clip_fraction": "clipped share",
            "learner/explained_variance": "explained variance",
        },
    )
    axes[1, 1].set_ylim(-1, 1)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_comparison(runs: Mapping[str, Metrics], path: Path) -> None:
    """Success of several runs against minutes of wall-clock time: evaluations, and rollouts in training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), constrained_layout=True, sharey=True)
    panels = (
        ("greedy success, evaluation", "eval/greedy_success", "o-", 1),
        ("sampled success, evaluation", "eval/sampled_success", "o-", 1),
        ("success of the rollouts (moving mean of 9)", "rollout/success", "-", 9),
    )
    for axis, (title, key, style, window) in zip(axes, panels, strict=True):
        for name, metrics in runs.items():
            x, y = _minutes(metrics, key)
            if len(x):
                axis.plot(x, smoothed(y, window), style, label=name)
        axis.set(title=title, ylim=(0, 1), xlabel="minutes")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="best", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_command(args: Any) -> int:
    """`vla-rl plot`: the curves of one run, or several runs in one picture."""
    runs = {path.stem if path.is_file() else path.name: read_metrics(path) for path in args.runs}
    if len(runs) < len(args.runs):
        raise UserError(f"two of {', '.join(map(str, args.runs))} have the same name: rename one, names are the labels")
    if len(runs) == 1:
        ((name, metrics),) = runs.items()
        draw_curves(metrics, args.output, name)
    else:
        draw_comparison(runs, args.output)
    print(args.output)
    return 0


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Of a run folder or a copy of its ``metrics.jsonl``. Raises UserError."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        records = [json.loads(line) for line in file.read_text().splitlines()]
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: name a run folder (below runs/) or its metrics.jsonl") from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{file} cannot be read as metrics: {error}") from error
    if not records:
        raise UserError(f"{file} holds no iteration yet: nothing to draw")
    return records


def _minutes(metrics: Metrics, key: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = series(metrics, key, "time/seconds")
    return x / 60, y


def _success(axis: Axes, metrics: Metrics) -> None:
    x, y = _minutes(metrics, "rollout/success")
    if len(x):
        axis.plot(x, y, color="tab:gray", alpha=0.35, linewidth=1)
        axis.plot(x, smoothed(y, 5), color="tab:gray", label="rollouts (sampled, training placements)")
    for kind, color in (("greedy", "tab:blue"), ("sampled", "tab:orange")):
        x, y = _minutes(metrics, f"eval/{kind}_success")
        if len(x):
            low, high = _minutes(metrics, f"eval/{kind}_low95")[1], _minutes(metrics, f"eval/{kind}_high95")[1]
            axis.plot(x, y, "o-", color=color, label=f"evaluation, {kind}")
            axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    axis.set(title="success", ylim=(0, 1), xlabel="minutes")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best", fontsize=8)
    axis.grid(alpha=0.3)


def _lines(axis: Axes, metrics: Metrics, title: str, keys: dict[str, str]) -> None:
    for key, label in keys.items():
        x, y = _minutes(metrics, key)
        if len(x):
            axis.plot(x, y, label=label)
    axis.set(title=title, xlabel="minutes")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best", fontsize=8)
    axis.grid(alpha=0.3)
