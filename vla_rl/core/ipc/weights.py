"""Weight sync: the learner publishes a new policy version, inference servers copy it between two batches.

    learner ──publish──▶ [ buffer 0 | buffer 1 ] ──refresh──▶ inference servers of this node
                           "current" names one
                                  │ buckets
                                  ▼
                           relay on another node ──▶ [ buffer 0 | buffer 1 ] ──refresh──▶ its inference servers

The writer fills the inactive buffer, then flips the current index. Neither side waits for the other: a reader that was
overtaken twice during its copy notices that the buffer's own version changed, and copies again. Each node has two
buffers in shared memory; where the learner's first rank does not run, a relay process writes them.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch

from vla_rl.core.ipc.shared_memory import SharedArrays

_UNPUBLISHED = -1  # in place of a policy version: none yet, or one that is being written
_BUCKET_BYTES = 32 << 20


def create_weight_buffers(path: Path, nbytes: int) -> None:
    """Allocate both buffers, of ``nbytes`` each. Raises FileExistsError."""
    arrays = SharedArrays.create(
        path, {"current": ((1,), "<i8"), "versions": ((2,), "<i8"), "buffers": ((2, nbytes), "|u1")}
    )
    arrays["versions"][:] = _UNPUBLISHED
    arrays["current"][0] = _UNPUBLISHED


def weights_nbytes(parameters: Mapping[str, torch.Tensor]) -> int:
    """Bytes of one version of these parameters."""
    return sum(p.numel() * p.element_size() for p in parameters.values())


class _WeightBuffers:
    """Both buffers, attached by path.

    ``current`` is one word, ``2 * policy_version + index``, so that version and index change together.
    """

    def __init__(self, path: Path) -> None:
        arrays = SharedArrays.attach(path)
        self._current, self._versions, self._buffers = arrays["current"], arrays["versions"], arrays["buffers"]

    @property
    def nbytes(self) -> int:
        """Of one version."""
        return self._buffers.shape[1]

    @property
    def published_version(self) -> int:
        """The newest published policy version; -1 before the first."""
        return self._read_current()[0]

    def _read_current(self) -> tuple[int, int]:
        """(published version, buffer index); (-1, 1) before the first."""
        return divmod(int(self._current[0]), 2)

    def _write(self, policy_version: int, pieces: Iterable[np.ndarray]) -> None:
        """Publish uint8 pieces that together fill a buffer. If a piece raises, nothing is published."""
        index = 1 - self._read_current()[1]
        buffer, offset = self._buffers[index], 0
        self._versions[index] = _UNPUBLISHED
        for data in pieces:
            buffer[offset : offset + data.size] = data
            offset += data.size
        if offset != buffer.size:
            raise ValueError(f"weights of version {policy_version} have {offset} bytes, the buffer {buffer.size}")
        self._versions[index] = policy_version
        self._current[0] = 2 * policy_version + index


class WeightPublisher(_WeightBuffers):
    """The learner's side; there is one writer."""

    def publish(self, policy_version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Publish ``parameters`` (same names, shapes and order as at creation). Never blocks."""
        self._write(policy_version, (_as_bytes(tensor.cpu()) for tensor in parameters.values()))


class WeightReader(_WeightBuffers):
    """An inference server's side, and the source of a relay. ``policy_version``: copied last; -1 before the first."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.policy_version = _UNPUBLISHED

    def refresh(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Copy the published version into ``parameters`` unless it is there already; True if something changed."""
        while (current := self._read_current())[0] != self.policy_version:
            version, index = current
            buffer = torch.from_numpy(self._buffers[index])
            offset = 0
            with torch.no_grad():
                for tensor in parameters.values():
                    nbytes = tensor.numel() * tensor.element_size()
                    # the buffer's slices need not be aligned for the dtype, so the copy goes through bytes
                    source = buffer[offset : offset + nbytes].clone().view(tensor.dtype).view(tensor.shape)
                    tensor.copy_(source)
                    offset += nbytes
            if self._versions[index] == version:
                self.policy_version = version
                return True
        return False

    def bucket(self, policy_version: int, number: int) -> np.ndarray | None:
        """A copy of one bucket of a version, uint8; None if that version is not the published one."""
        published, index = self._read_current()
        data = self._buffers[index][number * _BUCKET_BYTES : (number + 1) * _BUCKET_BYTES].copy()
        return data if published == policy_version == self._versions[index] else None


class WeightRelay(_WeightBuffers):
    """The writer on a node where the learner's first rank does not run."""

    @property
    def num_buckets(self) -> int:
        """Of one version."""
        return -(-self.nbytes // _BUCKET_BYTES)

    def relay(self, policy_version: int, buckets: Iterable[np.ndarray | None]) -> bool:
        """Publish a version from all of its ``WeightReader.bucket``, in order.

        Returns False, with nothing published, if one bucket is None: the source has published a newer version.
        """
        try:
            self._write(policy_version, map(_require_bucket, buckets))
        except _Overtaken:
            return False
        return True


class _Overtaken(Exception):
    """The version has been replaced by a newer one at its source."""


def _require_bucket(bucket: np.ndarray | None) -> np.ndarray:
    if bucket is None:
        raise _Overtaken
    return bucket


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as uint8 (numpy has no bfloat16)."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
