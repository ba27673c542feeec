"""Reading metrics of runs, and drawing them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.files import replacing
from vla_rl.observability.metrics_file import read_records
from vla_rl.observability.spans import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Metrics = Sequence[dict[str, float]]


class Effort(NamedTuple):
    """What curves are drawn over: a metric, its unit on the axis, and the label of the axis."""

    key: str
    unit: float
    label: str


EFFORTS = {
    "episodes": Effort("episodes/played", 1.0, "training episodes played"),
    "steps": Effort("episodes/control_steps", 1000.0, "thousand control steps played"),
    "robot-hours": Effort("time/robot_hours", 1.0, "hours of one robot"),
    "minutes": Effort("time/seconds", 60.0, "minutes, evaluations included"),
    "core": Effort("time/cpu_s", 60.0, "minutes of a core, evaluations left out"),  # see ``with_totals``
}


def recorded_effort(x: str, runs: Mapping[str, Metrics]) -> Effort:
    """The effort of this name. Raises UserError if one of the runs has not recorded it."""
    for name, metrics in runs.items():
        if not any(EFFORTS[x].key in m for m in metrics):
            raise UserError(f"--x {x}: {name} has not recorded {EFFORTS[x].key}; leave --x out")
    return EFFORTS[x]


@contextmanager
def figure(
    path: Path, title: str | None, rows: int, columns: int, size: tuple[float, float], **options: Any
) -> Iterator[Any]:
    """Yield the axes of a new figure (as ``Figure.subplots``), and save it as a picture when the block ends.

    ``size``: width and height in inches.
    """
    from matplotlib.figure import Figure  # not pyplot, whose backend is a notebook's own

    drawing = Figure(figsize=size, layout="constrained")
    yield drawing.subplots(rows, columns, **options)
    if title is not None:
        drawing.suptitle(title)
    try:
        with replacing(path) as partial:
            drawing.savefig(partial, dpi=110, format=path.suffix[1:] or "png")
    except ValueError as error:  # of an ending that is no picture's
        raise UserError(f"{path}: cannot be drawn ({error}); name a .png file") from None


def series(metrics: Metrics, key: str, x: str = "iteration") -> tuple[np.ndarray, np.ndarray]:
    """x and y of all records that have ``key``."""
    points = [(m[x], m[key]) for m in metrics if key in m and x in m]
    return (np.array([p[0] for p in points]), np.array([p[1] for p in points]))


def first_reached(x: np.ndarray, y: np.ndarray, at: float) -> float | None:
    """The x from which points that are joined by straight lines first have ``y >= at``; None: never."""
    above = np.flatnonzero(y >= at)
    if not len(above):
        return None
    first = above[0]
    if first == 0:
        return float(x[0])
    share = (at - y[first - 1]) / (y[first] - y[first - 1])
    return float(x[first - 1] + share * (x[first] - x[first - 1]))


def rollouts_key(metrics: Metrics) -> str:
    """The metric of the rollouts' success: of all episodes played, or, in older runs, of those trained on."""
    return "rollout/success_played" if any("rollout/success_played" in m for m in metrics) else "rollout/success"


def smoothed(y: np.ndarray, window: int) -> np.ndarray:
    """Centred moving mean; windows are shorter at both ends, so that nothing is shifted."""
    half = window // 2
    return np.array([y[max(0, i - half) : i + half + 1].mean() for i in range(len(y))])


def draw_curves(metrics: Metrics, path: Path, title: str, over: Effort = EFFORTS["minutes"]) -> None:
    """One run: success, throughput, busy shares and health of the updates."""
    with figure(path, title, 2, 2, (12, 7.5)) as axes:
        draw_success(axes[0, 0], metrics, over)
        _lines(axes[0, 1], steady(metrics), over, "throughput", {"throughput/env_steps_per_s": "env steps/s"})
        _lines(
            axes[1, 0],
            steady(metrics),
            over,
            "busy share of the time",
            {"busy/env_workers": "simulators", "busy/inference": "inference", "busy/learner": "learner"},
        )
        axes[1, 0].set_ylim(0, 1)
        _lines(
            axes[1, 1],
            metrics,
            over,
            "updates",
            {
                "learner/update_kl": "KL of the update",
                "learner/clip_fraction": "clipped share",
                "learner/explained_variance": "explained variance",
            },
        )
        axes[1, 1].set_ylim(-1, 1)


