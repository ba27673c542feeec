"""Reads demonstrations from a LeRobot data set (``lerobot_format``)."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs.base.demonstration_records import Demonstration, DemonstrationError, no_demonstration
from envs.base.lerobot_format import (
    ACTION,
    INFO,
    OURS,
    STATE,
    SUCCESS,
    TASKS,
    VERSION,
    camera_keys,
    is_lerobot_dataset,
    missing_packages,
    read_json,
)
from envs.base.vector_env import resized
from vla_rl.core.actions import ActionSpace

__all__ = ["is_lerobot_dataset", "read_lerobot"]

_NEAR = 0.1


def read_lerobot(
    root: Path, known: Mapping[str, int], views: Sequence[str], image_size: int, proprio: int, space: ActionSpace
) -> list[Demonstration]:
    """All successful episodes of the ``known`` instructions, whose task numbers it has; of data without
    ``next.success``, all.

    Raises DemonstrationError if the data set is of another version, incomplete, made for other observations, has
    another convention of the gripper, or holds no such episode.
    """
    if missing := missing_packages():
        raise DemonstrationError(
            f"{root}: a LeRobot data set needs {', '.join(missing)}: pip install {' '.join(missing)}"
        )
    try:
        return _read(root, known, views, image_size, proprio, space)
    except DemonstrationError:
        raise
    except (OSError, KeyError, ValueError, IndexError) as error:
        raise DemonstrationError(
            f"{root} cannot be read as a LeRobot data set ({type(error).__name__}: {error}): copy it again"
        ) from error


def _read(
    root: Path, known: Mapping[str, int], views: Sequence[str], image_size: int, proprio: int, space: ActionSpace
) -> list[Demonstration]:
    info = read_json(root / INFO)
    if info["codebase_version"] != VERSION:
        raise DemonstrationError(
            f"{root} has LeRobot's format {info['codebase_version']}, this reads {VERSION}: convert it with "
            "lerobot.scripts.convert_dataset_v21_to_v30"
        )
    cameras = _cameras(root, info, views)
    width = 0 if STATE not in info["features"] else info["features"][STATE]["shape"][0]
    if proprio not in (0, width):
        raise DemonstrationError(
            f"{root} has {STATE} of {width} numbers, the simulator {proprio}: it comes from another one, "
            "or set env.proprio=false"
        )
    instructions = _tasks(root)
    if not any(instruction in known for instruction in instructions.values()):
        raise no_demonstration(root, known, instructions.values())
    found, grippers = [], []
    columns = [ACTION, "task_index", "timestamp", *([STATE] if proprio else []), *_labels(info)]
    for episode, rows in _episodes(root, info, columns):
        instruction = instructions[int(rows["task_index"][0])]
        if instruction not in known or (SUCCESS in rows and not rows[SUCCESS][-1]):
            continue
        actions, count = rows[ACTION], len(rows[ACTION])
        images = [resized(_frames(root, info, episode, key, rows["timestamp"]), image_size) for key in cameras]
        seen = rows[STATE].astype(np.float32) if proprio else np.zeros((count, 0), np.float32)
        grippers.append(actions[:, list(space.grippers)])
        found.append(Demonstration(np.stack(images, axis=1), seen, space.from_data(actions), known[instruction]))
    if not found:
        raise DemonstrationError(f"{root} holds no successful episode of the tasks {list(known)}")
    if space.grippers and not (root / OURS).is_file():
        _check_gripper(root, np.concatenate(grippers))
    return found


def _check_gripper(root: Path, positions: np.ndarray) -> None:
    if 0 <= positions.min() < _NEAR and positions.max() > 1 - _NEAR:
        raise DemonstrationError(
            f"{root}: the last number of its actions goes from 0 to 1, so that it is no gripper in robosuite's "
            "convention (-1 = open .. 1 = closed): convert the data set"
        )


def _labels(info: Mapping[str, Any]) -> list[str]:
    return [SUCCESS] if SUCCESS in info["features"] else []


def _cameras(root: Path, info: Mapping[str, Any], views: Sequence[str]) -> list[str]:
    cameras = camera_keys(info["features"])
    if len(cameras) < len(views):
        raise DemonstrationError(
            f"{root} has the cameras {cameras} for the views {list(views)}: train without the others"
        )
    for key in cameras[: len(views)]:
        if info["features"][key]["dtype"] != "video":
            raise DemonstrationError(f"{root}: {key} is stored as single images; only videos are read: convert it")
    return cameras[: len(views)]


def _tasks(root: Path) -> dict[int, str]:
    import pyarrow.parquet as pq

    table = pq.read_table(root / TASKS)
    (text,) = (name for name in table.column_names if name != "task_index")  # the index of a data frame
    return dict(zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True))


def _episodes(
    root: Path, info: Mapping[str, Any], columns: Sequence[str]
) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Each episode's row of meta/episodes, and its frames as arrays by column."""
    import pyarrow.parquet as pq

    for file in sorted((root / "meta/episodes").rglob("*.parquet")):
        names = [name for name in pq.read_schema(file).names if not name.startswith("stats/")]
        for episode in pq.read_table(file, columns=names).to_pylist():
            path = info["data_path"].format(
                chunk_index=episode["data/chunk_index"], file_index=episode["data/file_index"]
            )
            table = pq.read_table(
                root / path, columns=list(columns), filters=[("episode_index", "==", episode["episode_index"])]
            )
            if table.num_rows != episode["length"]:
                raise DemonstrationError(
                    f"{root / path} has {table.num_rows} of {episode['length']} frames of episode "
                    f"{episode['episode_index']}: the data set is not complete, copy it again"
                )
            yield episode, {name: np.asarray(table[name].to_pylist()) for name in columns}


def _frames(
    root: Path, info: Mapping[str, Any], episode: Mapping[str, Any], key: str, timestamps: np.ndarray
) -> np.ndarray:
    """uint8 [T, H, W, 3]: the frames at the episode's times, which begin at 0."""
    import av

    path = root / info["video_path"].format(
        video_key=key,
        chunk_index=episode[f"videos/{key}/chunk_index"],
        file_index=episode[f"videos/{key}/file_index"],
    )
    start, tolerance = float(episode[f"videos/{key}/from_timestamp"]), 0.5 / float(info["fps"])
    wanted = start + timestamps.astype(np.float64)
    frames: list[np.ndarray] = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        base = float(stream.time_base or 0)
        container.seek(max(0, int(start / base)), stream=stream)  # the key frame before it
        for frame in container.decode(stream):
            if len(frames) == len(wanted):
                break
            if frame.pts is not None and frame.pts * base > wanted[len(frames)] - tolerance:
                frames.append(frame.to_ndarray(format="rgb24"))
    if len(frames) < len(wanted):
        raise DemonstrationError(f"{path} ends {len(wanted) - len(frames)} frames early: copy the data set again")
    return np.stack(frames)
