"""Writes episodes as a LeRobot data set (``lerobot_format``), from several processes, also if they are killed.

save_episode   one finished episode, as a folder of its own in FOLDER/pending: complete or absent
add_pending    moves what is pending into the data set: renumbers, writes tables and statistics

Each episode has a video file of its own for each camera, so that none is ever encoded twice. ``meta/vla_rl.json`` is
written last and lists the episodes that the data set holds: what a killed process has begun to add is added again.
"""

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envs.base.lerobot_format import (
    ACTION,
    DATA,
    DONE,
    EPISODES,
    INFO,
    OURS,
    REWARD,
    STATE,
    STATS,
    SUCCESS,
    TASKS,
    VERSION,
    VIDEO,
    VIEW_KEYS,
    read_json,
)
from envs.base.lerobot_statistics import image_statistics, merged_statistics, statistics
from vla_rl.core.actions import ActionSpace
from vla_rl.core.errors import UserError
from vla_rl.core.file_lock import FileLock
from vla_rl.core.files import replacing, write_json
from vla_rl.core.records import EnvSpec

_PENDING = "pending"
_FILES_PER_CHUNK = 1000
_LOCK_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class EpisodeData:
    """One episode of T control steps, as the environment has them."""

    instruction: str
    images: np.ndarray  # uint8 [T, V, H, W, 3], seen before each action
    proprio: np.ndarray  # float32 [T, P]
    actions: np.ndarray  # float32 [T, A], executed
    rewards: np.ndarray  # float32 [T]
    success: bool


def save_episode(root: Path, episode: EpisodeData, spec: EnvSpec) -> None:
    """Keep a finished episode of the environment until ``add_pending``. Raises OSError if the disk fails."""
    columns = _columns(episode, spec.actions)
    cameras = VIEW_KEYS[: episode.images.shape[1]]
    stats = {name: statistics(values) for name, values in columns.items()}
    stats |= {key: image_statistics(episode.images[:, view]) for view, key in enumerate(cameras)}
    about = {"instruction": episode.instruction, "length": len(episode.actions), "stats": stats}
    with replacing(root / _PENDING / f"{time.time_ns():020d}-{os.getpid()}") as partial:
        partial.mkdir()
        np.savez(partial / "frames.npz", **columns)  # type: ignore[arg-type]
        for view, key in enumerate(cameras):
            _write_video(partial / f"{key}.mp4", episode.images[:, view], spec.fps)
        (partial / "episode.json").write_text(json.dumps(about))


def _columns(episode: EpisodeData, space: ActionSpace) -> dict[str, np.ndarray]:
    last = np.zeros(len(episode.actions), bool)
    last[-1] = True
    state = {STATE: episode.proprio.astype(np.float32)} if episode.proprio.shape[1] else {}
    return state | {
        ACTION: space.to_data(episode.actions).astype(np.float32),
        REWARD: episode.rewards.astype(np.float32),
        DONE: last,
        SUCCESS: last & episode.success,
    }


