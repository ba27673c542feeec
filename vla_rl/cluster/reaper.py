"""Cleans up after a driver that was killed: run as a script beside it, it waits for the driver's end on its stdin.

Ray's processes notice a killed driver by and by, some of them after a minute; shared memory and session folders would
stay for ever. This process (standard library only, no site packages: a few MiB) ends the first and removes the second.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def start_reaper(folders: Sequence[Path]) -> subprocess.Popen[bytes]:
    """Watch over the calling process. Closing the returned process's stdin makes it look for leftovers and end, which
    closes its stdout (``communicate`` does both)."""
    command = [sys.executable, "-S", "-E", "-P", __file__, str(os.getpid()), *map(str, folders)]
    # -P: this folder's types.py must not be taken for the standard library's
    # a session of its own: Ctrl-C in the terminal is for the driver
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    reaper.wait()  # it goes on in a child of its own: Ray kills the children of an actor that ends
    return reaper


def users_of(folder: str, spared: int) -> list[int]:
    """Processes, except ``spared``, that have a file below ``folder`` open, or name it in their command line."""
    users = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in (os.getpid(), spared):
            continue
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace")
            names = [os.readlink(fd.path) for fd in os.scandir(f"/proc/{entry}/fd")]
            if folder in command or any(name.startswith(folder) for name in names):
                users.append(int(entry))
    return users


def main(watched: int, folders: Sequence[str]) -> None:
    if os.fork():
        return
    sys.stdin.buffer.read()  # returns when the watched process has ended, however it ended
    for folder in folders:
        for pid in users_of(folder, spared=watched):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
