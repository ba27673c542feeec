"""The sections of a report: charts and tables, of the runs by group (``report_runs.grouped``)."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vla_rl.commands.report_claims import kind_of
from vla_rl.commands.report_films import film_section
from vla_rl.commands.report_runs import WINDOW, Groups, Run, Values, all_runs, changed, differing, flattened
from vla_rl.config.messages import shown
from vla_rl.observability.page import Chart, Line, Section, Table
from vla_rl.observability.plots import EFFORTS, Effort, Metrics, rollouts_key, seed_curves, series, smoothed, steady
from vla_rl.observability.success_rate import wilson_interval
from vla_rl.observability.why import findings
from vla_rl.placement.plan import Layout

_ROLES = ("simulators", "inference", "learner")  # keys of a layout's record


class _Plot(NamedTuple):
    """Metrics that one chart shows together, with their labels; ``floor`` and ``share`` are those of ``Chart``."""

    title: str
    keys: Mapping[str, str]
    floor: float | None = None
    share: bool = False


_UPDATES = Effort("iteration", 1.0, "updates")
_TRAINED = Effort("time/trained_s", 60.0, "minutes, evaluations left out")
_LEARNING = (
    _Plot("Return of an episode", {"rollout/return": "mean"}),
    _Plot("KL divergence of an update, nats an action", {"learner/update_kl": "before to after"}, 0.0),
    _Plot("KL divergence from the policy that acted, nats", {"learner/approx_kl": "mean of the steps"}, 0.0),
    _Plot("Policy loss", {"learner/policy_loss": "policy", "learner/actor_loss": "actor"}),
    _Plot("Value loss", {"learner/value_loss": "value head", "learner/critic_loss": "off-policy critic"}, 0.0),
    _Plot("Value of chunks by the critic", {"learner/q": "executed ones", "learner/actor_q": "the actor's own"}),
    _Plot("Cloning loss, nats a token", {"learner/cloning_loss": "loss"}, 0.0),
    _Plot(
        "Ratio of new and old probability",
        {"learner/ratio_p50": "median", "learner/ratio_p01": "1% are below", "learner/ratio_p99": "1% are above"},
    ),
    _Plot(
        "Clipping and effective samples",
        {"learner/clip_fraction": "clipped", "learner/ess": "effective samples"},
        share=True,
    ),
    _Plot("Staleness in updates", {"rollout/staleness_mean": "mean", "rollout/staleness_max": "largest"}, 0.0),
    _Plot("Explained variance of the returns", {"learner/explained_variance": "by the values"}),
    _Plot("Entropy, nats a token", {"learner/entropy": "of the policy"}),
    _Plot("Norm of the gradient", {"learner/grad_norm": "before clipping"}, 0.0),
)
_SPEED = (
    _Plot("Control steps a second", {"throughput/env_steps_per_s": "all simulators"}, 0.0),
    _Plot("Action chunks a second", {"throughput/chunks_per_s": "all simulators"}, 0.0),
    _Plot("Seconds for an update", {"time/iteration_s": "since the one before"}, 0.0),
    _Plot(
        "Busy share of the time",
        {"busy/env_workers": "env workers", "busy/inference": "inference servers", "busy/learner": "learner"},
        share=True,
    ),
    _Plot(
        "What env workers do, share of the time",
        {"busy/simulate": "simulate", "busy/render": "render", "busy/reset": "reset"},
        share=True,
    ),
    _Plot("Rows of an inference batch", {"throughput/inference_batch": "mean"}, 0.0),
    _Plot("Memory of all processes, GiB", {"memory/gib": "on the driver's machine"}, 0.0),
)
_ENDS = {  # of episodes; they add up to the started ones
    "trained": "trained on",
    "filtered": "filtered out with their group",
    "stale": "dropped as too stale",
    "evaluated": "played for evaluations",
    "lost": "lost with a process",
    "running": "running",
    "buffered": "waiting to be trained",
    "in_training": "in training",
}
_COUNTS = {
    "played": "training episodes that ended",
    "succeeded": "of these, successful",
    "control_steps": "control steps of training episodes",
    "control_chunks": "chunks in which these were played",
    "reused": "uses in further updates",
    "set_aside": "of the lost ones, set aside",
}
_ENDED = {f"episodes/{name}": _ENDS[name] for name in ("trained", "filtered", "stale", "evaluated", "lost")}
_LABELS = {"started": "started"} | _ENDS | _COUNTS
_LEFT_OUT = ("instructions", "proprio_range", "conditions")  # of metadata.json


def sections(groups: Groups) -> list[Section]:
    """In the order of the page."""
    runs = all_runs(groups)
    undisturbed = {label: [replace(run, metrics=steady(run.metrics)) for run in own] for label, own in groups.items()}
    lines = [f"Thin: as recorded. Thick: moving mean of {WINDOW}."]
    intervals = ["Evaluations have 95% intervals (Wilson). Rollouts sample actions, and start where training does."]
    if len(runs) > 1:
        lines = [f"Lines: moving mean of {WINDOW}, mean of the seeds. Bands: from the lowest seed to the highest."]
        intervals = []
    quiet = ["The update after each evaluation is left out: its episodes were played during the evaluation."]
    if all_runs(undisturbed) == runs:
        quiet = []
    return [
        _charted("Success", lines + intervals + quiet, _success(groups, undisturbed)),
        Section("What stands in the way", _findings(runs)),
        film_section(runs),
        _charted("Learning", lines, _charts(groups, _LEARNING, _UPDATES)),
        _charted("Speed", lines + quiet, _charts(undisturbed, _SPEED, _TRAINED)),
        Section("Episodes", (), _charts(groups, [_ended(runs)], _TRAINED, window=1), _ledger(runs)),
        Section("Placement", (), (), [table for own in groups.values() for table in _plan(own[0])]),
        Section("Evaluation by task", (), (), [table for run in runs for table in _tasks(run)]),
        Section("Configuration", (), (), _configuration(groups)),
        Section("Versions and machine", (), (), _origin(runs)),
    ]


def _findings(runs: Sequence[Run]) -> list[str]:
    """A line for each; with several runs, it begins with the run's name."""
    return [
        f"{f'{run.name}: ' if len(runs) > 1 else ''}{finding.title}. {finding.evidence} {finding.remedy}"
        for run in runs
        if any(m["iteration"] > 0 for m in run.metrics)
        for finding in findings(run.path)
    ]