def _write_video(path: Path, frames: np.ndarray, fps: int) -> None:
    """H.264 with a key frame at every second frame, so that any frame is found quickly; as LeRobot's encoder does."""
    import av

    with av.open(str(path), "w", format="mp4") as container:
        options = {"g": "2", "crf": "18", "preset": "veryfast"}
        stream = container.add_stream("libx264", rate=fps, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p" if all(side % 2 == 0 for side in frames.shape[1:3]) else "yuv444p"
        stream.thread_count = 1  # of many processes
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")))
        container.mux(stream.encode())


def add_pending(root: Path, spec: EnvSpec) -> int:
    """Move all pending episodes into the data set; returns how many it then holds. A folder without any stays as it is.

    Raises UserError if another process adds to it for a minute, or if it was made for other observations.
    """
    if not (root / _PENDING).is_dir():
        return 0
    lock = _wait_for_lock(root / "lock")
    try:
        ledger: dict[str, Any] = {"episodes": [], "frames": 0, "additions": 0}
        if (root / OURS).is_file():
            ledger = read_json(root / OURS)
        held = ledger["episodes"]
        folders = sorted(path for path in (root / _PENDING).iterdir() if path.name[0] != ".")
        new = [path for path in folders if path.name not in held]
        if new:
            _add(root, ledger, new, spec)
        for path in folders:
            shutil.rmtree(path)
        return len(held) + len(new)
    finally:
        lock.release()


def check_dataset(root: Path, spec: EnvSpec) -> None:
    """Raises UserError if the data set holds episodes of other observations or actions than the environment's."""
    if (root / INFO).is_file():
        held = read_json(root / INFO)
        _require_alike(root, held["features"] | {"fps": {"shape": held["fps"]}}, spec)


def _require_alike(root: Path, held: Mapping[str, Any], spec: EnvSpec) -> None:
    wanted = _features(spec) | {"fps": {"shape": spec.fps}}
    shapes = [{name: feature["shape"] for name, feature in of.items()} for of in (wanted, held)]
    if other := sorted(n for n in wanted.keys() | held.keys() if shapes[0].get(n) != shapes[1].get(n)):
        raise UserError(
            f"{root} holds episodes of other observations or actions: write to another folder ({', '.join(other)})"
        )


def _wait_for_lock(path: Path) -> FileLock:
    deadline = time.monotonic() + _LOCK_WAIT_S
    while (lock := FileLock.acquire(path)) is None:
        if time.monotonic() > deadline:
            raise UserError(f"{path.parent} is in use by {path.read_text()}; wait for its end, or write elsewhere")
        time.sleep(0.1)
    return lock


def _add(root: Path, ledger: Mapping[str, Any], new: Sequence[Path], spec: EnvSpec) -> None:
    cameras = VIEW_KEYS[: len(spec.views)]
    check_dataset(root, spec)
    episodes = [read_json(path / "episode.json") for path in new]
    features = _features(spec)
    for path in new:
        with np.load(path / "frames.npz") as frames:
            stored = {name: {"shape": list(frames[name].shape[1:]) or [1]} for name in frames.files}
        _require_alike(path, features | {"fps": {"shape": spec.fps}} | stored, spec)
    tasks = _read_tasks(root)
    for episode in episodes:
        tasks.setdefault(episode["instruction"], len(tasks))
    additions = int(ledger["additions"])
    rows = _episode_rows(episodes, cameras, len(ledger["episodes"]), ledger["frames"], additions, spec.fps)
    for path, row in zip(new, rows, strict=True):
        for key in cameras:
            place = root / VIDEO.format(video_key=key, **_place(row["episode_index"]))
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path / f"{key}.mp4", place)
    numbers = [tasks[episode["instruction"]] for episode in episodes]
    _write_data(root / DATA.format(**_place(additions)), new, rows, numbers, spec.fps)
    _write_table(root / EPISODES.format(**_place(additions)), _table_of_episodes(rows))
    _write_table(root / TASKS, _table_of_tasks(tasks))
    write_json(root / STATS, merged_statistics(root, features))
    total = rows[-1]["episode_index"] + 1
    info = {
        "codebase_version": VERSION,
        "robot_type": spec.robot,
        "total_episodes": total,
        "total_frames": rows[-1]["dataset_to_index"],
        "total_tasks": len(tasks),
        "chunks_size": _FILES_PER_CHUNK,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": spec.fps,
        "splits": {"train": f"0:{total}"},
        "data_path": DATA,
        "video_path": VIDEO,
        "features": features,
    }
    write_json(root / INFO, info)
    held = [*ledger["episodes"], *(path.name for path in new)]
    count = {"frames": info["total_frames"], "additions": additions + 1}
    write_json(root / OURS, {"episodes": held, "actions": spec.actions.described()} | count)


def _place(number: int) -> dict[str, int]:
    chunk, file = divmod(number, _FILES_PER_CHUNK)
    return {"chunk_index": chunk, "file_index": file}


