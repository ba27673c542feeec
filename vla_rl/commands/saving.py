"""A checkpoint on its way: copied in memory at one moment, written by many processes, complete when all have ended."""

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from vla_rl.cluster.cluster import Cluster
from vla_rl.cluster.disks import Part
from vla_rl.commands.run_folder import RunFolder
from vla_rl.core.files import write_json


class Saving:
    """Between ``begin`` and ``complete``, training goes on."""

    def __init__(
        self,
        cluster: Cluster,
        stack: ExitStack,
        folder: Path,
        parts: list[Part],
        iteration: int,
        measured: dict[str, dict[str, int]],
        state: dict[str, Any],
    ) -> None:
        """``stack``: ends the checkpoint, with what is in ``measured`` then. ``state``: for state.json."""
        self.iteration, self._measured, self._state = iteration, measured, state
        self._cluster, self._stack, self._folder, self._parts = cluster, stack, folder, parts

    @classmethod
    def begin(
        cls, cluster: Cluster, run: RunFolder, iteration: int, about: dict[str, Any], state: dict[str, Any]
    ) -> Self:
        """Copy all state. ``about``: for the policy's own checkpoint; ``state``: for state.json.

        Raises OSError if the disk has no room.
        """
        with ExitStack() as stack:
            best = run.best_iteration() if run.config.train.keep_best else None
            measured: dict[str, dict[str, int]] = {}
            folder = stack.enter_context(run.checkpoints.write(iteration, best, measured))
            record, parts = cluster.snapshot(folder, about)
            for part in parts:
                stack.callback(cluster.disks.discard, part.folder, part.node)
            own = copy.deepcopy(state | {"store": record})
            return cls(cluster, stack.pop_all(), folder, parts, iteration, measured, own)
        raise AssertionError("unreachable")

    def is_written(self) -> bool:
        """Whether ``complete`` will not have to wait."""
        return self._cluster.has_answered([part.written for part in self._parts])

    def complete(self) -> None:
        """Wait until everything is written and here; the checkpoint is the newest then.

        Raises OSError if it was not possible, and RunError if a part arrived damaged from another node.
        """
        with self._stack:
            refs = [part.written for part in self._parts]
            done = self._cluster.get(refs, "a checkpoint", self._cluster.deadlines.checkpoint)
            if problems := [written.problem for written in done if written.problem]:
                raise OSError(problems[0])
            # only now: if this fails, nobody writes into the folder any more, and it can be removed
            write_json(self._folder / "state.json", self._state)
            for part, written in zip(self._parts, done, strict=True):
                self._cluster.disks.fetch(part, written.files, self._folder)
                self._measured |= written.files
