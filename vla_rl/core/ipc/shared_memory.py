"""Named shared memory and wake-ups between the processes of one node.

Two primitives carry all frequent traffic (observations, actions, weights). Everything else goes through Ray.

* ``SharedArrays``: numpy arrays in one memory-mapped file. Any process of the node attaches by path and sees the same
  bytes.
* ``Doorbell``: a named pipe that carries row numbers. Waiting on it is event-driven. It survives a reader that dies: a
  restarted process opens it again.

Plain files are used instead of ``multiprocessing.shared_memory``, whose resource tracker (before Python 3.13) unlinks a
segment when any process that attached to it exits.
"""

import contextlib
import errno
import json
import math
import mmap
import os
import select
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.faults import strikes
from vla_rl.core.machine import GIB

_HEADER_BYTES = 16384  # JSON layout at the start of the file
_ALIGNMENT = 64  # a cache line: neighbouring arrays never share one
WAKE = -1  # a doorbell token without a row: the reader wakes up and looks at its state


def shared_root() -> Path:
    """Folder of all segments: in memory if the system offers that."""
    root = Path("/dev/shm")
    return root if root.is_dir() and os.access(root, os.W_OK) else Path(tempfile.gettempdir())


def free_shared_memory() -> int:
    """Bytes that are free in ``shared_root``."""
    return shutil.disk_usage(shared_root()).free


def enlarge(nbytes: int) -> str:
    """How to have shared memory of at least this size."""
    gib = max(1, math.ceil(nbytes / GIB))
    return f"enlarge it: mount -o remount,size={gib}G /dev/shm, or start the container with --shm-size={gib}g"


def _allocate(fd: int, path: Path, nbytes: int) -> None:
    """Reserve all pages of a new file. A sparse file would end the process (SIGBUS) at the write that finds no page."""
    try:
        if strikes("shared_memory"):
            raise OSError(errno.ENOSPC, "by chaos")
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        path.unlink()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        usage = shutil.disk_usage(path.parent)
        raise UserError(
            f"shared memory is full: {path.name.removesuffix('.partial')} needs {nbytes / GIB:.2f} GiB, and "
            f"{path.parent} has {usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free; "
            + enlarge(usage.total - usage.free + nbytes)
        ) from None


class SharedArrays:
    """Named numpy arrays in one shared file."""

    def __init__(self, path: Path, mapping: mmap.mmap, arrays: dict[str, np.ndarray]) -> None:
        self.path = path
        self._mapping = mapping
        self.arrays = arrays

    @classmethod
    def create(cls, path: Path, layout: Mapping[str, tuple[tuple[int, ...], str]], fill: int = 0) -> Self:
        """Create the file; ``layout``: (shape, dtype) by name. Raises FileExistsError if it exists, and UserError if
        there is not enough shared memory.

        ``fill`` is the value of every byte; a conspicuous one exposes reads of unwritten data.
        """
        entries: dict[str, dict] = {}
        offset = _HEADER_BYTES
        for name, (shape, dtype) in layout.items():
            entries[name] = {"shape": list(shape), "dtype": dtype, "offset": offset}
            nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        header = json.dumps(entries).encode()
        if len(header) + 4 > _HEADER_BYTES:
            raise ValueError(f"layout of {len(entries)} arrays needs {len(header)} header bytes of {_HEADER_BYTES}")
        # created under another name, so that a process that waits for the path never sees half a header
        partial = path.with_name(path.name + ".partial")
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _allocate(fd, partial, offset)
            with mmap.mmap(fd, offset) as mapping:
                mapping[:4] = struct.pack("<I", len(header))
                mapping[4 : 4 + len(header)] = header
                if fill:
                    np.frombuffer(mapping, np.uint8)[_HEADER_BYTES:] = fill
        finally:
            os.close(fd)
        os.link(partial, path)
        os.unlink(partial)
        return cls.attach(path)

    @classmethod
    def attach(cls, path: Path) -> Self:
        """Map an existing file. Raises FileNotFoundError."""
        fd = os.open(path, os.O_RDWR)
        try:
            mapping = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        (length,) = struct.unpack("<I", mapping[:4])
        entries = json.loads(mapping[4 : 4 + length])
        arrays = {
            name: np.ndarray(tuple(e["shape"]), np.dtype(e["dtype"]), buffer=mapping, offset=e["offset"])
            for name, e in entries.items()
        }
        return cls(path, mapping, arrays)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def unlink(self) -> None:
        """Remove the name; the memory is freed when the last process unmaps it."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


class Doorbell:
    """A named pipe of int32 tokens with one reader and any number of writers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # read-write: opening never blocks, and the pipe has no end-of-file when peers come and go
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def ring(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Send tokens. A pipe holds 16,384; more are dropped. A full pipe means that its reader is dead or stuck, and
        a restarted reader finds the open requests in shared memory."""
        with contextlib.suppress(BlockingIOError):
            for start in range(0, len(tokens), 512):  # writes of up to 4096 bytes are atomic
                os.write(self._fd, np.asarray(tokens[start : start + 512], "<i4").tobytes())

    def wait(self, timeout: float) -> list[int]:
        """Tokens that have arrived; blocks up to ``timeout`` seconds for the first, then returns []."""
        if not self._poll.poll(max(0.0, timeout) * 1000):
            return []
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return []
        return np.frombuffer(data, "<i4").tolist()

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
