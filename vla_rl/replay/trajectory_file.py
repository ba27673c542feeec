"""Trajectories in one .npz file: the finished but untrained episodes of a checkpoint."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

from vla_rl.core.records import Array, EpisodeSpec, Trajectory

_ARRAYS = tuple(f.name for f in fields(Trajectory) if f.type is Array)
_SCALARS = tuple(f.name for f in fields(Trajectory) if f.type is not Array and f.name != "episode")


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
                episode=EpisodeSpec(**record.pop("episode")),
                **record,
                **{name: data[f"{i}.{name}"] for name in _ARRAYS},
            )
            for i, record in enumerate(records)
        ]
