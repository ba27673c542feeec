"""Weight sync: the learner publishes a new version, inference servers copy it between two batches.

    learner ──publish──▶ [ buffer 0 | buffer 1 ] ──refresh──▶ inference servers of this node
                           "current" names one
                                  │ buckets
                                  ▼
                           relay on another node ──▶ [ buffer 0 | buffer 1 ] ──refresh──▶ its inference servers
                                  │ buckets, as they arrive
                                  ▼
                           relays on further nodes: a tree, so that no node sends to more than two

The writer fills the inactive buffer, then flips the current index. Neither side waits for the other: a reader that was
overtaken twice during its copy notices that the buffer's own version changed, and copies again. Each node has two
buffers in shared memory; where the learner's first rank does not run, a relay process writes them.

A version here is the number of a publication (``publication``), which rises from one to the next.

A tensor is copied once on each side: from its device straight into the buffer, and from there into its place. On a GPU
the buffers are page-locked, the copies are queued, and one wait at the end covers them all.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from vla_rl.core.errors import StallError
from vla_rl.core.ipc.pinned import PinnedCopies
from vla_rl.core.ipc.shared_memory import SharedArrays

_ALIGNMENT = 64  # bytes; of each tensor in a buffer, so that it can be viewed in its dtype
_UNPUBLISHED = -1  # in place of a version: none yet, or one that is being written
_BUCKET_BYTES = 32 << 20


def create_weight_buffers(path: Path, nbytes: int) -> None:
    """Allocate both buffers, of ``nbytes`` each. Raises FileExistsError."""
    arrays = SharedArrays.create(
        path, {"current": ((1,), "<i8"), "versions": ((2,), "<i8"), "buffers": ((2, nbytes), "|u1")}
    )
    arrays["versions"][:] = _UNPUBLISHED
    arrays["current"][0] = _UNPUBLISHED


def weights_nbytes(sizes: Iterable[int]) -> int:
    """Bytes of one version of tensors of these sizes in bytes."""
    return sum(_aligned(nbytes) for nbytes in sizes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class _WeightBuffers:
    """Both buffers, attached by path.

    ``current`` is one word, ``2 * version + index``, so that version and index change together.
    """

    def __init__(self, path: Path) -> None:
        arrays = SharedArrays.attach(path)
        self._current, self._versions, self._buffers = arrays["current"], arrays["versions"], arrays["buffers"]
        self._copies = PinnedCopies(torch.from_numpy(self._buffers).view(-1))

    @property
    def nbytes(self) -> int:
        """Of one version."""
        return self._buffers.shape[1]

    @property
    def published_version(self) -> int:
        """The newest published version; -1 before the first."""
        return self._read_current()[0]

    def _read_current(self) -> tuple[int, int]:
        """(published version, buffer index); (-1, 1) before the first."""
        return divmod(int(self._current[0]), 2)

    def _write(self, version: int, fill: Callable[[np.ndarray], int]) -> None:
        """Publish what ``fill`` writes into a buffer, uint8 [nbytes]; it returns how many bytes.

        If it raises, nothing is published.
        """
        index = 1 - self._read_current()[1]
        buffer = self._buffers[index]
        self._versions[index] = _UNPUBLISHED
        filled = fill(buffer)
        if filled != buffer.size:
            raise ValueError(f"weights of version {version} have {filled} bytes, the buffer {buffer.size}")
        self._versions[index] = version
        self._current[0] = 2 * version + index


class WeightPublisher(_WeightBuffers):
    """The learner's side; there is one writer."""

    def publish(self, version: int, tensors: Iterable[torch.Tensor]) -> None:
        """Publish the tensors (same shapes, dtypes and order as at creation). Does not wait for readers.

        They are asked for one after the other, and none is kept. Raises ValueError if they do not fill the buffer.
        """
        self._write(version, partial(self._fill, tensors))

    @torch.no_grad()
    def _fill(self, tensors: Iterable[torch.Tensor], buffer: np.ndarray) -> int:
        offset = 0
        try:
            for tensor in tensors:
                view = _view(buffer, offset, tensor)
                if view is not None:
                    self._copies.copy(view, tensor.detach())
                offset += _aligned(tensor.numel() * tensor.element_size())
                del tensor  # the next one may need its memory
        finally:
            self._copies.finish()
        return offset


