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
    """Watch over the calling process. Closing the returned process's stdin makes it look for leftovers and end."""
    command = [sys.executable, "-S", "-E", "-P", __file__, *map(str, folders)]
    # -P: this folder's types.py must not be taken for the standard library's
    # a session of its own: Ctrl-C in the terminal is for the driver
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def users_of(folder: str) -> list[int]:
    """Processes that have a file below ``folder`` open, or name it in their command line."""
    users, spared = [], {os.getpid(), os.getppid()}  # the driver itself, where it is still there
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in spared:
            continue
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace")
            names = [os.readlink(fd.path) for fd in os.scandir(f"/proc/{entry}/fd")]
            if folder in command or any(name.startswith(folder) for name in names):
                users.append(int(entry))
    return users


def main(folders: Sequence[str]) -> None:
    sys.stdin.buffer.read()  # returns when the driver has ended, however it ended
    for folder in folders:
        for pid in users_of(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
