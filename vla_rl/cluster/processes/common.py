"""What all processes share: time limits, and the lease of the device that a process computes on."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

from vla_rl.core.devices.lock import DeviceLease, DeviceLock
from vla_rl.placement.plan import Process

CALL_TIMEOUT_S = 60.0  # a call that only reads or writes state
LEASE_TIMEOUT_S = 600.0  # longer than any micro-batch


def device_lease(process: Process, lock_server: Path) -> DeviceLease:
    """Lease a shared device through the lock server; on a device of its own, a process computes at any time."""
    if process.lock is None:
        return nullcontext
    lock = DeviceLock(lock_server, process.lock, f"{process.role} {process.index}")
    return partial(lock.lease, LEASE_TIMEOUT_S)
