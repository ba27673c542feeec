"""Reads demonstrations from a LeRobot data set (``lerobot_format``), file by file, one episode at a time."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from envs.base.demonstration_records import Demonstration, DemonstrationError, Wanted
from envs.base.lerobot_format import (
    ACTIONS,
    INFO,
    OURS,
    STATES,
    SUCCESS,
    TASKS,
    VERSIONS,
    VIDEOS,
    is_lerobot_dataset,
    missing_packages,
    read_json,
)

__all__ = ["is_lerobot_dataset", "read_lerobot"]

_ROWS = 128  # of a data file, that are in memory at a time; they may hold images
_POINTER = b"version https://git-lfs"  # what a clone without Git LFS has in place of a file
_IMAGE_FILE = "images/{key}/episode_{episode:06d}/frame_{frame:06d}.png"  # of version 2, where tables hold no images


def read_lerobot(root: Path, wanted: Wanted) -> Iterator[Demonstration]:
    """All successful episodes of the wanted tasks; of data without ``next.success``, all.

    Raises DemonstrationError if the data set is of another version, incomplete, made for other observations or actions,
    has another convention of the gripper, or holds no such episode.
    """
    if missing := missing_packages():
        raise DemonstrationError(
            f"{root}: a LeRobot data set needs {', '.join(missing)}: pip install {' '.join(missing)}"
        )
    try:
        yield from _DataSet(root, wanted).demonstrations()
    except DemonstrationError:
        raise
    except (OSError, KeyError, ValueError, IndexError) as error:
        raise DemonstrationError(
            f"{root} cannot be read as a LeRobot data set ({type(error).__name__}: {error}): copy it again"
        ) from error


class _DataSet:
    """What the tables in ``meta`` say."""

    def __init__(self, root: Path, wanted: Wanted) -> None:
        self.root, self.wanted, self.info = root, wanted, read_json(root / INFO)
        version = str(self.info["codebase_version"])
        if version not in VERSIONS:
            raise DemonstrationError(
                f"{root} has LeRobot's format {version}, this reads {', '.join(VERSIONS)}: convert it with lerobot"
            )
        self.version, self.features = int(version[1]), dict(self.info["features"])
        self.action = self._feature(ACTIONS, "action")
        self.state = self._feature(STATES, "state") if wanted.proprio else ""
        self.cameras = wanted.cameras(root, self._named_cameras())
        wanted.rates.add(float(self.info["fps"]))
        self.tasks = self._tasks()
        if not any(task in wanted.tasks for task in self.tasks.values()):
            raise wanted.no_task(root, self.tasks.values())
        self.episodes = {int(row["episode_index"]): row for row in self._episode_rows()}

    def _named_cameras(self) -> list[str]:
        found = {name: f for name, f in self.features.items() if f["dtype"] in ("video", "image")}
        return [n for n, f in found.items() if "depth" not in n and not (f.get("info") or {}).get("is_depth_map")]

    def _feature(self, names: Sequence[str], what: str) -> str:
        found = next((name for name in names if name in self.features), "")
        if not found:
            raise DemonstrationError(
                f"{self.root} has no {what} ({' or '.join(names)}); its features are {sorted(self.features)}"
                + ("; set env.proprio=false" if what == "state" else "")
            )
        return found

    def _tasks(self) -> dict[int, str]:
        import pyarrow.parquet as pq

        if (file := self.root / "meta/tasks.jsonl").is_file():
            return {int(row["task_index"]): str(row["task"]) for row in _lines(file)}
        table = pq.read_table(_real(self.root / TASKS))
        (text,) = (name for name in table.column_names if name != "task_index")  # the index of a data frame
        return dict(zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True))

    def _episode_rows(self) -> Iterator[dict[str, Any]]:
        import pyarrow.parquet as pq

        if self.version == 2:
            yield from _lines(self.root / "meta/episodes.jsonl")
        for file in sorted((self.root / "meta/episodes").rglob("*.parquet")):
            names = [name for name in pq.read_schema(_real(file)).names if not name.startswith("stats/")]
            yield from pq.read_table(file, columns=names).to_pylist()

    def _place(self, row: Mapping[str, Any], group: str) -> dict[str, int]:
        """What the patterns of paths name, in either version."""
        number = int(row["episode_index"])
        place = {"episode_index": number, "episode_chunk": number // int(self.info.get("chunks_size", 1000))}
        return place | {name: int(row.get(f"{group}/{name}") or 0) for name in ("chunk_index", "file_index")}

    def demonstrations(self) -> Iterator[Demonstration]:
        wanted, raw, seen = self.wanted, list[np.ndarray](), set[int]()
        described = read_json(self.root / OURS).get("actions") if (self.root / OURS).is_file() else None
        grippers = wanted.grippers(self.root, described)
        files = dict.fromkeys(self.info["data_path"].format(**self._place(r, "data")) for r in self.episodes.values())
        for path in files:
            for number, table in _streamed(_real(self.root / path), self._columns(self.root / path)):
                row = self.episodes[number]
                if table.num_rows != row["length"] or number in seen:
                    raise DemonstrationError(
                        f"{self.root / path} has {table.num_rows} of {row['length']} frames of episode {number}: the "
                        "data set is not complete, copy it again"
                    )
                seen.add(number)
                task = self.tasks[table["task_index"][0].as_py()]
                if task in wanted.tasks and (SUCCESS not in table.column_names or any(table[SUCCESS].to_pylist())):
                    raw.append(_numbers(table, self.action))
                    yield self._demonstration(row, table, raw[-1], wanted.tasks[task], grippers)
        if missing := sorted(n for n in self.episodes.keys() - seen if self.episodes[n]["length"]):
            raise DemonstrationError(f"{self.root} has no data of episode {missing[0]}: copy it again")
        if empty := self.episodes.keys() - seen:
            wanted.note(f"{self.root.name}: {len(empty)} episodes without a step are left out")
        if not raw:
            raise DemonstrationError(f"{self.root} holds no successful episode of the tasks {list(wanted.tasks)}")
        if described is None:
            wanted.check_grippers(self.root, raw, grippers)

    def _columns(self, path: Path) -> list[str]:
        import pyarrow.parquet as pq

        needed = [self.action, "task_index", "episode_index", *([self.state] if self.wanted.proprio else [])]
        if any(self.features[key]["dtype"] == "video" for key in self.cameras):
            needed.append("timestamp")
        there = pq.read_schema(_real(path)).names
        return needed + [name for name in (SUCCESS, *self.cameras) if name in there]

    def _demonstration(
        self, row: Mapping[str, Any], table: Any, actions: np.ndarray, task: int, grippers: Mapping[int, Any]
    ) -> Demonstration:
        where = f"{self.root}, episode {row['episode_index']}"
        read = {"video": self._video, "image": self._pictures}
        frames = {key: read[self.features[key]["dtype"]](where, row, table, key) for key in self.cameras}
        turn = slice(None, None, -1 if self.wanted.conventions.rotated else 1)
        images = [self.wanted.frames(where, key, found[:, turn, turn]) for key, found in frames.items()]
        proprio = _numbers(table, self.state) if self.wanted.proprio else np.zeros((len(actions), 0), np.float32)
        return self.wanted.demonstration(where, images, proprio, actions, task, grippers)

    def _pictures(self, where: str, row: Mapping[str, Any], table: Any, key: str) -> np.ndarray:
        """uint8 [T, H, W, 3] of encoded images, in the table or in files."""
        number, frames = int(row["episode_index"]), []
        stored: list[dict[str, Any]] = [{}] * table.num_rows
        if key in table.column_names:
            stored = table[key].to_pylist()
        for frame, cell in enumerate(stored):
            file = self.root / (cell.get("path") or _IMAGE_FILE.format(key=key, episode=number, frame=frame))
            image = Image.open(io.BytesIO(cell["bytes"]) if cell.get("bytes") else _real(file))
            if image.mode not in ("RGB", "RGBA", "L", "P"):
                raise DemonstrationError(
                    f"{where}: {key} has images of mode {image.mode}, which is no colour: leave it out"
                )
            frames.append(np.asarray(image.convert("RGB")))
        return np.stack(frames)

    def _video(self, where: str, row: Mapping[str, Any], table: Any, key: str) -> np.ndarray:
        """uint8 [T, H, W, 3]: the frames at the episode's times, which begin at 0."""
        import av

        pattern = self.info.get("video_path") or VIDEOS[self.version]
        path = _real(self.root / pattern.format(video_key=key, **self._place(row, f"videos/{key}")))
        start, tolerance = float(row.get(f"videos/{key}/from_timestamp") or 0.0), 0.5 / float(self.info["fps"])
        wanted = start + np.asarray(table["timestamp"].to_pylist(), np.float64).ravel()
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


def _streamed(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Each episode of a data file, in whose rows episodes follow one another: its number and its rows, as a table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    held: list[Any] = []
    number = -1
    for batch in pq.ParquetFile(path).iter_batches(batch_size=_ROWS, columns=list(columns)):
        table = pa.Table.from_batches([batch])
        index = np.asarray(table["episode_index"].to_pylist()).ravel()
        for start, end in pairwise([0, *(np.flatnonzero(np.diff(index)) + 1).tolist(), len(index)]):
            if held and index[start] != number:
                yield number, pa.concat_tables(held)
                held = []
            number = int(index[start])
            held.append(table.slice(start, end - start))
    if held:
        yield number, pa.concat_tables(held)


def _numbers(table: Any, name: str) -> np.ndarray:
    """float64 [T, D] of a column."""
    values = np.asarray(table[name].to_pylist(), np.float64)
    return values.reshape(len(values), -1)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with _real(file).open() as lines:
        yield from map(json.loads, lines)


def _real(path: Path) -> Path:
    """The path of a file. Raises DemonstrationError if it is a pointer to one, OSError if it is missing."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise DemonstrationError(f"{path} is only a pointer of Git LFS: fetch the files themselves (git lfs pull)")
    return path
