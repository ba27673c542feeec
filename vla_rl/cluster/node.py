"""What the processes of a run share on one machine: a folder in its memory, and the locks of its devices.

The driver has one for its own machine; on every other node of a cluster a small process holds one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vla_rl.cluster.reaper import start_reaper
from vla_rl.core.devices.lock import DeviceLockServer
from vla_rl.core.ipc.mailbox import PoolAddress, create_pool
from vla_rl.core.ipc.shared_memory import shared_root
from vla_rl.core.records import EnvSpec

_PREFIX = "vla_rl-"
_REAPER_TIMEOUT_S = 60.0


def make_folder(root: Path) -> Path:
    """A new folder of this process, which ``sweep_leftovers`` finds once the process is dead."""
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))


def sweep_leftovers() -> None:
    """Remove shared memory and session folders of runs whose process is dead."""
    for root in {shared_root(), Path(tempfile.gettempdir())}:
        for folder in root.glob(f"{_PREFIX}*-*"):
            pid = folder.name.removeprefix(_PREFIX).split("-")[0]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(folder, ignore_errors=True)


class Node:
    """Lives as long as the run; ``close`` removes what it made, and a reaper does if this process is killed."""

    def __init__(self, *more: Path) -> None:
        """``more``: further folders that go when it closes."""
        sweep_leftovers()
        self.folder = make_folder(shared_root())
        self._reaper = start_reaper([self.folder, *more])
        try:
            self._locks = DeviceLockServer(lock_path(self.folder))
        except BaseException:
            self._clean_up()
            raise

    def where(self) -> Path:
        """The folder in shared memory."""
        return self.folder

    def create_pools(self, addresses: Sequence[PoolAddress], spec: EnvSpec, chunk_size: int) -> None:
        """The rows of the inference servers of this node."""
        for address in addresses:
            create_pool(address, spec, chunk_size)

    def lock_use(self) -> dict[str, dict[str, float]]:
        """Of every device that had turns (``DeviceUse``)."""
        return self._locks.use()

    def close(self) -> None:
        """End what is left of the run's processes here, and remove their files."""
        self._locks.stop()
        self._clean_up()

    def _clean_up(self) -> None:
        self._reaper.communicate(timeout=_REAPER_TIMEOUT_S)


def lock_path(folder: Path) -> Path:
    """Of the lock server's socket, in a node's folder."""
    return folder / "locks"
