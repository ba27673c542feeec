"""Page-locked memory: what CUDA copies to and from without a staging copy, and without waiting.

Only where CUDA is in use: elsewhere nothing here does anything. Copies between devices and page-locked memory are
queued (``copy``), and ``finish`` waits for all of them.
"""

import logging
import weakref

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class PinnedCopies:
    """Copies between tensors of any device and one block of host memory, which is page-locked at the first of a GPU."""

    def __init__(self, host: Tensor) -> None:
        """``host``: uint8 [n], such as mapped shared memory; it must outlive this."""
        self._host = host
        self._asked = False
        self._devices = set[torch.device]()  # with copies under way

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start copying; one of them is a view of ``host``. What is not on a GPU is copied at once."""
        device = next((t.device for t in (target, source) if t.device.type == "cuda"), None)
        if device is not None:
            self._lock_pages()
            self._devices.add(device)
        target.copy_(source, non_blocking=device is not None)

    def finish(self) -> None:
        """Wait for the copies that were started."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._devices.clear()

    def _lock_pages(self) -> None:
        if self._asked:
            return
        self._asked = True
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(self._host.data_ptr(), self._host.numel(), 0))
        if code:  # such as a limit on locked memory: copies still work, through a staging buffer of the driver
            log.warning("%d bytes of shared memory cannot be page-locked (CUDA error %d)", self._host.numel(), code)
            return
        weakref.finalize(self, runtime.cudaHostUnregister, self._host.data_ptr())
