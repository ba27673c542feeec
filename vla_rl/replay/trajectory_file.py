"""Trajectories in one .npz file: the finished but untrained episodes of a checkpoint."""

import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.records import Array, EpisodeSpec, Record, Trajectory

_ARRAYS = tuple(f.name for f in fields(Trajectory) if f.type is Array)
_SCALARS = tuple(f.name for f in fields(Trajectory) if f.type not in (Array, Record, EpisodeSpec))
_RECORD = "record."
_DAMAGE = (  # what numpy, zipfile and ``_read`` raise for files that are missing or not as they were written
    *(OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)


def save_trajectories(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write trajectories to one .npz file."""
    arrays = {f"{i}.{name}": getattr(t, name) for i, t in enumerate(trajectories) for name in _ARRAYS}
    arrays |= {f"{i}.{_RECORD}{name}": array for i, t in enumerate(trajectories) for name, array in t.record.items()}
    headers = [
        {"episode": asdict(t.episode), "record": list(t.record)} | {name: getattr(t, name) for name in _SCALARS}
        for t in trajectories
    ]
    arrays["headers"] = np.frombuffer(json.dumps(headers).encode(), np.uint8)
    np.savez(path, **arrays)


def load_trajectories(path: Path) -> list[Trajectory]:
    """Read what ``save_trajectories`` wrote. Raises UserError if the file is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as data:
            return _read(data)
    except _DAMAGE as error:
        raise UserError(
            f"{path} is missing or damaged ({error}); resume an earlier checkpoint: RUN@ITERATION"
        ) from error


def _read(data: Any) -> list[Trajectory]:
    headers = json.loads(data["headers"].tobytes())
    return [
        Trajectory(
            episode=EpisodeSpec(**header.pop("episode")),
            record={name: data[f"{i}.{_RECORD}{name}"] for name in header.pop("record")},
            **header,
            **{name: data[f"{i}.{name}"] for name in _ARRAYS},
        )
        for i, header in enumerate(headers)
    ]
