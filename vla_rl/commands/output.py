"""Standard output that cannot fail: a full disk or a closed terminal does not end a run of days."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO


class LastingOutput:
    """A stream that drops what cannot be written, and remembers why."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None  # the first one

    def write(self, text: str) -> int:
        self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[..., Any], *args: str) -> None:
        try:
            action(*args)
        except OSError as error:  # a full disk may have room later
            self.error = self.error or error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_output() -> Iterator[LastingOutput]:
    """Within the block, ``sys.stdout`` is one."""
    before = sys.stdout
    stream = before or Path(os.devnull).open("w")  # noqa: SIM115 (this process was started without)
    output = LastingOutput(stream)
    sys.stdout = output  # type: ignore[assignment]
    try:
        yield output
    finally:
        output.flush()
        sys.stdout = before
        if output.error is not None or before is None:
            _abandon(stream)


def _abandon(stream: TextIO) -> None:
    """Python flushes the stream at its end; what is left in it has nowhere to go."""
    with contextlib.suppress(OSError):
        stream.close()