class WeightReader(_WeightBuffers):
    """An inference server's side, and the source of a relay. ``version``: copied last; -1 before the first."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.version = _UNPUBLISHED

    def refresh(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Copy the published version into ``parameters`` unless it is there already; True if something changed."""
        while (current := self._read_current())[0] != self.version:
            version, index = current
            self._copy(self._buffers[index], parameters.values())
            if self._versions[index] == version:
                self.version = version
                return True
        return False

    @torch.no_grad()
    def _copy(self, buffer: np.ndarray, tensors: Iterable[torch.Tensor]) -> None:
        offset = 0
        for tensor in tensors:
            view = _view(buffer, offset, tensor)
            if view is None:
                raise ValueError(f"the parameters have more than the {buffer.size} bytes that are published")
            self._copies.copy(tensor, view)
            offset += _aligned(tensor.numel() * tensor.element_size())
        self._copies.finish()

    def bucket(self, version: int, number: int) -> np.ndarray | None:
        """A copy of one bucket of a version, uint8; None if that version is not the published one."""
        published, index = self._read_current()
        data = self._buffers[index][number * _BUCKET_BYTES : (number + 1) * _BUCKET_BYTES].copy()
        return data if published == version == self._versions[index] else None


class WeightRelay(_WeightBuffers):
    """The writer on a node where the learner's first rank does not run, and the source of further relays."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._arriving = _UNPUBLISHED  # the version that is being written, or was last
        self._arrived = 0  # bytes of it
        self._changed = threading.Condition()

    @property
    def num_buckets(self) -> int:
        """Of one version."""
        return -(-self.nbytes // _BUCKET_BYTES)

    def relay(self, version: int, buckets: Iterable[np.ndarray | None]) -> bool:
        """Publish a version from all of its ``WeightReader.bucket``, in order.

        Returns False, with nothing published, if one bucket is None: the source has published a newer version.
        """
        with self._changed:
            self._arriving, self._arrived = version, 0
        try:
            self._write(version, partial(self._fill, buckets))
        except _Overtaken:
            with self._changed:
                self._arriving = _UNPUBLISHED
                self._changed.notify_all()
            return False
        return True

    def _fill(self, buckets: Iterable[np.ndarray | None], buffer: np.ndarray) -> int:
        self._filling = buffer
        for data in buckets:
            if data is None:
                raise _Overtaken
            buffer[self._arrived : self._arrived + data.size] = data
            with self._changed:
                self._arrived += data.size
                self._changed.notify_all()
        return self._arrived

    def bucket(self, version: int, number: int, timeout: float) -> np.ndarray | None:
        """A copy of one bucket as soon as it has arrived here; None if a newer version has.

        Raises StallError after ``timeout`` seconds.
        """
        start = number * _BUCKET_BYTES
        end = min(start + _BUCKET_BYTES, self.nbytes)
        with self._changed:
            here = self._changed.wait_for(
                lambda: self._arriving > version or (self._arriving == version and self._arrived >= end),
                timeout,
            )
            if not here:
                raise StallError(f"bucket {number} of weights {version} has not arrived for {timeout:.0f} s")
            if self._arriving != version:
                return None
            return self._filling[start:end].copy()


class _Overtaken(Exception):
    """The version has been replaced by a newer one at its source."""


def _view(buffer: np.ndarray, offset: int, like: torch.Tensor) -> torch.Tensor | None:
    """The bytes from ``offset`` on, in the dtype and shape of a tensor; None if the buffer ends before."""
    data = buffer[offset : offset + like.numel() * like.element_size()]
    if data.size < like.numel() * like.element_size():
        return None
    return torch.from_numpy(data).view(like.dtype).view(like.shape)
