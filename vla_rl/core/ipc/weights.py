"""Versioned weight hand-over: on each node two flat buffers in shared memory.

The learner writes a new version into the buffer that nobody is told to read, then moves the sign that says which one is
newest. Readers copy the newest buffer between two inference batches. Neither waits for the other: a reader that was
overtaken twice during its copy notices (the buffer's own version changed) and copies again.

On a node without the learner's first rank a relay is the writer: it gets a new version a bucket at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch

from vla_rl.core.ipc.shared_memory import SharedArrays

_NOTHING = -1  # in place of a version: none yet, or one that is being written
_BUCKET_BYTES = 32 << 20


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as uint8 (numpy has no bfloat16)."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()


def create_weights(path: Path, parameters: Mapping[str, torch.Tensor]) -> None:
    """Allocate both buffers for a model with these parameters, in this order."""
    create_buffers(path, sum(p.numel() * p.element_size() for p in parameters.values()))


def create_buffers(path: Path, nbytes: int) -> None:
    """Allocate both buffers. Raises FileExistsError."""
    arrays = SharedArrays.create(
        path, {"newest": ((1,), "<i8"), "versions": ((2,), "<i8"), "buffers": ((2, nbytes), "|u1")}
    )
    arrays["versions"][:] = _NOTHING
    arrays["newest"][0] = _NOTHING


class _Buffers:
    """Both buffers, attached to by path. The sign is one word, version · 2 + side, so that it changes at once."""

    def __init__(self, path: Path) -> None:
        arrays = SharedArrays.attach(path)
        self._sign, self._versions, self._buffers = arrays["newest"], arrays["versions"], arrays["buffers"]

    @property
    def nbytes(self) -> int:
        """Of one version."""
        return self._buffers.shape[1]

    @property
    def newest(self) -> int:
        """The newest published version; -1 before the first."""
        return self._look()[0]

    def _look(self) -> tuple[int, int]:
        """(newest version, side), before the first (-1, 1)."""
        return divmod(int(self._sign[0]), 2)

    def _write(self, version: int, pieces: Iterable[np.ndarray]) -> None:
        """Publish ``version``: uint8 pieces that fill a buffer. A piece may raise: then nothing is published."""
        side = 1 - self._look()[1]
        buffer, offset = self._buffers[side], 0
        self._versions[side] = _NOTHING
        for data in pieces:
            buffer[offset : offset + data.size] = data
            offset += data.size
        if offset != buffer.size:
            raise ValueError(f"weights of version {version} have {offset} bytes, the buffer {buffer.size}")
        self._versions[side] = version
        self._sign[0] = 2 * version + side


class WeightPublisher(_Buffers):
    """The learner's side. One writer."""

    def publish(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Hand over ``parameters`` (same names, shapes and order as at creation) as ``version``. Never blocks."""
        self._write(version, (_as_bytes(tensor.cpu()) for tensor in parameters.values()))


class WeightReader(_Buffers):
    """An inference server's side, and that of a relay on another node."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.version = _NOTHING

    def refresh(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Copy the newest version into ``parameters`` unless it is there already; True where something changed."""
        while (newest := self._look())[0] != self.version:
            version, side = newest
            buffer = torch.from_numpy(self._buffers[side])
            offset = 0
            with torch.no_grad():
                for tensor in parameters.values():
                    nbytes = tensor.numel() * tensor.element_size()
                    # the buffer's slices need not be aligned for the dtype, so the copy goes through bytes
                    source = buffer[offset : offset + nbytes].clone().view(tensor.dtype).view(tensor.shape)
                    tensor.copy_(source)
                    offset += nbytes
            if self._versions[side] == version:
                self.version = version
                return True
        return False

    def bucket(self, version: int, index: int) -> np.ndarray | None:
        """A copy of one bucket of ``version``, uint8; None where that is no longer, or not yet, the newest."""
        newest, side = self._look()
        data = self._buffers[side][index * _BUCKET_BYTES : (index + 1) * _BUCKET_BYTES].copy()
        return data if newest == version == self._versions[side] else None


class WeightRelay(_Buffers):
    """What writes on a node that the learner does not write on."""

    @property
    def num_buckets(self) -> int:
        """Of one version."""
        return -(-self.nbytes // _BUCKET_BYTES)

    def relay(self, version: int, buckets: Iterable[np.ndarray | None]) -> bool:
        """Publish ``version`` here: all of its ``WeightReader.bucket``, in order. False, with nothing published, where
        one is None."""
        try:
            self._write(version, map(_still_there, buckets))
        except _Overtaken:
            return False
        return True


class _Overtaken(Exception):
    """The version has been replaced by a newer one at its source."""


def _still_there(bucket: np.ndarray | None) -> np.ndarray:
    if bucket is None:
        raise _Overtaken
    return bucket
