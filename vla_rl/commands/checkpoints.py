"""Checkpoints of a run: folders that are complete or absent.

checkpoints/
    000040/
        policy/            the policy alone, for `vla-rl eval` and for another run's policy.checkpoint
        learner/           DeepSpeed's state: trained weights, optimizer, shards of every rank
        trajectories.npz   finished episodes that are still to be trained
        state.json         counters, versions, time spent
    after-000020/          later ones, which were set aside when the run was resumed at that iteration
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vla_rl.core.errors import UserError
from vla_rl.core.files import new_folder, replacing

_STATE = frozenset({"policy_version", "seconds", "store"})


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    @contextmanager
    def write(self, iteration: int, best: int | None = None) -> Iterator[Path]:
        """A folder to fill; it becomes the newest checkpoint when the block ends without an error.

        Older checkpoints are then deleted, except that of the iteration ``best``.
        """
        with replacing(self.folder / f"{iteration:06d}") as partial:
            partial.mkdir()
            yield partial
        for old in self.complete()[: -self._keep]:
            if int(old.name) != best:
                shutil.rmtree(old)

    def set_aside_after(self, iteration: int) -> None:
        """Move later checkpoints to ``after-ITERATION/``: the run continues from an earlier one."""
        if later := [path for path in self.complete() if int(path.name) > iteration]:
            aside = new_folder(self.folder, f"after-{iteration:06d}")
            for path in later:
                path.rename(aside / path.name)

    def complete(self) -> list[Path]:
        """All complete checkpoints, oldest first."""
        return sorted(p for p in self.folder.glob("[0-9]*") if p.is_dir())

    def of(self, iteration: int) -> Path:
        """Raises UserError if the iteration has no complete checkpoint."""
        path = self.folder / f"{iteration:06d}"
        if path not in self.complete():
            there = ", ".join(str(int(p.name)) for p in self.complete()) or "none"
            raise UserError(f"{self.folder}: no complete checkpoint of iteration {iteration}; there are: {there}")
        return path

    def newest(self) -> Path:
        """Raises UserError if the run has no checkpoint."""
        complete = self.complete()
        if not complete:
            raise UserError(f"{self.folder}: no complete checkpoint to continue from; start a new run instead")
        return complete[-1]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint. Raises UserError if it is missing or damaged."""
    path = checkpoint / "state.json"
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); resume an earlier checkpoint: RUN@ITERATION") from error
    missing = _STATE - state.keys() if isinstance(state, dict) else _STATE
    if missing:
        raise UserError(
            f"{path}: {', '.join(sorted(missing))} is missing, the file is damaged; resume an earlier checkpoint: "
            "RUN@ITERATION"
        )
    return state
