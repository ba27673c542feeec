"""Offloading: tensors leave a device and come back, so that another process can use its memory in between.

    device   [ storage ][ storage ] ── offload ──▶ [ ][ ]   of 0 bytes
                                    ◀── onload ───
    host                                           [ block ][ block ]   page-locked where the device is a GPU

The storage below the tensors moves. The tensors, their views and the objects that hold them (an optimizer, DeepSpeed
with its flat buffers) stay the same, and are valid again once the bytes are back. ``Tensor.to`` would leave all those
references on the device. DeepSpeed's own ``offload_states`` handles optimizer states under ZeRO-3 only for its fused
Adam, leaves frozen weights on the device under ZeRO-1 and 2, and does not support stage 0.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_BLOCK_BYTES = 2**28  # CUDA's host allocator rounds up to powers of two: one request for all would waste up to half


@dataclass(frozen=True, slots=True)
class _Parked:
    """A storage whose bytes are on the host."""

    storage: torch.UntypedStorage
    nbytes: int
    start: int | None  # position of its bytes on the host; None: all of them are 0


class Offloader:
    """Moves the contents of a set of tensors between their device and the host, all together."""

    def __init__(
        self, device: torch.device, held: Callable[[], Iterable[Tensor]], constant: Iterable[Tensor] = ()
    ) -> None:
        """``held`` returns the tensors, at every ``offload``; those on other devices are ignored. ``constant``: tensors
        that are never written to; the host keeps its copy, so they are copied only once."""
        self.offloaded = False
        self.gib = 0.0  # memory that the last ``offload`` freed on the device
        self._device, self._held, self._constant = device, held, tuple(constant)
        self._host = _HostMemory(pinned=device.type == "cuda")
        self._fixed: list[_Parked] = []
        self._parked: list[_Parked] = []

    def offload(self) -> None:
        """Copy to the host and free the device memory. Does nothing if already offloaded."""
        if self.offloaded:
            return
        self._finish()
        with torch.no_grad():
            if not self._fixed:
                self._fixed = self._copied(self._storages(self._constant), start=0)
            known = {x.storage.data_ptr() for x in self._fixed}
            rest = [x for x in self._storages(self._held()) if x.data_ptr() not in known]
            self._parked = [*self._fixed, *self._copied(rest, start=sum(x.nbytes for x in self._fixed))]
        self._finish()
        for parked in self._parked:
            parked.storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # otherwise this process keeps the memory reserved
        self.offloaded, self.gib = True, sum(x.nbytes for x in self._parked) / 2**30

    def onload(self) -> None:
        """Copy everything back. Does nothing if not offloaded."""
        if not self.offloaded:
            return
        for parked in self._parked:
            parked.storage.resize_(parked.nbytes)
            data = _as_bytes(parked.storage)
            if parked.start is None:
                data.zero_()
                continue
            for offset, memory in self._host.pieces(parked.start, parked.nbytes):
                data[offset : offset + len(memory)].copy_(memory, non_blocking=True)
        self._finish()
        self._parked = []
        self.offloaded = False

    def guard(self, module: nn.Module) -> None:
        """Make forward passes of ``module`` raise RuntimeError while offloaded.

        PyTorch checks in few places whether a storage was freed, and crashes the process in the others.
        """

        def refuse(*_: object) -> None:
            if self.offloaded:
                raise RuntimeError("forward pass of an offloaded model: call onload() first")

        module.register_forward_pre_hook(refuse, prepend=True)

    def _storages(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """The storages below the tensors, each once."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            if tensor.device.type != self._device.type or not tensor.untyped_storage().nbytes():
                continue
            if not tensor.untyped_storage().resizable():  # on a CPU: memory mapped from the checkpoint file
                tensor.data = tensor.data.clone()
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage
        return list(found.values())

    def _copied(self, storages: Iterable[torch.UntypedStorage], start: int) -> list[_Parked]:
        """Start copying to the host's bytes from ``start`` on."""
        parked = []
        for storage in storages:
            data = _as_bytes(storage)
            if not data.any():  # gradients between two updates: as large as the weights, but all zero
                parked.append(_Parked(storage, len(data), None))
                continue
            for offset, memory in self._host.pieces(start, len(data)):
                memory.copy_(data[offset : offset + len(memory)], non_blocking=True)
            parked.append(_Parked(storage, len(data), start))
            start += len(data)
        return parked

    def _finish(self) -> None:
        """Wait until the device has finished all work on every stream."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _HostMemory:
    """Host memory in blocks, which are allocated when first used and kept."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[Tensor] = []

    def pieces(self, start: int, nbytes: int) -> Iterator[tuple[int, Tensor]]:
        """Bytes ``start`` to ``start + nbytes`` as (offset from ``start``, uint8 [n]), cut where blocks end."""
        done = 0
        while done < nbytes:
            block, begin = divmod(start + done, _BLOCK_BYTES)
            while block >= len(self._blocks):
                self._blocks.append(torch.empty(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._pinned))
            piece = self._blocks[block][begin : begin + nbytes - done]
            yield done, piece
            done += len(piece)


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage as uint8 [bytes], without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
