"""LeRobot's data sets: the names and files that reader and writer share. What is written is version 3.

    meta/info.json                      features with dtype and shape, fps, totals, patterns of paths
    meta/tasks.parquet                  instructions, and their numbers
    meta/episodes/chunk-*/file-*.parquet  a row per episode: length, tasks, files and times of its data, statistics
    meta/stats.json                     statistics of every feature
    data/chunk-*/file-*.parquet         a row per frame: state, action, reward, ..., without images
    videos/CAMERA/chunk-*/file-*.mp4    frames, of one or several episodes a file

Conventions of LeRobot's LIBERO data: upright images, ``observation.images.image`` and ``image2`` (the wrist), the state
of 8 numbers, actions with the gripper -1 = open .. 1 = closed.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

VERSION = "v3.0"
VERSIONS = ("v2.0", "v2.1", VERSION)  # that are read; in version 2, each episode has a file of its own
INFO = "meta/info.json"
TASKS = "meta/tasks.parquet"
STATS = "meta/stats.json"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
VIDEOS = {2: "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4", 3: VIDEO}
STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
STATES, ACTIONS = (STATE, "state"), (ACTION, "actions")  # and as openpi names them
REWARD, DONE, SUCCESS = "next.reward", "next.done", "next.success"
VIEW_KEYS = (f"{IMAGES}image", f"{IMAGES}image2")  # the main view, the wrist's
OURS = "meta/vla_rl.json"  # what only this project's writer knows
_PACKAGES = ("av", "pyarrow")


def is_lerobot_dataset(path: Path) -> bool:
    """Whether this is the folder of a data set, of whatever version."""
    return (path / INFO).is_file()


def missing_packages() -> list[str]:
    """Those of the two libraries that reader and writer need which are not installed."""
    return [name for name in _PACKAGES if importlib.util.find_spec(name) is None]


def read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))
