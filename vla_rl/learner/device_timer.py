"""How long a device computes, measured without waiting for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vla_rl.observability.meter import Meter


class DeviceTimer:
    """Times calls into a meter: on a GPU with events in its stream, elsewhere with the clock."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self._device, self._meter = device, meter
        self._calls: list[tuple[str, float, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def time(self, activity: str, size: float) -> Iterator[None]:
        """Time the block; on a GPU the work that it submits, which reaches the meter with ``read``."""
        if self._device.type != "cuda":
            with self._meter.time(activity, size):
                yield
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start = time.perf_counter_ns()
        first.record()
        with self._meter.shown(activity):
            yield
        last.record()
        if self._meter.spans is not None:  # when the work was submitted
            self._meter.spans.add(activity, start, time.perf_counter_ns() - start, size)
        self._calls.append((activity, size, first, last))

    def read(self) -> None:
        """Wait until the device has finished the timed work, and add it to the meter."""
        for activity, size, first, last in self._calls:
            last.synchronize()
            self._meter.add(activity, first.elapsed_time(last) * 1e-3, size)
        self._calls.clear()
