"""A run in text, by its metrics alone: a panel for terminals, one line for log files."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from vla_rl.observability.heartbeat import duration

LINE = 160  # characters at most
_BLOCKS = "▁▂▃▄▅▆▇█"
_FRAME = 4  # columns
_BAR = 40
_SUCCESS = "rollout/success_played"
_KINDS = ("greedy", "sampled")
_FIGURES = (  # label, metric, format; the most important first
    ("chunks/s", "throughput/chunks_per_s", "{:.2f}"),
    ("staleness", "rollout/staleness_mean", "{:.2f}"),
    ("KL", "learner/update_kl", "{:.4f}"),
    ("return", "rollout/return", "{:.3f}"),
    ("clipped", "learner/clip_fraction", "{:.1%}"),
    ("explained variance", "learner/explained_variance", "{:.2f}"),
    ("env steps/s", "throughput/env_steps_per_s", "{:.1f}"),
    ("batches/s", "throughput/batches_per_s", "{:.4f}"),
    ("dropped as stale", "episodes/stale", "{:.0f}"),
    ("memory", "memory/gib", "{:.1f} GiB"),
)
_FIRST = 3  # of the figures, before the time left
_STAGES = (("simulators", "busy/env_workers"), ("inference", "busy/inference"), ("learner", "busy/learner"))


@dataclass(slots=True)
class RunPicture:
    """What there is to see of a run.

    Attributes:
        iterations: of the whole run.
        figures: the newest value of each metric.
        successes: iteration, and the success rate of the episodes played since the one before.
        evaluations: the newest of each kind: iteration, success rate, lower and upper end of its 95 % interval.
    """

    title: str
    iterations: int
    iteration: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    successes: list[tuple[int, float]] = field(default_factory=list)
    evaluations: dict[str, tuple[int, float, float, float]] = field(default_factory=dict)

    def add(self, record: Mapping[str, float]) -> None:
        """``record``: of ``metrics.jsonl``. After an earlier iteration than before, later ones do not count."""
        iteration = int(record["iteration"])
        if self.figures and iteration <= self.iteration:
            self.figures.clear()
            self.successes = [pair for pair in self.successes if pair[0] < iteration]
            self.evaluations = {kind: found for kind, found in self.evaluations.items() if found[0] < iteration}
        self.iteration = iteration
        self.figures |= record
        if math.isfinite(success := record.get(_SUCCESS, math.nan)):
            self.successes.append((iteration, success))
        for kind in _KINDS:
            names = f"eval/{kind}_success", f"eval/{kind}_low95", f"eval/{kind}_high95"
            if all(name in record for name in names):
                rate, low, high = (record[name] for name in names)
                self.evaluations[kind] = iteration, rate, low, high

    def progress(self) -> str:
        """Such as ``iteration 12/120 (10 %)``."""
        share = self.iteration / max(1, self.iterations)
        return f"iteration {self.iteration}/{self.iterations} ({100 * share:.0f} %)"

    def line(self) -> str:
        """The newest iteration, what matters most first, in ``LINE`` characters."""
        line = self.progress()
        for part in self._parts():
            if len(line) + len(part) + 3 > LINE:
                break
            line += f" | {part}"
        return line

    def _parts(self) -> Iterator[str]:
        figures = [f"{label} {value}" for label, value in self._shown_figures()]
        first = sum(key in self.figures for _, key, _ in _FIGURES[:_FIRST])
        if self.successes:
            yield f"success {_percent(self.successes[-1][1])}"
        yield from self._evaluation("greedy")
        yield from figures[:first]
        if (left := self.figures.get("time/left_s")) is not None:
            yield f"{duration(left)} left"
        yield from self._evaluation("sampled")
        yield from figures[first:]
        busy = [f"{label} {100 * self.figures[key]:.0f} %" for label, key in _STAGES if key in self.figures]
        if busy:
            yield f"busy: {', '.join(busy)}"

    def _evaluation(self, kind: str) -> Iterator[str]:
        if kind in self.evaluations:
            iteration, success, low, high = self.evaluations[kind]
            when = f", iteration {iteration}" if iteration < self.iteration else ""
            yield f"{kind} {_percent(success)} ({100 * low:.0f} to {100 * high:.0f} %{when})"

    def _shown_figures(self) -> Iterator[tuple[str, str]]:
        for label, key, form in _FIGURES:
            if key in self.figures:
                yield label, form.format(self.figures[key]).replace("%", " %")

    def panel(self, width: int, status: str, age_s: float = 0.0) -> Panel:
        """``width`` columns, of 60 or more. ``status``: ``stage: details``. ``age_s``: of the figures, in seconds."""
        inner = width - _FRAME
        status_lines = [status] if len(status) <= inner else status.split(": ", 1)
        lines = [
            self._progress_bar(inner, age_s),
            *self._success(inner),
            *self._table(inner),
            *self._busy(inner),
            *(Text(line, "dim") for line in status_lines),
        ]
        return Panel(Group(*lines), title=Text(_shortened(self.title, inner - 4)), title_align="left", width=width)

    def _progress_bar(self, inner: int, age_s: float) -> Text:
        left, right = self.progress(), ""
        if (seconds := self.figures.get("time/seconds")) is not None:
            right = duration(seconds + age_s)
        if (remaining := self.figures.get("time/left_s")) is not None:
            right += f", {duration(remaining - age_s)} left"
        columns = inner - len(left) - len(right) - 4
        bar = Text() if columns < 8 else _bar(self.iteration / max(1, self.iterations), min(_BAR, columns))
        return Text.assemble(left, "  ", bar, "  ", right)

    def _success(self, inner: int) -> Iterator[Text]:
        if self.successes:
            blocks, highest = sparkline([success for _, success in self.successes], inner)
            newest = f"success of the rollouts {_percent(self.successes[-1][1])}"
            yield Text.assemble((newest, "bold"), (f"  (█ is {_percent(highest)})", "dim"))
            yield Text(blocks, "green")
        for kind, (iteration, success, low, high) in self.evaluations.items():
            interval = f"(95 %: {100 * low:.0f} to {100 * high:.0f} %)"
            yield Text.assemble((f"{kind} {_percent(success)}", "bold"), f" {interval}, iteration {iteration}")

    def _table(self, inner: int) -> Iterator[Text]:
        label_columns, value_columns, gap = 19, 10, 3
        cells = [
            Text.assemble((f"{label:<{label_columns}}", "dim"), f"{value:>{value_columns}}")
            for label, value in self._shown_figures()
        ]
        in_a_row = max(1, (inner + gap) // (label_columns + value_columns + gap))
        rows = math.ceil(len(cells) / in_a_row)
        for row in range(rows):
            yield Text(" " * gap).join(cells[row::rows])

    def _busy(self, inner: int) -> Iterator[Text]:
        for label, key in _STAGES:
            if key in self.figures:
                share = min(1.0, self.figures[key])
                bar = _bar(share, min(_BAR, inner - 24))
                yield Text.assemble((f"{label + ' busy':<16} ", "dim"), bar, f"{100 * share:>4.0f} %")


def sparkline(values: Sequence[float], width: int) -> tuple[str, float]:
    """At most ``width`` blocks, and what the highest one stands for; the scale begins at 0.

    With more values than blocks, a block is the mean of its neighbours in time. ``values``: 0 or more, at least one.
    """
    count = min(len(values), width)
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(edges)]
    highest = max(means)
    scale = len(_BLOCKS) / highest if highest > 0 else 0.0
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int(scale * mean))] for mean in means), highest


def _bar(share: float, columns: int) -> Text:
    filled = round(columns * min(1.0, share))
    return Text.assemble(("█" * filled, "green"), ("░" * (columns - filled), "dim"))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _shortened(text: str, most: int) -> str:
    """Without its middle if it is too long: a title ends with the run's name."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"