def draw_comparison(runs: Mapping[str, Metrics], path: Path, over: Effort = EFFORTS["minutes"]) -> None:
    """Success of several runs: evaluations, as far as there are any, and rollouts.

    Runs whose names differ in "-seedN" at their ends alone have one colour: thin lines, and a thick one for their mean.
    """
    panels: list[tuple[str, str | None, str, int]] = [
        (f"{kind} success, evaluation", f"eval/{kind}_success", "o-", 1)
        for kind in ("greedy", "sampled")
        if any(f"eval/{kind}_success" in m for metrics in runs.values() for m in metrics)
    ]
    panels.append(("success of the rollouts (moving mean of 9)", None, "-", 9))  # the key is chosen by rollouts_key
    columns = len(panels)
    with figure(path, None, 1, columns, (5.0 * columns, 4.5), sharey=True, squeeze=False) as axes:
        for axis, (title, key, style, window) in zip(axes[0], panels, strict=True):
            for number, (name, seeds) in enumerate(of_seeds(runs).items()):
                look: dict[str, Any] = {"color": f"C{number}"}
                if len(seeds) > 1:
                    x, curves = seed_curves(seeds, over.key, key, window)
                    if len(x):
                        mean = f"{name}, mean of {len(seeds)}"
                        axis.plot(x / over.unit, curves.mean(axis=0), "-", linewidth=2.5, label=mean, **look)
                    look |= {"alpha": 0.4, "linewidth": 0.8, "markersize": 3}
                for metrics in seeds:
                    x, y = _over(over, metrics, key or rollouts_key(metrics))
                    if len(x):
                        label = None if len(seeds) > 1 else name
                        axis.plot(x, smoothed(y, window), style, label=label, **look)
            axis.set(title=title, ylim=(0, 1), xlabel=over.label)
            _legend_and_grid(axis)


def of_seeds(runs: Mapping[str, Metrics]) -> dict[str, list[Metrics]]:
    """Runs by their names without the seeds, which ``vla-rl study`` puts at the ends."""
    found: dict[str, list[Metrics]] = {}
    for name, metrics in runs.items():
        found.setdefault(re.sub(r"-seed\d+$", "", name), []).append(metrics)
    return found


