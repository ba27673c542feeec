"""Data sets as people share them: taken rightly, or refused with the file, the episode and the remedy."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from envs.base.config import DemosConfig
from envs.base.demonstration_records import DemonstrationError, Demonstrations
from envs.base.demonstrations import read_demonstrations
from envs.base.lerobot_writer import EpisodeData, add_pending, check_dataset, save_episode
from envs.tabletop.config import TabletopConfig
from envs.tabletop.env import env_spec
from vla_rl.commands.cli import main
from vla_rl.config.run_config import RunConfig
from vla_rl.core.actions import ActionSpace
from vla_rl.core.errors import UserError

TASK = "reach the red square"
SIZE, STEPS, FPS = 32, 6, 10
CAMERA = "observation.images.image"
V2 = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
V2_VIDEO = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
V3 = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
V3_VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


def picture(episode: int, step: int, camera: str) -> np.ndarray:
    """Its red tells the episode, its blue the step, its green the camera."""
    image = np.zeros((SIZE, SIZE, 3), np.uint8)
    image[:] = 40 * (episode % 5) + 20, 7 * len(camera), 30 * step
    return image


def write_video(path: Path, frames: Sequence[np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = SIZE, SIZE, "yuv444p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def encoded(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def actions_of(episode: int, width: int, gripper: tuple[float, float]) -> np.ndarray:
    actions = np.random.default_rng(episode).uniform(-1, 1, (STEPS, width))
    actions[:, -1] = [gripper[step % 2] for step in range(STEPS)]
    return actions


def write_lerobot(
    root: Path,
    *,
    version: str = "v3.0",
    stored: str = "video",  # or table, files
    cameras: Sequence[str] = (CAMERA,),
    names: tuple[str, str] = ("action", "observation.state"),
    episodes: int = 2,
    width: int = 7,
    gripper: tuple[float, float] = (-1.0, 1.0),
    episodes_per_file: tuple[int, int] = (1000, 1000),  # of data, of videos
    tasks_as_lines: bool = False,
    missing: Sequence[str] = (),  # of info.json
    nan_in: int = -1,
    success: Callable[[int, int], bool] | None = None,
) -> Path:
    """A data set of version 2 or 3, as LeRobot or somebody else may have written it."""
    (root / "meta").mkdir(parents=True)
    two, (action, state) = version.startswith("v2"), names
    tables: dict[str, list[pa.Table]] = {}
    videos: dict[str, list[np.ndarray]] = {}
    about = []
    for episode in range(episodes):
        chosen = actions_of(episode, width, gripper)
        if episode == nan_in:
            chosen[2, 0] = np.nan
        frames = {camera: [picture(episode, step, camera) for step in range(STEPS)] for camera in cameras}
        columns: dict[str, Any] = {
            action: chosen.tolist(),
            state: np.full((STEPS, 8), episode, np.float32).tolist(),
            "timestamp": (np.arange(STEPS) / FPS).tolist(),
            "episode_index": [episode] * STEPS,
            "task_index": [0] * STEPS,
        }
        if success is not None:
            columns["next.success"] = [success(episode, step) for step in range(STEPS)]
        row: dict[str, Any] = {"episode_index": episode, "tasks": [TASK], "length": STEPS}
        place = {"episode_index": episode, "episode_chunk": 0, "chunk_index": 0}
        data_file, video_file = (episode // count for count in episodes_per_file)
        row |= {} if two else {"data/chunk_index": 0, "data/file_index": data_file}
        for camera, images in frames.items():
            if stored == "table":
                columns[camera] = [{"bytes": encoded(image), "path": None} for image in images]
            elif stored == "files":
                for step, image in enumerate(images):
                    file = root / f"images/{camera}/episode_{episode:06d}/frame_{step:06d}.png"
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(encoded(image))
            else:
                pattern = V2_VIDEO if two else V3_VIDEO
                path = pattern.format(video_key=camera, file_index=video_file, **place)
                start = len(videos.setdefault(path, [])) / FPS
                videos[path] += images
                row |= {f"videos/{camera}/{n}": v for n, v in (("chunk_index", 0), ("file_index", video_file))}
                row |= {f"videos/{camera}/from_timestamp": start}
        about.append({k: v for k, v in row.items() if not two or "/" not in k})
        path = (V2 if two else V3).format(file_index=data_file, **place)
        tables.setdefault(path, []).append(pa.table(columns))
    for path, parts in tables.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.concat_tables(parts), root / path)
    for path, images in videos.items():
        write_video(root / path, images)
    dtype = "video" if stored == "video" else "image"
    features: dict[str, Any] = {c: {"dtype": dtype, "shape": [SIZE, SIZE, 3], "names": None} for c in cameras}
    features |= {action: {"dtype": "float32", "shape": [width], "names": None}}
    features |= {state: {"dtype": "float32", "shape": [8], "names": None}}
    info = {"codebase_version": version, "fps": FPS, "features": features, "data_path": V2 if two else V3}
    info |= {"video_path": V2_VIDEO if two else V3_VIDEO, "chunks_size": 1000}
    (root / "meta/info.json").write_text(json.dumps({k: v for k, v in info.items() if k not in missing}))
    if two or tasks_as_lines:
        (root / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": TASK}) + "\n")
    else:
        pq.write_table(pa.table({"task_index": [0], "__index_level_0__": [TASK]}), root / "meta/tasks.parquet")
    if two:
        (root / "meta/episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in about))
    else:
        (root / "meta/episodes/chunk-000").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(about), root / "meta/episodes/chunk-000/file-000.parquet")
    return root


def read(path: Path, conventions: Mapping[str, Any] | None = None, **keys: Any) -> Demonstrations:
    wanted = {"instructions": (TASK,), "views": ("agentview",), "image_size": SIZE, "proprio": 8}
    return read_demonstrations([path], **(wanted | keys), conventions=DemosConfig(**(conventions or {})))


def assert_read(found: Demonstrations, camera: str, episodes: int = 2) -> None:
    assert found.offsets.tolist() == [STEPS * e for e in range(episodes + 1)]
    for row, image in enumerate(found.images[:, 0, 5, 5].astype(int)):
        expected = picture(row // STEPS, row % STEPS, camera)[0, 0].astype(int)
        assert np.abs(image - expected).max() <= 3, (row, image, expected)
    expected_actions = np.concatenate([actions_of(e, 7, (-1.0, 1.0)) for e in range(episodes)])
    assert np.allclose(found.actions[:, :6], expected_actions[:, :6], atol=1e-6)
    assert np.array_equal(found.actions[:, 6], (1 - expected_actions[:, 6]) / 2)
    assert found.proprio[:, 0].tolist() == [float(e) for e in range(episodes) for _ in range(STEPS)]


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"stored": "table", "missing": ["video_path"]},  # lerobot/libero_spatial_image, HuggingFaceVLA/libero
        {"version": "v2.0", "stored": "table", "names": ("actions", "state"), "cameras": ("image", "wrist_image")},
        {"version": "v2.0", "stored": "files"},
        {"version": "v2.1"},
        {"version": "v2.1", "missing": ["video_path", "chunks_size"]},
        {"episodes": 3, "episodes_per_file": (1, 3)},
        {"episodes": 3, "episodes_per_file": (3, 2), "tasks_as_lines": True},
        {"cameras": ("observation.images.back", "observation.images.agentview", "observation.images.depth")},
    ],
    ids=lambda layout: ",".join(map(str, layout.values())) or "v3 with videos",
)
def test_layouts_of_lerobot(layout: dict[str, Any], tmp_path: Path) -> None:
    root = write_lerobot(tmp_path / "set", **layout)
    camera = next(c for c in layout.get("cameras", (CAMERA,)) if c.endswith(("image", "agentview")))
    found = read(root)
    assert_read(found, camera, layout.get("episodes", 2))
    assert f"set: view agentview is {camera}" in found.notes


def hdf5(path: Path, fill: Callable[[Any], None], **attributes: Any) -> Path:
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        problem = json.dumps({"language_instruction": TASK})
        data.attrs.update({"macros_image_convention": "opengl", "problem_info": problem} | attributes)
        fill(data)
    return path


def demo(data: Any, name: str = "demo_0", steps: int = 5, **changed: Any) -> None:
    obs = {"agentview_rgb": np.full((steps, SIZE, SIZE, 3), 80, np.uint8), "ee_states": np.zeros((steps, 6))}
    obs |= {"gripper_states": np.zeros((steps, 2))}
    arrays = {"actions": np.random.default_rng(0).uniform(-1, 1, (steps, 7))}
    arrays["actions"][:, 6] = np.where(np.arange(steps) % 2, 1, -1)
    group = data.create_group(name)
    for key, value in (arrays | {f"obs/{k}": v for k, v in obs.items()} | changed).items():
        if value is not None:
            group[key] = value


def pointers(root: Path) -> Path:
    """As a clone without Git LFS leaves videos."""
    for file in root.rglob("*.mp4"):
        file.write_text("version https://git-lfs.github.com/spec/v1")
    return root


REFUSED: dict[str, tuple[Callable[[Path], Path], dict[str, Any], str]] = {
    "another width": (
        lambda p: write_lerobot(p, width=6),
        {},
        r"set, episode 0: actions of shape \[6, 6\], the environment's have 7 numbers",
    ),
    "NaN": (lambda p: write_lerobot(p, nan_in=1), {}, r"set, episode 1: action number 0 of step 2 is nan: repair"),
    "a gripper of 0 to 1": (
        lambda p: write_lerobot(p, gripper=(0.0, 1.0)),
        {},
        r"gripper goes from 0 to 1, .* demos.gripper=\[1,0\] \(OPEN, CLOSED\) or demos.gripper=\[0,1\]",
    ),
    "a camera of another name": (
        lambda p: write_lerobot(p, cameras=("observation.images.back",)),
        {},
        r"has the cameras \['back'\], .* set demos.cameras=\{agentview: NAME\}",
    ),
    "a camera that is not there": (
        write_lerobot,
        {"conventions": {"cameras": {"agentview": "top"}}},
        r"demos.cameras says top",
    ),
    "a view that is not there": (
        write_lerobot,
        {"conventions": {"cameras": {"front": "image"}}},
        "names the view front",
    ),
    "no state": (
        lambda p: write_lerobot(p, names=("action", "observation.joints")),
        {},
        r"has no state .* set env.proprio=false",
    ),
    "pointers": (
        lambda p: (
            write_lerobot(p) and [f.write_text("version https://git-lfs.github.com") for f in p.rglob("*.mp4")] and p
        ),
        {},
        r"file-000.mp4 is only a pointer of Git LFS",
    ),
    "another unit": (
        lambda p: write_lerobot(p),
        {"actions": ActionSpace.from_box([-1, *[-0.1] * 6], [1, *[0.1] * 6], {})},
        r"numbers for action_\d lie beyond the environment's limits, -0.1 and 0.1",
    ),
    "float images": (
        lambda p: hdf5(p, lambda d: demo(d, **{"obs/agentview_rgb": np.zeros((5, SIZE, SIZE, 3), np.float32)})),
        {},
        r"/data/demo_0: agentview_rgb holds float32 .* images must be uint8",
    ),
    "an image more": (
        lambda p: hdf5(p, lambda d: demo(d, **{"obs/agentview_rgb": np.zeros((6, SIZE, SIZE, 3), np.uint8)})),
        {},
        r"/data/demo_0: 5 actions, 6 images of agentview_rgb",
    ),
    "no actions": (lambda p: hdf5(p, lambda d: demo(d, actions=None)), {}, "/data/demo_0 has no actions"),
    "another width in HDF5": (
        lambda p: hdf5(p, lambda d: demo(d, actions=np.zeros((5, 8)))),
        {},
        r"/data/demo_0: actions of shape \[4, 8\]",
    ),
    "NaN in HDF5": (
        lambda p: hdf5(p, lambda d: demo(d, actions=np.full((5, 7), np.inf))),
        {},
        "/data/demo_0: action number 0 of step 0 is inf",
    ),
    "all episodes are empty": (lambda p: hdf5(p, lambda d: demo(d, steps=0)), {}, "all of their episodes are empty"),
    "a file that does not say how images are stored": (
        lambda p: hdf5(p, demo, macros_image_convention="unknown"),
        {},
        r"set demos.rotated=true if they are rotated by 180 degrees, .* or false if they are upright",
    ),
    "grippers elsewhere": (
        lambda p: hdf5(p, demo, actions=json.dumps({"grippers": {"2": [0, 1]}})),
        {},
        r"grippers in the dimensions \[2\], the environment's in \[6\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_names_file_episode_and_remedy(case: str, tmp_path: Path) -> None:
    make, keys, message = REFUSED[case]
    path = make(tmp_path / "set")
    with pytest.raises(DemonstrationError, match=message):
        read(path, **keys)


def test_what_people_say_of_their_data_is_followed(tmp_path: Path) -> None:
    root = write_lerobot(tmp_path / "set", gripper=(0.0, 1.0), cameras=("observation.images.back",))
    said = {"cameras": {"agentview": "back"}}
    closes = read(root, {"gripper": (0.0, 1.0)} | said)
    opens = read(root, {"gripper": (1.0, 0.0)} | said)
    assert closes.actions[:4, 6].tolist() == [1, 0, 1, 0]
    assert opens.actions[:4, 6].tolist() == [0, 1, 0, 1]
    frames = np.zeros((5, SIZE, SIZE, 3), np.uint8)
    frames[:, 0, 0] = 200
    file = hdf5(
        tmp_path / "own.hdf5",
        lambda d: demo(d, **{"obs/agentview_rgb": frames}),
        macros_image_convention="mine",
        vla_rl_format=0,
        problem_info=json.dumps({"language_instruction": TASK}),
    )
    for rotated, corner in ((True, -1), (False, 0)):
        assert read(file, {"rotated": rotated}).images[0, 0, corner, corner, 0] == 200


def test_what_is_optional_may_be_missing(tmp_path: Path) -> None:
    """LIBERO's layout with empty episodes, other groups, another image size, an instruction in bytes, upper case."""

    def fill(data: Any) -> None:
        demo(data, "demo_0", **{"obs/agentview_rgb": np.full((5, 48, 48, 3), 80, np.uint8)})
        demo(data, "demo_1", steps=0)
        demo(data, "demo_10", steps=1)  # nothing is left of an official one
        data["demo_0"].attrs["language_instruction"] = np.bytes_(TASK)
        for name in ("demo_1", "demo_10"):
            data[name].attrs["language_instruction"] = TASK
        data.create_group("mask")
        data["split"] = np.zeros(3)

    hdf5(tmp_path / "SET.HDF5", fill)
    found = read(tmp_path)
    assert found.offsets.tolist() == [0, 4]
    assert found.images.shape == (4, 1, SIZE, SIZE, 3)
    assert [note for note in found.notes if "no step, left out" in note] == [
        f"SET.HDF5, /data/{name}: no step, left out" for name in ("demo_1", "demo_10")
    ]