def _charted(title: str, notes: Sequence[str], charts: Sequence[Chart]) -> Section:
    return Section(title, notes if charts else (), charts)


def _charts(groups: Groups, plots: Sequence[_Plot], over: Effort, window: int = WINDOW) -> list[Chart]:
    """Of one run, a chart for each plot; of several, one for each metric. Those without a line are left out."""
    runs = all_runs(groups)
    drawn: list[tuple[_Plot, str, list[Line]]] = []
    for plot in plots:
        if len(runs) == 1:
            drawn.append((plot, plot.title, _of_run(runs[0].metrics, plot.keys, over, window)))
            continue
        for key, label in plot.keys.items():
            title = f"{plot.title}: {label}" if len(plot.keys) > 1 else plot.title
            drawn.append((plot, title, _of_groups(groups, key, over, window)))
    return [Chart(title, over.label, lines, plot.share, plot.floor) for plot, title, lines in drawn if lines]


def _of_run(metrics: Metrics, keys: Mapping[str, str], over: Effort, window: int) -> list[Line]:
    """Two lines for each metric: as recorded, and its moving mean."""
    lines: list[Line] = []
    for number, (key, label) in enumerate(keys.items()):
        x, y = series(metrics, key, over.key)
        if len(x):
            lines += [Line(label, x / over.unit, y, kind="thin", color=number)] * (window > 1)
            lines.append(Line(label, x / over.unit, smoothed(y, window), color=number))
    return lines


def _of_groups(groups: Groups, key: str | None, over: Effort, window: int) -> list[Line]:
    """A line for each group, the mean of its runs, and their range. ``key``: None is the success of the rollouts."""
    lines = []
    for color, (label, runs) in enumerate(groups.items()):
        x, curves = seed_curves([run.metrics for run in runs], over.key, key, window)
        if len(x):
            low, high = (curves.min(axis=0), curves.max(axis=0)) if len(runs) > 1 else (None, None)
            lines.append(Line(label, x / over.unit, curves.mean(axis=0), low, high, color=color))
    return lines


def _success(groups: Groups, undisturbed: Groups) -> list[Chart]:
    """Over each effort: of one run all together, of several the rollouts (``undisturbed``) and the evaluations."""
    runs, kind = all_runs(groups), kind_of(all_runs(groups))
    if len(runs) == 1:
        metrics, played = runs[0].metrics, all_runs(undisturbed)[0].metrics
        rollouts = {rollouts_key(metrics): "rollouts"}
        drawn = [
            ("Success", over, _of_run(played, rollouts, over, WINDOW) + _evaluated(metrics, over))
            for over in EFFORTS.values()
        ]
    else:
        drawn = [
            ("Success of the rollouts", over, _of_groups(undisturbed, None, over, WINDOW)) for over in EFFORTS.values()
        ]
        title, key = f"{kind.capitalize()} success", f"eval/{kind}_success"
        drawn += [(title, over, _of_groups(groups, key, over, 1)) for over in EFFORTS.values()]
    return [Chart(title, over.label, lines, share=True) for title, over, lines in drawn if lines]


def _evaluated(metrics: Metrics, over: Effort) -> list[Line]:
    lines = []
    for color, kind in enumerate(("greedy", "sampled"), 1):
        keys = [f"eval/{kind}_success", f"eval/{kind}_low95", f"eval/{kind}_high95"]
        if found := [m for m in metrics if keys[0] in m and over.key in m]:
            x, y, low, high = (np.array([m.get(key, m[keys[0]]) for m in found]) for key in (over.key, *keys))
            lines.append(Line(f"evaluation, {kind}", x / over.unit, y, low, high, kind="points", color=color))
    return lines