def draw_study(variants: Mapping[str, Sequence[Metrics]], path: Path, title: str) -> None:
    """Several seeds of each variant: success of the rollouts over control steps, minutes and processor time (mean of
    the seeds, and their range), and the last evaluation of every seed.

    What metrics of older runs do not count is not drawn.
    """
    variants = {name: [with_totals(m) for m in seeds] for name, seeds in variants.items()}
    every = [m for seeds in variants.values() for m in seeds]
    efforts = [EFFORTS[name] for name in ("steps", "minutes", "core") if all(EFFORTS[name].key in m[-1] for m in every)]
    columns = len(efforts) + 1
    with figure(path, title, 1, columns, (5.3 * columns, 5), sharey=True) as axes:
        for axis, (x_key, scale, label) in zip(axes, efforts, strict=False):
            for name, seeds in variants.items():
                x, curves = seed_curves(seeds, x_key)
                (line,) = axis.plot(x / scale, curves.mean(axis=0), label=name)
                low, high = curves.min(axis=0), curves.max(axis=0)
                axis.fill_between(x / scale, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
            axis.set(title="rollouts (moving mean of 5)", xlabel=label, ylim=(0, 1), ylabel="success")
            axis.grid(alpha=0.3)
        axes[0].legend(loc="best", fontsize=8)
        _last_evaluations(axes[-1], variants)


def with_totals(metrics: Metrics) -> Metrics:
    """With ``time/cpu_s`` and ``time/trained_s``, the sums of ``time/iteration_cpu_s`` and ``time/iteration_s``.

    These leave evaluations out. What a run did not measure has no sum. Episodes are counted over all sessions of a run.
    """
    for total, part in (("time/cpu_s", "time/iteration_cpu_s"), ("time/trained_s", "time/iteration_s")):
        if any(part in m for m in metrics):
            sums = np.cumsum([m.get(part, 0.0) for m in metrics])
            metrics = [m | {total: float(value)} for m, value in zip(metrics, sums, strict=True)]
    for key in ("episodes/played", "episodes/succeeded"):
        metrics = _continued(metrics, key)
    return metrics


def _continued(metrics: Metrics, key: str) -> Metrics:
    """With a counter that goes on where earlier versions began again with a new session."""
    continued, total, before = [], 0.0, 0.0
    for m in metrics:
        if key in m:
            total += m[key] - before if m[key] >= before else m[key]
            before, m = m[key], m | {key: total}
        continued.append(m)
    return continued


def steady(metrics: Metrics) -> Metrics:
    """For curves of what simulators do: without the update after each evaluation, if that leaves at least half.

    During an evaluation, simulators also play what the next update trains on, and rest afterwards. Its rates say
    nothing of how fast a run is, and the success of the few episodes that end then is noise.
    """
    evaluated = [any(key.startswith("eval/") for key in m) for m in metrics]
    kept = [m for m, after in zip(metrics, [False, *evaluated], strict=False) if not after]
    return kept if 2 * len(kept) >= len(metrics) else metrics


def _last_evaluations(axis: Axes, variants: Mapping[str, Sequence[Metrics]]) -> None:
    """Points of every seed, and a line at their mean."""
    for row, seeds in enumerate(variants.values()):
        color = f"C{row % 10}"
        for kind, marker, shift in (("greedy", "o", -0.1), ("sampled", "s", 0.1)):
            last = [y[-1] for y in (series(m, f"eval/{kind}_success")[1] for m in seeds) if len(y)]
            axis.plot([row + shift] * len(last), last, marker, color=color, alpha=0.5)
            if last:
                axis.hlines(np.mean(last), row + shift - 0.09, row + shift + 0.09, color=color)
    axis.set(title="last evaluation of every seed: greedy (o), sampled (square)")
    axis.set_xticks(range(len(variants)), list(variants), rotation=30, ha="right", fontsize=8)
    axis.grid(alpha=0.3)


_KINDS = {  # of activities: color, and the names that meters and the simulation give them
    "simulate": ("tab:gray", {"simulate"}),
    "render, reset": ("tab:cyan", {"render", "reset"}),
    "infer": ("tab:blue", {"infer", "act", "encode"}),
    "train": ("tab:orange", {"update", "train", "forward", "micro_batch", "critic_step", "step"}),
    "weight sync": ("tab:green", {"publish", "refresh"}),
    "offload": ("tab:olive", {"offload", "onload"}),
    "world model": ("tab:purple", {"imagine", "frames", "model_train", "frame_train"}),
    "collate, checkpoint": ("tab:brown", {"collate", "checkpoint"}),
    "evaluate": ("tab:pink", {"evaluate"}),
    "wait": ("#e4e4e4", {"wait", "lease", "next_batch", "offloaded"}),
    "other": ("black", set[str]()),
}


def kind_of(activity: str) -> str:
    """What pictures color alike."""
    return next((kind for kind, (_, names) in _KINDS.items() if activity in names), "other")


def draw_timeline(sections: Sequence[Sequence[Span]], path: Path, title: str) -> None:
    """Who, or which device, does what when. One row for each ``Span.row``; the rows of a section stay together.

    Of spans that contain others, the inner ones are drawn on top.
    """
    from matplotlib.patches import Patch

    rows = [
        (row, [span for span in spans if span.row == row])
        for spans in sections
        for row in sorted({span.row for span in spans}, key=_by_number)
    ]
    start = min(span.start for spans in sections for span in spans)
    kinds = {kind_of(span.activity) for spans in sections for span in spans}
    with figure(path, None, 1, 1, (14, 1.5 + 0.5 * len(rows))) as axis:
        for number, (_, spans) in enumerate(rows):
            spans.sort(key=lambda span: (span.start, -span.end))
            bars = [(span.start - start, span.end - span.start) for span in spans]
            colors = [_KINDS[kind_of(span.activity)][0] for span in spans]
            axis.broken_barh(bars, (number - 0.4, 0.8), facecolors=colors, linewidth=0)
        axis.set_yticks(range(len(rows)), [row for row, _ in rows])
        axis.invert_yaxis()
        axis.set(xlabel="seconds", title=title)
        patches = [Patch(color=color, label=kind) for kind, (color, _) in _KINDS.items() if kind in kinds]
        axis.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


def _by_number(row: str) -> tuple[str, int]:
    """A key by which ``device 10`` follows ``device 9``."""
    name, _, number = row.rpartition(" ")
    return (name, int(number)) if number.isdecimal() else (row, 0)


def seed_curves(
    seeds: Sequence[Metrics], x_key: str, key: str | None = None, window: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    """Common x values, up to the end of the shortest seed, and smoothed curves [seeds, x]; empty if a seed has none.

    ``key``: of the metric; None: success of the rollouts. ``window``: of the moving mean.
    """
    curves = [series(m, key or rollouts_key(m), x_key) for m in seeds]
    if not all(len(x) for x, _ in curves):
        return np.zeros(0), np.zeros((len(seeds), 0))
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    common = np.linspace(start, end, 200)
    return common, np.array([np.interp(common, x, smoothed(y, window)) for x, y in curves])


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Metrics of a run folder, or of a copy of its ``metrics.jsonl``. Raises UserError."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        records = read_records(file)
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: name a run folder (below runs/) or its metrics.jsonl") from None
    if not records:
        raise UserError(f"{file} holds no iteration yet: nothing to draw or to judge")
    return records


def _over(effort: Effort, metrics: Metrics, key: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = series(metrics, key, effort.key)
    return x / effort.unit, y


def draw_success(axis: Axes, metrics: Metrics, over: Effort) -> None:
    """Rollouts, and evaluations with their intervals."""
    x, y = _over(over, steady(metrics), rollouts_key(metrics))
    if len(x):
        axis.plot(x, y, color="tab:gray", alpha=0.35, linewidth=1)
        axis.plot(x, smoothed(y, 5), color="tab:gray", label="rollouts (sampled, training placements)")
    for kind, color in (("greedy", "tab:blue"), ("sampled", "tab:orange")):
        x, y = _over(over, metrics, f"eval/{kind}_success")
        if len(x):
            low, high = (_over(over, metrics, f"eval/{kind}_{end}95")[1] for end in ("low", "high"))
            axis.plot(x, y, "o-", color=color, label=f"evaluation, {kind}")
            axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    axis.set(title="success", ylim=(0, 1), xlabel=over.label)
    _legend_and_grid(axis)


def _lines(axis: Axes, metrics: Metrics, over: Effort, title: str, keys: dict[str, str]) -> None:
    for key, label in keys.items():
        x, y = _over(over, metrics, key)
        if len(x):
            axis.plot(x, y, marker="o" if len(x) == 1 else None, label=label)  # a line of one point is not seen
    axis.set(title=title, xlabel=over.label)
    _legend_and_grid(axis)


def _legend_and_grid(axis: Axes) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best", fontsize=8)
    axis.grid(alpha=0.3)
