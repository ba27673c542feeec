"""Files that are written later, as they would be now: a checkpoint is a copy in memory first.

    with postponed() as writes:     copies are made here
        save(...)
    writes.run()                    while training goes on

Outside of the block everything is written at once.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from vla_rl.core.files import measure_file, write_to_disk


@dataclass(frozen=True, slots=True)
class Written:
    """What became of some writes."""

    files: Mapping[str, dict[str, int]] = field(default_factory=dict)  # relative to the checkpoint; ``measure_file``
    problem: str | None = None  # such as a full disk


@dataclass(slots=True)
class Writes:
    """Writes in the order in which they were asked for."""

    _waiting: list[tuple[Path, Callable[[], object]]] = field(default_factory=list)

    def add(self, path: Path, write: Callable[[], object]) -> None:
        self._waiting.append((path, write))

    def run(self, folder: Path) -> Written:
        """Write everything, up to the disk, and forget it. ``folder``: of the checkpoint."""
        waiting, self._waiting = self._waiting, []
        try:
            for path, write in waiting:
                write()
                write_to_disk(path)
        except Exception as error:  # libraries raise many kinds for a full disk
            return Written(problem=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        found = [path for top, _ in waiting for path in ([top] if top.is_file() else top.rglob("*")) if path.is_file()]
        return Written({str(path.relative_to(folder)): measure_file(path) for path in found})


_current: ContextVar[Writes | None] = ContextVar("writes", default=None)


@contextmanager
def postponed() -> Iterator[Writes]:
    """Within the block, ``write`` only takes note."""
    writes = Writes()
    token = _current.set(writes)
    try:
        yield writes
    finally:
        _current.reset(token)


def are_postponed() -> bool:
    """Whether what is to be written has to be copied, since it will have changed by then."""
    return _current.get() is not None


def write(path: Path, action: Callable[[], object]) -> None:
    """Write the file or folder ``path`` by ``action``, now or later."""
    writes = _current.get()
    if writes is None:
        action()
    else:
        writes.add(path, action)