def _ended(runs: Sequence[Run]) -> _Plot:
    """What became of the episodes, as far as it happened at all."""
    keys = {key: label for key, label in _ENDED.items() if any(m.get(key) for run in runs for m in run.metrics)}
    return _Plot("Episodes, in sum", keys, 0.0)


def _ledger(runs: Sequence[Run]) -> list[Table]:
    """The newest counters of each run that are not zero."""
    columns: dict[str, dict[str, str]] = {}
    for run in runs:
        last = next((m for m in reversed(run.metrics) if "episodes/started" in m), {})
        found = {name: last.get(f"episodes/{name}") for name in _LABELS}
        columns[run.name] = {_LABELS[name]: _count(name, value, last) for name, value in found.items() if value}
    return _side_by_side("Ledger of the episodes, in sum", "episodes", columns)


def _count(name: str, value: float, record: Mapping[str, float]) -> str:
    return f"{value:,.0f}" + (f" ({value / record['episodes/started']:.1%})" if name in _ENDS else "")


def _plan(run: Run) -> list[Table]:
    """What the newest checkpoint says of the plan, and the migrations to it."""
    config, tables = run.config, list[Table]()
    if {"mode", *_ROLES} <= run.layout.keys():
        layout = Layout(run.layout["mode"], *(tuple(run.layout[role]) for role in _ROLES))
        workers = len(layout.simulators) or config.get("placement.env_workers")
        rows = [
            ["env workers", f"{workers}, of {config.get('placement.envs_per_worker')} environments each"],
            ["inference", f"batches of up to {config.get('placement.max_batch')} rows"],
            ["learner", "offloads to host memory between its updates" if run.layout.get("offload") else ""],
        ]
        for row, devices in zip(rows, (layout.simulators, layout.inference, layout.learner), strict=True):
            turns = ", by turns with another role" if layout.shared & set(devices) else ""
            row.insert(1, ", ".join(map(str, devices)) + turns if devices else "cores")
        head = ("role", "devices (GPUs; without any, cores)", "how")
        tables.append(Table(f"{run.name}: {layout.describe()}, as of the newest checkpoint", head, rows))
    if run.migrations:
        columns = ("iteration", "from", "to")
        rows = [[str(migration.get(name, "")) for name in columns] for migration in run.migrations]
        tables.append(Table(f"{run.name}: migrations", columns, rows))
    return tables


def _tasks(run: Run) -> list[Table]:
    """The first evaluation and the newest, of each task."""
    kind = kind_of([run])
    found = {f"after {record['iteration']} updates": _of_tasks(record["tasks"]) for record in run.evaluations[kind]}
    return _side_by_side(f"{run.name}: {kind} success by task, with 95% intervals (Wilson)", "task", found)


def _of_tasks(rows: Sequence[Values]) -> dict[str, str]:
    cells = {}
    for number, row in enumerate(rows):
        low, high = wilson_interval(row["successes"], row["episodes"])  # earlier versions did not write one
        low, high = row.get("success_low95", low), row.get("success_high95", high)
        rate = f"{row['successes'] / row['episodes']:.0%} ({low:.0%} to {high:.0%})"
        cells[f"{row.get('task', number)}: {row['instruction']}"] = f"{rate}, {row['successes']} of {row['episodes']}"
    return cells


def _configuration(groups: Groups) -> list[Table]:
    runs, tables = [run for run in all_runs(groups) if run.config], list[Table]()
    different = differing(runs)
    if different:
        rows = [[key, *(shown(own[0].config.get(key)) for own in groups.values())] for key in different]
        tables.append(Table("What differs between the runs", ("key", *groups), rows))
    common = [[key, *values] for key, values in changed(runs[0]).items() if key not in different] if runs else []
    if common:
        caption = "What differs from the defaults" + (", in all runs" if len(runs) > 1 else "")
        tables.append(Table(caption, ("key", "value", "default"), common))
    return tables


def _origin(runs: Sequence[Run]) -> list[Table]:
    """metadata.json of each run."""
    columns = {}
    for run in (run for run in runs if run.about):
        values = flattened({key: value for key, value in run.about.items() if key not in _LEFT_OUT})
        command = {"command": shlex.join(map(str, values["command"]))} if "command" in values else {}
        columns[run.name] = {key: str(value) for key, value in (values | command).items() if value is not None}
    first = next(iter(columns.values()), {})
    same = {key: value for key, value in first.items() if all(of.get(key) == value for of in columns.values())}
    different = {name: {key: of[key] for key in of if key not in same} for name, of in columns.items()}
    caption, common = "Recorded when the run began", "all runs" if len(runs) > 1 else "value"
    return [*_side_by_side(caption, "what", {common: same}), *_side_by_side(f"{caption}: different", "what", different)]


def _side_by_side(caption: str, what: str, columns: Mapping[str, Mapping[str, str]]) -> list[Table]:
    """A row for each key of a column; no table without one."""
    keys = dict.fromkeys(key for cells in columns.values() for key in cells)
    rows = [[key, *(cells.get(key, "") for cells in columns.values())] for key in keys]
    return [Table(caption, (what, *columns), rows)] if rows else []
