"""What the processes of a run share on one machine: a folder in shared memory, and the lock server of its devices.

The driver holds the ``Node`` of its own machine; on every other node of a cluster a small process holds one.
"""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vla_rl.cluster.held_folder import HeldFolder, sweep_leftovers
from vla_rl.cluster.processes.pulse import Pulses
from vla_rl.cluster.reaper import start_reaper
from vla_rl.core.devices.lock import DeviceLockServer
from vla_rl.core.gpus import Gpu
from vla_rl.core.ipc.mailbox import PoolAddress, create_pool
from vla_rl.core.ipc.shared_memory import shared_root
from vla_rl.core.machine import CODE, Machine, code_version
from vla_rl.core.records import EnvSpec, PolicySpec

_REAPER_TIMEOUT_S = 60.0


class Node:
    """Lives as long as the run. ``close`` removes its files; a reaper does that if this process is killed."""

    def __init__(self, *more: HeldFolder) -> None:
        """``more``: further folders to remove at the end."""
        sweep_leftovers()
        shared = HeldFolder(shared_root())
        self.folder = shared.path
        self._current = shared.path
        self._pulses: Pulses
        self._held = [shared, *more]
        self._places: dict[Path, HeldFolder] = {}
        self._reaper = start_reaper([held.path for held in self._held])
        try:
            self._locks = DeviceLockServer(lock_server_path(self.folder))
        except BaseException:
            self._clean_up()
            raise

    def get_folder(self) -> Path:
        """The folder in shared memory (a method, since this class is also a Ray actor)."""
        return self.folder

    def begin(self) -> Path:
        """A new folder in shared memory for what processes share from now on; what was before is removed."""
        self._discard_all()
        last, number = self._current, int(self._current.name) + 1 if self._current != self.folder else 1
        self._current = self.folder / str(number)
        self._current.mkdir()
        if last != self.folder:
            shutil.rmtree(last, ignore_errors=True)
        return self._current

    def get_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that this node offers to the run; each node has its own CUDA_VISIBLE_DEVICES."""
        return Machine.detect().gpus

    def get_code(self) -> tuple[str, Path]:
        """The version of the source files that this process has imported, and where they are."""
        return code_version(), CODE

    def stamp(self, path: Path) -> tuple[int, int] | None:
        """Size and time of a file, or zeros of a folder, on this node's disk; None if it is not there."""
        if path.is_dir():
            return 0, 0
        return (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else None

    def new_place(self) -> Path:
        """A new folder below this node's ``TMPDIR``, until ``discard`` or ``begin``."""
        held = HeldFolder(Path(tempfile.gettempdir()))
        self._places[held.path] = held
        return held.path

    def read_part(self, path: Path, start: int, count: int) -> bytes:
        """So many bytes of a file from ``start`` on; fewer at its end."""
        with path.open("rb") as file:
            file.seek(start)
            return file.read(count)

    def write_part(self, path: Path, data: bytes) -> None:
        """Append to a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)

    def discard(self, place: Path) -> None:
        """Remove a folder of ``new_place``; others stay."""
        if (held := self._places.pop(place, None)) is not None:
            shutil.rmtree(place, ignore_errors=True)
            held.release()

    def create_pools(self, addresses: Sequence[PoolAddress], spec: EnvSpec, policy: PolicySpec) -> None:
        """Allocate the rows of this node's inference servers."""
        for address in addresses:
            create_pool(address, spec, policy)

    def create_pulses(self, count: int) -> Path:
        """Let so many processes of this node show their progress; returns where."""
        path = self._current / "pulses"
        self._pulses = Pulses.create(path, count)
        return path

    def kill_overdue(self) -> dict[int, float]:
        """See ``Pulses``."""
        return self._pulses.kill_overdue()

    def lock_use(self) -> dict[str, dict[str, float]]:
        """Totals of every device that was leased (``DeviceUse``)."""
        return self._locks.use()

    def close(self) -> None:
        """End the remaining processes of the run on this node, and remove their files."""
        self._locks.stop()
        self._discard_all()
        self._clean_up()

    def _discard_all(self) -> None:
        for place in list(self._places):
            self.discard(place)

    def _clean_up(self) -> None:
        self._reaper.communicate(timeout=_REAPER_TIMEOUT_S)
        for held in self._held:
            held.release()


def lock_server_path(folder: Path) -> Path:
    """The lock server's socket in a node's folder."""
    return folder / "locks"
