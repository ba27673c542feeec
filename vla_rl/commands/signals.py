"""Ctrl-C as a request: the first asks for a clean end, the second interrupts."""

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

_ACKNOWLEDGED = b"\nstopping with a checkpoint after the running update; press Ctrl-C again to stop without\n"
_INTERRUPTED = b"\ninterrupted: ending all processes of the run\n"


class StopRequest:
    """Within the block, SIGINT and SIGTERM set ``requested``; a second signal raises KeyboardInterrupt.

    While ``graceful`` is false, so does the first one: nothing has been done that a checkpoint would save.
    """

    def __init__(self) -> None:
        self.requested = False
        self.graceful = False
        self._interrupted = False
        self._previous: dict[int, signal.Handlers | int | None] = {}

    def __enter__(self) -> Self:
        self.listen()
        return self

    def listen(self) -> None:
        """Install the handlers; again after a library (such as Ray) has installed its own.

        A caller outside the main thread, to which Python gives no signals, stops a run by a callback.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.signal(number, self._on_signal)
            self._previous.setdefault(number, handler)  # type: ignore[arg-type]

    def become_graceful(self) -> None:
        """From here on the first signal asks. Raises KeyboardInterrupt if one has interrupted already.

        Python drops an exception that is raised within a finalizer or a library's callback: the start has gone on then.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        self.graceful = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        interrupts = self.requested or not self.graceful
        self.requested = True
        with contextlib.suppress(OSError):  # standard error may be closed
            os.write(2, _INTERRUPTED if interrupts else _ACKNOWLEDGED)  # at once, whatever the main thread is doing
        if interrupts:
            self._interrupted = True
            raise KeyboardInterrupt
