"""What run folders hold for a report. What one lacks, since it is new or of an earlier version, is empty."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.commands.checkpoints import Checkpoints
from vla_rl.config.messages import shown
from vla_rl.config.run_config import RunConfig
from vla_rl.config.yaml_file import read_config_file
from vla_rl.core.file_lock import FileLock
from vla_rl.core.files import json_or_empty
from vla_rl.core.plugins import GROUPS
from vla_rl.observability.plots import Metrics, read_metrics, with_totals

Values = dict[str, Any]
WINDOW = 5  # iterations of the moving mean
_OF_A_SEED = ("seed", "log.")  # beginnings of the keys in which runs of one group may differ
_IN_A_LABEL = 3  # keys


@dataclass(frozen=True, slots=True)
class Run:
    """One run; of a copy of its metrics, all but ``metrics`` is empty.

    Attributes:
        metrics: with the sums of ``plots.with_totals``.
        values: its config as nested groups; flattened by dotted key in ``config``.
        about: metadata.json.
        evaluations: the first and the newest record of evaluations/, by kind: "greedy", "sampled".
        layout: of the plan, as the newest checkpoint has it (``planner.layout_record``).
        migrations: lines of migrations.jsonl.
    """

    path: Path
    metrics: Metrics
    values: Values
    about: Values
    evaluations: dict[str, list[Values]]
    layout: Values
    migrations: list[Values]

    @property
    def name(self) -> str:
        return self.path.stem if self.path.is_file() else self.path.absolute().name

    @property
    def config(self) -> Values:
        return flattened(self.values)

    @property
    def title(self) -> str:
        algo, env = (self.config.get(key) for key in ("algo.name", "env.name"))
        return f"{str(algo).upper()} on {self.about.get('simulator', env)}: {self.name}" if algo and env else self.name

    @property
    def status(self) -> str:
        """Running, complete or stopped, as far as the folder tells."""
        config, last = self.config, self.metrics[-1]
        if FileLock.is_held(self.path / "lock"):
            return "running"
        if not config:
            return "unknown: a copy of the metrics"
        limit, patience = config.get("train.max_minutes"), config.get("train.patience", 0)
        if last["iteration"] >= config.get("train.iterations", math.inf):
            return "complete"
        if limit is not None and last.get("time/seconds", 0.0) >= 60 * limit:
            return f"complete: the time of {limit:g} minutes was up"
        if patience and self._evaluations_since_best() >= patience:
            return f"complete: {patience} evaluations brought no higher success"
        return f"stopped; it continues with: vla-rl train --resume {self.path}"

    def _evaluations_since_best(self) -> int:
        found = [m["eval/greedy_success"] for m in self.metrics if "eval/greedy_success" in m]
        return found[::-1].index(max(found)) if found else 0


Groups = Mapping[str, Sequence[Run]]  # by label


def all_runs(groups: Groups) -> list[Run]:
    return [run for runs in groups.values() for run in runs]


def read_run(path: Path) -> Run:
    """A run folder, or a copy of its ``metrics.jsonl``. Raises UserError if there is no metric."""
    metrics = with_totals(read_metrics(path))
    checkpoints = Checkpoints(path / "checkpoints", 1).complete()
    return Run(
        path=path,
        metrics=metrics,
        values=read_config_file(path / "config.yaml").values,
        about=json_or_empty(path / "metadata.json"),
        evaluations={kind: _evaluations(path, kind) for kind in ("greedy", "sampled")},
        layout=json_or_empty(checkpoints[-1] / "state.json").get("layout", {}) if checkpoints else {},
        migrations=_lines(path / "migrations.jsonl"),
    )


def _evaluations(path: Path, kind: str) -> list[Values]:
    files = sorted((path / "evaluations").glob(f"[0-9]*-{kind}.json"))
    chosen = {int(file.stem.partition("-")[0]): json_or_empty(file) for file in files[:1] + files[1:][-1:]}
    return [record | {"iteration": iteration} for iteration, record in chosen.items() if "tasks" in record]


def _lines(file: Path) -> list[Values]:
    with suppress(OSError, ValueError):
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return []


def flattened(values: Mapping[str, Any], above: str = "") -> Values:
    """Nested mappings as one, by dotted key. Lists stay whole."""
    found: Values = {}
    for name, value in values.items():
        key = f"{above}{name}"
        found |= flattened(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return found


def defaults_of(values: Values) -> Values:
    """Defaults by dotted key for the simulator, policy, algorithm and optional groups that a config has selected.

    Empty if they cannot be known here: a part of another package is missing, or has another name now.
    """
    names = {group: inner.get("name") for group in GROUPS if isinstance(inner := values.get(group), Mapping)}
    kinds = {group: {"name": name} for group, name in names.items() if isinstance(name, str)}
    try:
        for group, kind in kinds.items():
            RunConfig.admit(group, kind["name"])
        plain = RunConfig.model_validate(kinds).model_dump(mode="json")
        opened = {group: kinds.get(group, {}) | inner for group, inner in _opened(values, plain).items()}
        return flattened(RunConfig.model_validate(opened).model_dump(mode="json"))
    except ValueError:  # UserError and pydantic's are both
        return {}


def _opened(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Values]:
    """The groups of ``values``, empty; one that is null by default is opened by that, and has its own defaults then."""
    found: dict[str, Values] = {}
    for name, value in values.items():
        default = defaults.get(name, "")  # of an unknown key: no group
        if isinstance(value, Mapping) and (default is None or isinstance(default, Mapping)):
            found[name] = _opened(value, default or {})
    return found


def changed(run: Run) -> dict[str, tuple[str, str]]:
    """Value and default of the keys in which a run's config differs from the defaults; where it logs is left out."""
    defaults = defaults_of(run.values)
    return {
        key: (shown(value), shown(defaults[key]) if key in defaults else "no such key now" if defaults else "unknown")
        for key, value in run.config.items()
        if not key.startswith("log.") and (key not in defaults or value != defaults[key])
    }


def differing(runs: Sequence[Run]) -> list[str]:
    """Keys in which configs differ, but for those of a seed."""
    keys = dict.fromkeys(key for run in runs for key in run.config if not key.startswith(_OF_A_SEED))
    return [key for key in keys if len({shown(run.config.get(key)) for run in runs}) > 1]


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs whose configs differ in nothing but the seed and the log, by a label. One without a config is alone."""
    keys, groups = differing([run for run in runs if run.config]), dict[str, list[Run]]()
    for run in runs:
        same = json.dumps([shown(run.config.get(key)) for key in keys]) if run.config else run.name
        groups.setdefault(same, []).append(run)
    labels = [_label(of_group, keys) for of_group in groups.values()]
    if len(set(labels)) < len(labels):
        labels = [_named(of_group, of_group[0].name) for of_group in groups.values()]
    return dict(zip(labels, groups.values(), strict=True))


def _label(runs: Sequence[Run], keys: Sequence[str]) -> str:
    """What sets the group apart, if that is short; else the name of its first run."""
    if not runs[0].config or not 0 < len(keys) <= _IN_A_LABEL:
        return _named(runs, runs[0].name)
    return _named(runs, ", ".join(f"{key}={shown(runs[0].config.get(key))}" for key in keys))


def _named(runs: Sequence[Run], name: str) -> str:
    return f"{name} ({len(runs)} seeds)" if len(runs) > 1 else name
