"""Versioned weight hand-over on one node: two flat buffers in shared memory.

The learner writes version v + 1 into the buffer that nobody is told to read, then moves the sign that says which one is
newest. Readers copy the newest buffer between two inference batches. Neither waits for the other: a reader that was
overtaken twice during its copy notices (the buffer's own version changed) and copies again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from vla_rl.sharedmem import SharedArrays

_BEING_WRITTEN = -1


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as uint8 (numpy has no bfloat16)."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()


def create_weights(path: Path, parameters: Mapping[str, torch.Tensor]) -> SharedArrays:
    """Allocate both buffers for a model with these parameters, in this order."""
    nbytes = sum(p.numel() * p.element_size() for p in parameters.values())
    arrays = SharedArrays.create(
        path, {"newest": ((1,), "<i8"), "versions": ((2,), "<i8"), "buffers": ((2, nbytes), "|u1")}
    )
    arrays["versions"][:] = _BEING_WRITTEN
    arrays["newest"][0] = _BEING_WRITTEN
    return arrays


class WeightPublisher:
    """The learner's side. One writer."""

    def __init__(self, path: Path) -> None:
        self._shared = SharedArrays.attach(path)

    def publish(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Hand over ``parameters`` (same names, shapes and order as at creation) as ``version``. Never blocks."""
        side = version % 2
        buffer, versions = self._shared["buffers"][side], self._shared["versions"]
        versions[side] = _BEING_WRITTEN
        offset = 0
        for tensor in parameters.values():
            data = _as_bytes(tensor.cpu())
            buffer[offset : offset + data.size] = data
            offset += data.size
        if offset != buffer.size:
            raise ValueError(f"weights of version {version} have {offset} bytes, the buffer {buffer.size}")
        versions[side] = version
        self._shared["newest"][0] = version


class WeightReader:
    """An inference server's side."""

    def __init__(self, path: Path) -> None:
        self._shared = SharedArrays.attach(path)
        self.version = _BEING_WRITTEN

    @property
    def newest(self) -> int:
        """The newest published version; -1 before the first."""
        return int(self._shared["newest"][0])

    def refresh(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Copy the newest version into ``parameters`` unless it is there already; True where something changed."""
        while self.newest != self.version:
            version = self.newest
            side = version % 2
            buffer = torch.from_numpy(self._shared["buffers"][side])
            offset = 0
            with torch.no_grad():
                for tensor in parameters.values():
                    nbytes = tensor.numel() * tensor.element_size()
                    # the buffer's slices need not be aligned for the dtype, so the copy goes through bytes
                    source = buffer[offset : offset + nbytes].clone().view(tensor.dtype).view(tensor.shape)
                    tensor.copy_(source)
                    offset += nbytes
            if self._shared["versions"][side] == version:
                self.version = version
                return True
        return False
