"""The disks of a run's nodes. A checkpoint lies on the driver's disk; nodes that do not see it exchange files with it.

saving:   a process writes on its own node ──parts, through Ray──▶ the checkpoint
loading:  the checkpoint ──parts, through Ray──▶ a folder of the node, until all of it is loaded
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ray

from vla_rl.cluster.ray_session import RaySession
from vla_rl.core.errors import RunError
from vla_rl.core.files import measure_file, write_to_disk

_PART_BYTES = 16 << 20  # of one message


@dataclass(frozen=True, slots=True)
class Part:
    """What one process writes of a checkpoint."""

    written: ray.ObjectRef  # a ``Written``
    node: int
    folder: Path  # in which the process writes


class Disks:
    """Node 0 is the driver's. Every method raises ProcessDied if the node is lost."""

    def __init__(self, session: RaySession) -> None:
        self._session = session

    def place(self, folder: Path, node: int) -> Path:
        """Where processes of ``node`` write what belongs into ``folder``, which is new: there, if they see it."""
        return folder if self._sees(node, folder) else self._session.call(node, "new_place")

    def fetch(self, part: Part, files: Mapping[str, dict[str, int]], folder: Path) -> None:
        """Copy what ``part`` has written into ``folder``, unless it is there.

        ``files``: size and checksum of each, as ``measure_file`` gives them. Raises OSError if there is no room, and
        RunError if something else arrives than was written.
        """
        if part.folder == folder:
            return
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                while data := self._session.call(part.node, "read_part", part.folder / name, file.tell(), _PART_BYTES):
                    file.write(data)
            write_to_disk(path)
            if measure_file(path) != content:
                raise RunError(f"{path} is not what node {part.node} has written into {part.folder}")

    def send(self, folder: Path, node: int) -> Path:
        """Where processes of ``node`` read what is in ``folder``: there, if they see the same files, or a copy."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if all(self._sees(node, path) for path in files):
            return folder
        copy: Path = self._session.call(node, "new_place")
        for path in files:
            there = copy / path.relative_to(folder)
            self._session.call(node, "write_part", there, b"")
            with path.open("rb") as file:
                while data := file.read(_PART_BYTES):
                    self._session.call(node, "write_part", there, data)
        return copy

    def discard(self, place: Path, node: int) -> None:
        """Remove what ``place`` or ``send`` has made; a folder that the node shares with the driver stays."""
        if node:
            self._session.call(node, "discard", place)

    def _sees(self, node: int, path: Path) -> bool:
        return node == 0 or self._session.call(node, "stamp", path) == self._session.call(0, "stamp", path)
