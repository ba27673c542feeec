"""Temporary folders that last as long as the process that made them, and what dead processes have left of theirs."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from vla_rl.core.errors import UserError
from vla_rl.core.file_lock import FileLock
from vla_rl.core.ipc.shared_memory import shared_root

_PREFIX = "vla_rl-"
_LOCK = "lock"
_LONGEST_ROOT = 20  # Ray adds 84 characters for its sockets' paths, for which the kernel allows 107


class HeldFolder:
    """A new folder with a locked file in it. The kernel releases the lock when this process ends, however it ends, and
    processes of other containers that share the memory see it, too."""

    def __init__(self, root: Path) -> None:
        hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{os.getpid()}-", dir=root))
        self._lock = FileLock.acquire(hidden / _LOCK)
        self.path = hidden.with_name(hidden.name[1:])
        hidden.rename(self.path)  # nobody sees it without its lock

    def release(self) -> None:
        """Give the folder up; safe to call twice. Removing it is left to others."""
        if self._lock is not None:
            self._lock.release()


def session_root() -> Path:
    """Where a folder for Ray's sockets can be made. Raises UserError if there is no such place."""
    for root in _session_roots():
        if len(str(root)) <= _LONGEST_ROOT and root.is_dir() and os.access(root, os.W_OK | os.X_OK):
            return root
    raise UserError(
        f"TMPDIR={tempfile.gettempdir()}: Ray's sockets need a folder whose path has at most {_LONGEST_ROOT} "
        "characters, and neither /tmp nor /var/tmp can be written; set TMPDIR to a shorter path"
    )


def _session_roots() -> list[Path]:
    return [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp"), shared_root()]


def sweep_leftovers() -> None:
    """Remove the folders of processes that have died."""
    for root in {shared_root(), *_session_roots()}:
        for folder in root.glob(f"{_PREFIX}*-*"):
            with contextlib.suppress(OSError):  # another process is quicker, or another user owns it
                if _is_dead(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_dead(folder: Path) -> bool:
    if not (folder / _LOCK).is_file():
        return False  # not one of ours
    lock = FileLock.acquire(folder / _LOCK)
    if lock is not None:
        lock.release()
    return lock is not None
