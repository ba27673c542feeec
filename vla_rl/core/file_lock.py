"""Locks that the kernel releases when their owner ends, however it ends, also among containers that share a folder."""

import fcntl
import os
import socket
from pathlib import Path
from typing import Self


class FileLock:
    """A locked file; the name of its owner is in it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(cls, path: Path) -> Self | None:
        """Lock ``path``, which is made if it is missing; None if another process holds it. Raises OSError."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        os.ftruncate(fd, 0)
        os.write(fd, f"process {os.getpid()} on {socket.gethostname()}".encode())
        return cls(fd)

    def release(self) -> None:
        """Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
