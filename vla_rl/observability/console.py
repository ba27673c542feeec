"""What a person sees of long work: live displays in a terminal, lines in a log file."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from vla_rl.core.records import EnvSpec

_LINE_EVERY_S = 20.0
_FILE_COLUMNS = 200


def make_console() -> Console:
    """Standard output, as wide as its terminal; in a file or a pipe, tables are not cut."""
    return Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS)


def minutes_left(seconds: float, done: int, total: int) -> str:
    """An estimate from the ``seconds`` that the first ``done`` (at least 1) of ``total`` took."""
    left = seconds / done * (total - done)
    return f"about {left / 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left"


class ProgressDisplay:
    """A progress bar with an estimate, or a log line every 20 s. A context manager; call ``update`` at any rate."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console, self._title, self._total = console, title, total
        self._bar = Progress(console=console) if console.is_terminal else None
        self._task = self._bar.add_task(title, total=total) if self._bar else None
        self._started = self._printed = time.monotonic()

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def update(self, done: int, note: str = "") -> None:
        """``done`` of the total are done; ``note`` is shown after the title."""
        title = f"{self._title}, {note}" if note else self._title
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=done, description=title)
            return
        now = time.monotonic()
        if done and now - self._printed > _LINE_EVERY_S:
            self._printed = now
            left = minutes_left(now - self._started, done, self._total)
            line = f"{title}: {done} of {self._total}, {left}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()


class StatusDisplay:
    """What is being done: a line that changes in a terminal, a log line every 20 s elsewhere. A context manager."""

    def __init__(self, console: Console, text: str) -> None:
        self._console = console
        self._line = console.status(text) if console.is_terminal else None
        self._printed = time.monotonic()

    def __enter__(self) -> Self:
        if self._line:
            self._line.start()
        return self

    def update(self, text: str) -> None:
        """At any rate."""
        if self._line:
            self._line.update(text)
        elif time.monotonic() - self._printed > _LINE_EVERY_S:
            self._printed = time.monotonic()
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._line:
            self._line.stop()


_ROWS = (
    ("success of the rollouts", "rollout/success_played", "{:.1%}"),
    ("return", "rollout/return", "{:.3f}"),
    ("greedy success", "eval/greedy_success", "{:.1%}"),
    ("sampled success", "eval/sampled_success", "{:.1%}"),
    ("env steps/s", "throughput/env_steps_per_s", "{:.1f}"),
    ("chunks/s", "throughput/chunks_per_s", "{:.2f}"),
    ("batches/s", "throughput/batches_per_s", "{:.4f}"),
    ("staleness, mean (updates)", "rollout/staleness_mean", "{:.2f}"),
    ("dropped as stale", "episodes/stale", "{:.0f}"),
    ("KL of the update", "learner/update_kl", "{:.4f}"),
    ("clipped", "learner/clip_fraction", "{:.1%}"),
    ("explained variance", "learner/explained_variance", "{:.2f}"),
    ("memory, all processes", "memory/gib", "{:.1f} GiB"),
)
_STAGES = (("simulators", "busy/env_workers"), ("inference", "busy/inference"), ("learner", "busy/learner"))
_BAR = 24


class TrainingView:
    """A training run: a live panel in a terminal, plain lines elsewhere."""

    def __init__(self, title: str, spec: EnvSpec, iterations: int, done: int) -> None:
        self._console = make_console()
        self._title = title
        self._spec = spec
        self._metrics: dict[str, float] = {}
        self._changes: dict[str, float] = {}
        self._status = "starting"
        self._started = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
        )
        self._task = self._progress.add_task("iterations", total=iterations, completed=done)
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> Self:
        self.say(self._title)
        for task, instruction in enumerate(self._spec.instructions[:10]):
            self.say(f"  task {task}: {instruction}")
        if self._spec.assets != "none":
            placeholder = self._spec.assets == "placeholder"
            note = " (numbers on placeholder assets are not benchmark numbers)" if placeholder else ""
            self.say(f"  assets: {self._spec.assets}{note}")
        for note in self._spec.notes:
            self.say(f"  {note}")
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def status(self, text: str) -> None:
        """Show what the run is waiting for."""
        self._status = text

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished iteration."""
        self._metrics.update(metrics)
        self._progress.update(self._task, completed=iteration)
        if not self._console.is_terminal:
            self.say(self._line(iteration, metrics))

    def _line(self, iteration: int, metrics: Mapping[str, float]) -> str:
        parts = [f"iteration {iteration}/{self._progress.tasks[0].total:.0f}"]
        parts += [f"{label} {form.format(metrics[key])}" for label, key, form in _ROWS if key in metrics]
        busy = ", ".join(f"{label} {metrics[key]:.0%}" for label, key in _STAGES if key in metrics)
        left = metrics.get("time/left_s")
        return " | ".join([*parts, f"busy: {busy}"] + ([f"left {left / 60:.0f} min"] if left is not None else []))

    def _render(self) -> RenderableType:
        figures = Table.grid(padding=(0, 2))
        figures.add_column(style="dim")
        figures.add_column(justify="right")
        for label, key, form in _ROWS:
            figures.add_row(label, form.format(self._metrics[key]) if key in self._metrics else "…")
        stages = Table.grid(padding=(0, 1))
        for label, key in _STAGES:
            share = min(1.0, self._metrics.get(key, 0.0))
            filled = round(_BAR * share)
            stages.add_row(label, f"[green]{'█' * filled}[/][dim]{'░' * (_BAR - filled)}[/]", f"{share:.0%}")
        body = Table.grid(padding=(0, 4))
        body.add_row(figures, Group("[dim]busy[/]", stages))
        return Panel(Group(body, self._progress, f"[dim]{self._status}[/]"), title=self._title, title_align="left")
