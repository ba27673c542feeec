"""Checkpoints of a run: complete folders, or none.

    checkpoints/000040/
        policy/            the policy alone: what `vla-rl eval` and a later run's policy.checkpoint read
        learner/           DeepSpeed's state: weights that train, optimizer, shards of every rank
        trajectories.npz   episodes that were finished but not yet trained
        state.json         counters, versions, time spent

A checkpoint is written under another name and renamed when it is complete, so a crash in between leaves the one before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vla_rl.core.errors import UserError

_PARTIAL = ".partial"


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    @contextmanager
    def write(self, iteration: int) -> Iterator[Path]:
        """A folder to fill; it becomes the newest checkpoint when the block ends without an error."""
        final = self.folder / f"{iteration:06d}"
        partial = final.with_name(final.name + _PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in self.complete()[: -self._keep]:
            shutil.rmtree(old)

    def complete(self) -> list[Path]:
        """All complete checkpoints, oldest first."""
        return sorted(p for p in self.folder.glob("[0-9]*") if not p.name.endswith(_PARTIAL) and p.is_dir())

    def newest(self) -> Path:
        """Raises UserError where the run has no checkpoint."""
        complete = self.complete()
        if not complete:
            raise UserError(f"{self.folder}: no complete checkpoint to continue from; start a new run instead")
        return complete[-1]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint. Raises UserError where it is missing or not JSON."""
    path = checkpoint / "state.json"
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); choose an earlier checkpoint of the run") from error
