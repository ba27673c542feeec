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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.errors import UserError
from vla_rl.types import Episode, Trajectory

_PARTIAL = ".partial"
_ARRAYS = tuple(f.name for f in fields(Trajectory) if f.type == "Array")
_SCALARS = tuple(f.name for f in fields(Trajectory) if f.type != "Array" and f.name != "episode")


def save_trajectories(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write trajectories to one .npz file."""
    arrays = {f"{i}.{name}": getattr(t, name) for i, t in enumerate(trajectories) for name in _ARRAYS}
    records = [{"episode": asdict(t.episode)} | {name: getattr(t, name) for name in _SCALARS} for t in trajectories]
    arrays["records"] = np.frombuffer(json.dumps(records).encode(), np.uint8)
    np.savez(path, **arrays)


def load_trajectories(path: Path) -> list[Trajectory]:
    """Read what ``save_trajectories`` wrote."""
    with np.load(path, allow_pickle=False) as data:
        records = json.loads(data["records"].tobytes())
        return [
            Trajectory(
                episode=Episode(**record.pop("episode")), **record, **{name: data[f"{i}.{name}"] for name in _ARRAYS}
            )
            for i, record in enumerate(records)
        ]


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
