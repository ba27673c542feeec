"""A log that is never silent for long: a thread says what is being done, and for how long already."""

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

SILENCE_S = 15.0  # longest time without a line


def duration(seconds: float) -> str:
    """In the unit that suits it: ``31 s``, ``12 min``, ``3.5 h``, ``12 days``."""
    if seconds < 99.5:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 100 * 3600 else f"{seconds / 86400:.0f} days"


class Activity:
    """What is being done, as ``stage: details``. A stage lasts as long as only its details change."""

    def __init__(self, text: str) -> None:
        self._text, self._since = text, time.monotonic()

    def set(self, text: str) -> None:
        """At any rate."""
        if text.partition(": ")[0] != self._text.partition(": ")[0]:
            self._since = time.monotonic()
        self._text = text

    def end(self) -> None:
        """It is over: its time is told no longer."""
        self._since = math.inf

    def text(self) -> str:
        """With the time that the stage has taken so far, from a second on."""
        stage, colon, details = self._text.partition(": ")
        seconds = time.monotonic() - self._since
        return f"{stage}, for {duration(seconds)}{colon}{details}" if seconds >= 1.0 else self._text


class Heartbeat:
    """Says a line whenever none was written for ``SILENCE_S`` seconds. A context manager."""

    def __init__(self, say: Callable[[str], None], text: Callable[[], str]) -> None:
        """``text``: what is being done; called in another thread, as ``say`` is."""
        self._say, self._text = say, text
        self._spoken = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def spoke(self) -> None:
        """Somebody else has written a line."""
        self._spoken = time.monotonic()

    def __enter__(self) -> Self:
        self.spoke()
        self._thread.start()
        return self

    # consumes: nothing. waits for: silence. unblocked by: its time limit, the end of the block.
    def _run(self) -> None:
        while not self._ended.wait(max(0.0, self._spoken + SILENCE_S - time.monotonic())):
            if time.monotonic() - self._spoken >= SILENCE_S:
                self.spoke()
                self._say(self._text())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()


def announcing(stage: str) -> Heartbeat:
    """On standard output, before a command has a display."""
    activity = Activity(stage)
    return Heartbeat(lambda text: print(text, flush=True), activity.text)