def test_success_may_come_before_the_last_step(tmp_path: Path) -> None:
    root = write_lerobot(tmp_path / "set", success=lambda episode, step: episode == 1 and step == STEPS - 2)
    found = read(root)
    assert found.num_demonstrations == 1
    assert (found.proprio == 1).all(), "the second episode"


def test_many_episodes_need_the_memory_of_few_and_each_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks, opened = [], list[str]()
    plain = pq.ParquetFile

    def counted(path: Path) -> Any:
        opened.append(str(path))
        return plain(path)

    monkeypatch.setattr(pq, "ParquetFile", counted)
    for episodes in (5, 100):
        root = write_lerobot(tmp_path / str(episodes), stored="table", episodes=episodes)
        tracemalloc.start()
        found = read(root, image_size=4 * SIZE)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found.images.nbytes == episodes * STEPS * (4 * SIZE) ** 2 * 3
    assert len(opened) == len(set(opened)) == 2
    assert peaks[1] < 2 * peaks[0] < found.images.nbytes / 4


def test_a_data_set_of_another_environment_is_found_before_anything_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = env_spec(TabletopConfig(image_size=32))
    images, rest = np.zeros((2, 1, 32, 32, 3), np.uint8), (np.zeros((2, 5)), np.zeros((2, 7)), np.zeros(2))
    save_episode(tmp_path / "set", EpisodeData("do it", images, *rest, success=True), spec)
    add_pending(tmp_path / "set", spec)
    check_dataset(tmp_path / "set", spec)
    other = env_spec(TabletopConfig(image_size=48, proprio=False))
    with pytest.raises(UserError, match=r"write to another folder \(observation.images.image, observation.state\)"):
        check_dataset(tmp_path / "set", other)
    command = ["train", "tabletop", "env.image_size=48", f"log.dataset={tmp_path / 'set'}"]
    assert main([*command, f"log.dir={tmp_path}", "log.name=run"]) == 2
    assert "write to another folder (observation.images.image)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_conventions_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="open and closed are the same number"):
        RunConfig.model_validate({"demos": {"gripper": [1, 1]}})
