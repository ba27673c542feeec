"""Cleans up after a driver that was killed. It runs as a separate script and waits on its stdin for the driver's end.

Ray's processes notice a killed driver only after up to a minute, and shared memory and session folders would stay.
This process kills the former and removes the latter. It uses the standard library only, so it takes a few MiB.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def start_reaper(folders: Sequence[Path]) -> subprocess.Popen[bytes]:
    """Watch the calling process. Closing the reaper's stdin makes it clean up and exit, which closes its stdout;
    ``communicate`` does both."""
    command = [sys.executable, "-S", "-E", __file__, str(os.getpid()), *map(str, folders)]
    # a session of its own: Ctrl-C in the terminal is for the driver
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    reaper.wait()  # it continues in a child process: Ray kills the children of an actor that ends
    return reaper


def users_of(folder: str, spared: int) -> list[int]:
    """Processes, except ``spared``, that have a file below ``folder`` open, or name it in their command line.

    Its lock does not count: other runs look at it, too (``HeldFolder``).
    """
    users = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in (os.getpid(), spared):
            continue
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace")
            names = [os.readlink(fd.path) for fd in os.scandir(f"/proc/{entry}/fd")]
            if folder in command or any(name.startswith(folder) and not name.endswith("/lock") for name in names):
                users.append(int(entry))
    return users


def main(watched: int, folders: Sequence[str]) -> None:
    if os.fork():
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which schedulers send to all processes of a job
    sys.stdin.buffer.read()  # returns when the watched process has ended, however it ended
    for folder in folders:
        for pid in users_of(folder, spared=watched):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
