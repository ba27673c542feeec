"""What a person sees of long work: live displays in a terminal, lines in a log file."""

import sys
import time
from collections.abc import Iterable, Mapping
from threading import Lock
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import Progress
from rich.spinner import Spinner
from rich.text import Text

from vla_rl.core.records import EnvSpec
from vla_rl.observability.heartbeat import Activity, Heartbeat
from vla_rl.observability.panel import RunPicture

_FILE_COLUMNS = 200


def make_console() -> Console:
    """Standard output, as wide as its terminal; in a file or a pipe, tables are not cut."""
    return Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS)


def say(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def minutes_left(seconds: float, done: int, total: int) -> str:
    """An estimate from the ``seconds`` that the first ``done`` (at least 1) of ``total`` took."""
    left = seconds / done * (total - done)
    return f"about {left / 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left"


class ProgressDisplay:
    """A progress bar with an estimate, or a log line every 15 s. A context manager; call ``update`` at any rate."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._title, self._total = title, total
        self._text = f"{title}: 0 of {total}"
        self._bar = Progress(console=console) if console.is_terminal else None
        self._task = self._bar.add_task(title, total=total) if self._bar else None
        self._heartbeat = Heartbeat(lambda text: say(console, text), lambda: self._text)
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        (self._bar or self._heartbeat).__enter__()
        return self

    def update(self, done: int, note: str = "") -> None:
        """``done`` of the total are done; ``note`` is shown after the title."""
        title = f"{self._title}, {note}" if note else self._title
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=done, description=title)
        left = f", {minutes_left(time.monotonic() - self._started, done, self._total)}" if done else ""
        self._text = f"{title}: {done} of {self._total}{left}"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        (self._bar or self._heartbeat).__exit__(kind, error, tb)


class StatusDisplay:
    """What is being done: a line that changes in a terminal, a log line every 15 s elsewhere. A context manager."""

    def __init__(self, console: Console, text: str) -> None:
        """``text``: ``stage: details``."""
        self._activity, self._spinner = Activity(text), Spinner("dots")
        line = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._render)
        heartbeat = Heartbeat(lambda text: say(console, text), self._activity.text)
        self._shown: Live | Heartbeat = line if console.is_terminal else heartbeat

    def _render(self) -> RenderableType:
        self._spinner.update(text=Text(self._activity.text()))
        return self._spinner

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def update(self, text: str) -> None:
        """At any rate."""
        self._activity.set(text)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._shown.__exit__(kind, error, tb)


class TrainingView:
    """A training run: a live panel in a terminal, plain lines elsewhere."""

    def __init__(
        self, title: str, spec: EnvSpec, iterations: int, done: int, records: Iterable[Mapping[str, float]] = ()
    ) -> None:
        """``records``: of the ``done`` iterations of a run that goes on; later ones are left out."""
        self._console = make_console()
        self._spec = spec
        self._activity = Activity("starting")
        self._picture = RunPicture(title, iterations)
        for record in records:
            if record["iteration"] <= done:
                self._picture.add(record)
        self._picture.iteration = done
        self._updated = time.monotonic()
        self._lock = Lock()  # of the picture, which another thread shows
        live = Live(console=self._console, refresh_per_second=4, get_renderable=self._render)
        self._heartbeat = Heartbeat(self.say, lambda: f"{self._picture.progress()}: {self._activity.text()}")
        self._shown: Live | Heartbeat = live if self._console.is_terminal else self._heartbeat

    def __enter__(self) -> Self:
        self.say(self._picture.title)
        for task, instruction in enumerate(self._spec.instructions[:10]):
            self.say(f"  task {task}: {instruction}")
        if self._spec.assets != "none":
            placeholder = self._spec.assets == "placeholder"
            note = " (numbers on placeholder assets are not benchmark numbers)" if placeholder else ""
            self.say(f"  assets: {self._spec.assets}{note}")
        for note in self._spec.notes:
            self.say(f"  {note}")
        self._shown.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._activity.end()
        self._shown.__exit__(kind, error, tb)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._heartbeat.spoke()
        say(self._console, text)

    def status(self, text: str) -> None:
        """Show what the run is waiting for: ``stage: details``."""
        self._activity.set(text)

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished iteration."""
        with self._lock:
            self._picture.add({"iteration": iteration} | dict(metrics))
        self._updated = time.monotonic()
        if not self._console.is_terminal:
            self.say(self._picture.line())

    def _render(self) -> RenderableType:
        age_s = time.monotonic() - self._updated
        with self._lock:
            return self._picture.panel(self._console.width, self._activity.text(), age_s)
