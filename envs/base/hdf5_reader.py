"""Reads demonstrations from HDF5 files in LIBERO's layout (``demonstrations``)."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from envs.base.demonstration_records import Demonstration, DemonstrationError, Wanted
from vla_rl.core.actions import ActionSpace, Gripper

SUFFIXES = (".hdf5", ".h5")
SCENE_STATE = "scene_state"  # a data set of files that this project has written
_DEMO = re.compile(r"demo_(\d+)")
_NOOP = 1e-4  # OpenVLA's bound on the norm of an arm action that does nothing
_SCENE_PREFIX = re.compile(r"^[A-Z_]+SCENE\d+_")  # "KITCHEN_SCENE3_": file names of libero_10 and libero_90
_CONVENTION, _OURS = "macros_image_convention", "vla_rl_format"  # attributes of official files; and of ours


def read_hdf5(path: Path, wanted: Wanted) -> Iterator[Demonstration]:
    """All demonstrations of the wanted tasks in a file.

    LIBERO's official files store each observation *after* its action; they are realigned here. Raises
    DemonstrationError if the file is missing, damaged, does not fit the simulator, or holds none of these tasks.
    """
    with _open(path) as data:
        demos = [data[name] for name in sorted(filter(_DEMO.fullmatch, data), key=_number)]
        stated = [_instruction(path, data, demo) for demo in demos]
        if not any(instruction in wanted.tasks for instruction in stated):
            raise wanted.no_task(path, stated)
        grippers = wanted.grippers(path, data.attrs.get("actions"))
        rotated, raw = _rotated(path, data, wanted), []
        for demo, instruction in zip(demos, stated, strict=True):
            if instruction not in wanted.tasks:
                continue
            rows, seen = _rows(path, data, demo, wanted)
            if not len(rows):
                wanted.note(f"{path.name}, {demo.name}: no step, left out")
                continue
            raw.append(demo["actions"][()][rows])
            yield _demonstration(path, demo, wanted, rotated, seen, raw[-1], wanted.tasks[instruction], grippers)
        if raw and "actions" not in data.attrs:
            wanted.check_grippers(path, raw, grippers)


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """The ``data`` group of a demonstration file."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            yield file["data"]
    except (OSError, KeyError) as error:
        raise DemonstrationError(
            f"{path} cannot be read as a demonstration file ({error}): check the path, or collect it again"
        ) from error


def _rotated(path: Path, data: Any, wanted: Wanted) -> bool:
    """Whether images are as robosuite renders them for LIBERO."""
    if wanted.conventions.rotated is not None:
        return wanted.conventions.rotated
    if _OURS in data.attrs or data.attrs.get(_CONVENTION) == "opengl":
        return True
    raise DemonstrationError(
        f"{path} does not say how its images are stored: set demos.rotated=true if they are rotated by 180 degrees, as "
        "LIBERO renders them and OpenVLA regenerates them, or false if they are upright"
    )


def _rows(path: Path, data: Any, demo: Any, wanted: Wanted) -> tuple[np.ndarray, np.ndarray]:
    """The steps that are taken, and the rows of their observations."""
    for name in ("actions", "obs"):
        if name not in demo:
            raise DemonstrationError(f"{path}, {demo.name} has no {name}: it is no demonstration; collect it again")
    actions = demo["actions"][()]
    if wanted.drop_noops and actions.ndim == 2 and actions.shape[1] == len(wanted.actions):
        rows = np.flatnonzero(_moving(actions, wanted.actions))
    else:
        rows = np.arange(len(actions))
    if _CONVENTION in data.attrs and _OURS not in data.attrs:
        rows = rows[rows > 0]
        return rows, rows - 1  # an official file: the observation that the previous action led to
    return rows, rows


def _demonstration(
    path: Path,
    demo: Any,
    wanted: Wanted,
    rotated: bool,
    seen: np.ndarray,
    actions: np.ndarray,
    task: int,
    grippers: dict[int, Gripper],
) -> Demonstration:
    where, obs, length = f"{path}, {demo.name}", demo["obs"], len(demo["actions"])
    images = []
    for camera in wanted.cameras(path, (name for name in obs if len(obs[name].shape) == 4)):
        stored = obs[camera][()]
        if len(stored) != length:
            raise DemonstrationError(f"{where}: {length} actions, {len(stored)} images of {camera}: they must pair up")
        images.append(wanted.frames(where, camera, stored[seen, ::-1, ::-1] if rotated else stored[seen]))
    proprio = _proprio(where, obs, length, wanted)[seen]
    found = wanted.demonstration(where, images, proprio, actions, task, grippers)
    return found._replace(state=demo[SCENE_STATE][()][seen]) if SCENE_STATE in demo else found


def _proprio(where: str, obs: Any, length: int, wanted: Wanted) -> np.ndarray:
    if wanted.proprio == 0:
        return np.zeros((length, 0), np.float32)
    if "proprio" in obs:
        values = obs["proprio"][()]
    elif "ee_states" in obs and "gripper_states" in obs:
        values = np.concatenate([obs["ee_states"][()], obs["gripper_states"][()]], axis=1)
    else:
        raise DemonstrationError(f"{where} has no proprioception: set env.proprio=false, or collect it again")
    if values.shape != (length, wanted.proprio):
        raise DemonstrationError(
            f"{where} has proprioception of shape {values.shape}, expected {(length, wanted.proprio)}: "
            "it comes from another simulator"
        )
    return np.asarray(values)


def _moving(actions: np.ndarray, space: ActionSpace) -> np.ndarray:
    """bool [T]: which actions do something, by the rule of OpenVLA's data preparation."""
    keep = np.zeros(len(actions), bool)
    fingers = list(space.grippers)
    arms = np.linalg.norm(np.delete(actions, fingers, axis=1), axis=1)
    last = None
    for step, grip in enumerate(actions[:, fingers]):
        keep[step] = arms[step] >= _NOOP or (last is not None and not np.array_equal(grip, last))
        if keep[step]:
            last = grip
    return keep


def _instruction(path: Path, data: Any, demo: Any) -> str:
    """A demonstration's instruction. In LIBERO's official files it is the file's name, as in the benchmark."""
    if "language_instruction" in demo.attrs:
        stated = demo.attrs["language_instruction"]
        return stated.decode() if isinstance(stated, bytes) else str(stated)
    if path.stem.endswith("_demo"):
        return libero_instruction(path.stem.removesuffix("_demo"))
    return str(json.loads(data.attrs.get("problem_info", "{}")).get("language_instruction", ""))


def libero_instruction(name: str) -> str:
    """A LIBERO task's instruction, by its name: "KITCHEN_SCENE3_put_the_pan_down" means "put the pan down"."""
    return _SCENE_PREFIX.sub("", name).replace("_", " ")


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])