def _features(spec: EnvSpec) -> dict[str, Any]:
    """What info.json says of the episodes of an environment."""
    zeros = np.zeros((1, spec.proprio_dim)), np.zeros((1, spec.action_dim)), np.zeros(1)
    columns = _columns(EpisodeData("", np.zeros(0), *zeros, success=False), spec.actions)
    image_size = spec.image_size
    video = {
        "dtype": "video",
        "shape": [image_size, image_size, 3],
        "names": ["height", "width", "channels"],
        "info": {
            "video.height": image_size,
            "video.width": image_size,
            "video.codec": "h264",
            "video.pix_fmt": "yuv420p" if image_size % 2 == 0 else "yuv444p",
            "video.is_depth_map": False,
            "video.fps": spec.fps,
            "video.channels": 3,
            "has_audio": False,
        },
    }
    features: dict[str, Any] = dict.fromkeys(VIEW_KEYS[: len(spec.views)], video)
    for name, values in columns.items():
        features[name] = {"dtype": str(values.dtype), "shape": list(values.shape[1:]) or [1], "names": None}
    features[ACTION]["names"] = list(spec.actions.names)
    for name in ("timestamp", "frame_index", "episode_index", "index", "task_index"):
        dtype = "float32" if name == "timestamp" else "int64"
        features[name] = {"dtype": dtype, "shape": [1], "names": None}
    return features


def _episode_rows(
    episodes: Sequence[Mapping[str, Any]], cameras: Sequence[str], number: int, frame: int, additions: int, fps: int
) -> list[dict[str, Any]]:
    """The rows of meta/episodes. ``number``, ``frame``: of the first episode."""
    rows = []
    for index, episode in enumerate(episodes, number):
        length = int(episode["length"])
        row: dict[str, Any] = {"episode_index": index, "tasks": [episode["instruction"]], "length": length}
        row |= {f"data/{name}": value for name, value in _place(additions).items()}
        row |= {"dataset_from_index": frame, "dataset_to_index": frame + length}
        for key in cameras:
            row |= {f"videos/{key}/{name}": value for name, value in _place(index).items()}
            row |= {f"videos/{key}/from_timestamp": 0.0, f"videos/{key}/to_timestamp": length / fps}
        row |= {f"stats/{key}/{name}": v for key, stats in episode["stats"].items() for name, v in stats.items()}
        row |= {f"meta/episodes/{name}": value for name, value in _place(additions).items()}
        rows.append(row)
        frame += length
    return rows


def _write_data(
    path: Path, new: Sequence[Path], rows: Sequence[Mapping[str, Any]], tasks: Sequence[int], fps: int
) -> None:
    """A row per frame, and a row group per episode."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        writer = None
        for folder, row, task in zip(new, rows, tasks, strict=True):
            length, start = row["length"], row["dataset_from_index"]
            with np.load(folder / "frames.npz") as frames:
                columns = {name: _arrow(frames[name]) for name in frames.files}
            columns["timestamp"] = pa.array((np.arange(length) / fps).astype(np.float32))
            columns["frame_index"] = pa.array(np.arange(length))
            columns["episode_index"] = pa.array(np.full(length, row["episode_index"]))
            columns["index"] = pa.array(np.arange(start, start + length))
            columns["task_index"] = pa.array(np.full(length, task))
            table = pa.table(columns)
            writer = writer or pq.ParquetWriter(partial, table.schema)
            writer.write_table(table)
        if writer is not None:
            writer.close()


def _arrow(values: np.ndarray) -> Any:
    import pyarrow as pa

    if values.ndim == 1:
        return pa.array(values)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])


def _table_of_episodes(rows: Sequence[Mapping[str, Any]]) -> Any:
    import pyarrow as pa

    return pa.table({name: pa.array([row[name] for row in rows]) for name in rows[0]})


def _table_of_tasks(tasks: Mapping[str, int]) -> Any:
    """LeRobot reads it as a data frame whose index is the text: its metadata says so, in the way of pandas."""
    import pyarrow as pa

    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    about = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
    table = pa.table({"task_index": list(tasks.values()), "task": list(tasks)})
    return table.replace_schema_metadata({"pandas": json.dumps(about)})


def _write_table(path: Path, table: Any) -> None:
    import pyarrow.parquet as pq

    with replacing(path) as partial:
        pq.write_table(table, partial)


def _read_tasks(root: Path) -> dict[str, int]:
    import pyarrow.parquet as pq

    if not (root / INFO).is_file():
        return {}
    table = pq.read_table(root / TASKS)
    return dict(zip(table["task"].to_pylist(), table["task_index"].to_pylist(), strict=True))
