"""Locks that the kernel releases when their owner ends, however it ends, also among containers that share a folder."""

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

_LONGEST = 1000  # bytes of an owner's name
_ASKED_S = 0.002  # ``is_held`` is through within it


class FileLock:
    """A locked file; the name of its owner is in it while it is locked."""

    def __init__(self, fd: int, new: Path | None) -> None:
        """``new``: the file, if there was none before."""
        self._fd, self._new, self._before = fd, new, os.read(fd, _LONGEST)
        self._write(f"process {os.getpid()} on {socket.gethostname()}".encode())

    @classmethod
    def acquire(cls, path: Path) -> Self | None:
        """Lock ``path``, which is made if it is missing; None if another process holds it. Raises OSError."""
        is_second = False
        while True:
            new = None if path.exists() else path
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                if is_second:
                    return None
                is_second = True
                time.sleep(_ASKED_S)
                continue
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.stat()):
                    return cls(fd, new)
            os.close(fd)  # its owner has just removed it

    @staticmethod
    def is_held(path: Path) -> bool:
        """Whether a process holds the lock ``path``. No file is made or changed."""
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # there is none, or nobody may read it
            return False
        return False

    def _write(self, text: bytes) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text, 0)

    def release(self) -> None:
        """The file is then as it was before, or absent. Safe to call twice."""
        if self._fd >= 0:
            self._write(self._before)
            if self._new is not None:
                self._new.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1
