"""What is shown of long work: a bar with an estimate in a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress

_LINE_EVERY_S = 20.0
_FILE_COLUMNS = 200


def make_console() -> Console:
    """Standard output: as wide as its terminal; a file or a pipe has no width, and tables are not cut there."""
    return Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS)


class ProgressDisplay:
    """A context manager; ``update`` as often as is convenient."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console, self._title, self._total = console, title, total
        self._bar = Progress(console=console) if console.is_terminal else None
        self._task = self._bar.add_task(title, total=total) if self._bar else None
        self._started = self._printed = time.monotonic()

    def __enter__(self) -> ProgressDisplay:
        if self._bar:
            self._bar.start()
        return self

    def update(self, done: int, note: str = "") -> None:
        """``done`` of the total are done; ``note`` stands behind the title."""
        title = f"{self._title}, {note}" if note else self._title
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=done, description=title)
            return
        now = time.monotonic()
        if done and now - self._printed > _LINE_EVERY_S:
            self._printed = now
            left = (now - self._started) / done * (self._total - done)
            line = f"{title}: {done} of {self._total}, about {left / 60:.0f} min left"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()
