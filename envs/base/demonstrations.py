"""Demonstrations of any simulator, in the HDF5 layout of LIBERO's data sets or as data sets of LeRobot.

    data                          attributes: problem_info (JSON with language_instruction), num_demos, actions, ...
    └── demo_0                    attributes: num_samples, language_instruction, success, ...
        ├── actions               float64 [T, A]; LIBERO's gripper is -1 open .. 1 closed
        ├── rewards, dones        uint8 [T], 1 in the last step
        ├── states, robot_states  float64 [T, ...], if the simulator has them
        └── obs
            ├── agentview_rgb     uint8 [T, H, W, 3], the main view, rotated by 180 degrees as robosuite renders it
            ├── eye_in_hand_rgb   the second view, likewise
            └── ee_states, gripper_states, joint_states, ...   or, from other simulators, proprio

``collect`` writes such files with a simulator's scripted expert. ``read_demonstrations`` reads them, as well as
LIBERO's official files, those that OpenVLA regenerates and data sets of LeRobot (``lerobot_reader``), and converts to
this project's conventions (``envs.base.vector_env``).

Labels and noise (DART, arXiv:1703.09327): the environment executes the expert's action plus noise, the file records the
expert's action alone. So the files show states off the expert's path together with the way back. Replaying ``actions``
open-loop reproduces the ``states`` only of files that were written with noise 0 (attribute ``noise``).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from envs.base import EnvError, VectorEnv, empty_observation
from envs.base.demonstration_records import (
    Demonstration,
    DemonstrationError,
    Demonstrations,
    no_demonstration,
)
from envs.base.lerobot_reader import is_lerobot_dataset, read_lerobot
from envs.base.vector_env import resized
from vla_rl.core.actions import ActionSpace, end_effector
from vla_rl.core.files import replacing
from vla_rl.core.records import EpisodeSpec

VIEW_DATASETS = ("agentview_rgb", "eye_in_hand_rgb")  # the first view, the second view
NOISE_MEMORY = 0.7  # correlation of the noise between two steps: single kicks would average out within a few steps
TURN_NOISE = 0.3  # noise on rotations, as a share of the noise on translations
_NOOP = 1e-4  # OpenVLA's bound on the norm of an arm action that does nothing
_SCENE_PREFIX = re.compile(r"^[A-Z_]+SCENE\d+_")  # "KITCHEN_SCENE3_": file names of libero_10 and libero_90
_FORMAT_VERSION = 1
_ARM = end_effector()


@runtime_checkable
class HasDemoState(Protocol):
    """A simulator that records more than images and proprioception."""

    def demo_state(self, env_id: int) -> dict[str, np.ndarray]:
        """The environment's present state: arrays by their path within a demonstration, e.g. ``obs/joint_states``."""


@dataclass(frozen=True, slots=True)
class CollectCounts:
    """What a collection has written."""

    episodes: int
    successes: int
    written: int
    steps: int  # control steps in the file


def collect(
    env: VectorEnv,
    episodes: Sequence[EpisodeSpec],
    path: Path,
    *,
    noise: float = 0.0,
    keep_failures: bool = False,
    progress: Callable[[CollectCounts], None] | None = None,
) -> CollectCounts:
    """Play ``episodes`` with the scripted expert (in environment 0), observe every control step, and write a file.

    ``noise`` is the standard deviation of the noise on executed arm actions, in their own units (LIBERO: 1.0 is a full
    action); it is correlated over about three steps. The file appears under its name only when it is complete.

    Raises EnvError if the simulator has no expert for a task, DemonstrationError if no episode succeeded.
    """
    import h5py

    counts = CollectCounts(0, 0, 0, 0)
    with replacing(path) as partial, h5py.File(partial, "w") as file:
        data = file.create_group("data")
        for episode in episodes:
            record, success = _run_expert(env, episode, noise)
            written = success or keep_failures
            if written:
                _write_demo(data, counts.written, record, episode, env.spec.instructions[episode.task], success)
            counts = CollectCounts(
                episodes=counts.episodes + 1,
                successes=counts.successes + success,
                written=counts.written + written,
                steps=counts.steps + (len(record["actions"]) if written else 0),
            )
            if progress is not None:
                progress(counts)
        if not counts.written:
            raise DemonstrationError(
                f"none of {counts.episodes} episodes succeeded, {path} was not written: lower noise={noise}, "
                "raise the step limit, or keep failures"
            )
        _write_attributes(data, env, counts, noise, {env.spec.instructions[episode.task] for episode in episodes})
    return counts


def _run_expert(env: VectorEnv, episode: EpisodeSpec, noise: float) -> tuple[dict[str, np.ndarray], bool]:
    """One episode as arrays by their path within the demonstration, and whether it succeeded."""
    rng = np.random.default_rng(episode.seed)
    view = empty_observation(env.spec, env.num_envs)
    space = env.spec.actions
    scale = noise * space.noise_scale * np.where([dim.turn for dim in space.dims], TURN_NOISE, 1.0)
    kick = rng.normal(size=env.spec.action_dim)
    rows: list[dict[str, np.ndarray]] = []
    env.reset([0], [episode])
    while True:
        env.observe([0], view)
        try:
            label = env.expert_action(0)
        except EnvError:
            if not rows:
                raise  # no expert for this task; in later steps, the expert is lost in this one episode
            return _stacked(rows), False
        row = {f"obs/{name}": view.images[0, i, ::-1, ::-1].copy() for i, name in enumerate(_datasets(env.spec.views))}
        row |= env.demo_state(0) if isinstance(env, HasDemoState) else {"obs/proprio": view.proprio[0].copy()}
        row["actions"] = space.to_data(label)
        rows.append(row)
        kick = NOISE_MEMORY * kick + np.sqrt(1 - NOISE_MEMORY**2) * rng.normal(size=kick.shape)
        result = env.step([0], (label + scale * kick).astype(np.float32)[None, None])
        if result.terminated[0] or result.truncated[0]:
            return _stacked(rows), bool(result.success[0])


def _stacked(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _write_demo(
    data: Any, index: int, record: dict[str, np.ndarray], episode: EpisodeSpec, instruction: str, success: bool
) -> None:
    group = data.create_group(f"demo_{index}")
    for name, values in record.items():
        compression = {"compression": "gzip", "compression_opts": 1} if values.dtype == np.uint8 else {}
        group.create_dataset(name, data=values, **compression)
    last = np.zeros(len(record["actions"]), np.uint8)
    last[-1] = 1
    group.create_dataset("dones", data=last)
    group.create_dataset("rewards", data=last * success)
    group.attrs["num_samples"] = len(last)
    group.attrs["language_instruction"] = instruction
    group.attrs["success"] = success
    group.attrs["seed"] = episode.seed
    if "states" in record:
        group.attrs["init_state"] = record["states"][0]


def _write_attributes(data: Any, env: VectorEnv, counts: CollectCounts, noise: float, instructions: set[str]) -> None:
    language = "; ".join(sorted(instructions))
    problem = {"problem_name": env.spec.name, "domain_name": "robosuite", "language_instruction": language}
    data.attrs["problem_info"] = json.dumps(problem)
    data.attrs["env_name"] = env.spec.name
    data.attrs["env_args"] = json.dumps({"type": 1, "env_name": env.spec.name, "env_kwargs": {}})
    data.attrs["macros_image_convention"] = "opengl"
    data.attrs["num_demos"] = counts.written
    data.attrs["total"] = counts.steps
    data.attrs["vla_rl_format"] = _FORMAT_VERSION
    data.attrs["assets"] = env.spec.assets
    data.attrs["actions"] = env.spec.actions.described()
    data.attrs["noise"] = noise


def read_demonstrations(
    paths: Sequence[Path],
    *,
    instructions: Sequence[str],
    views: Sequence[str],
    image_size: int,
    proprio: int,
    actions: ActionSpace = _ARM,
    drop_noops: bool = False,
) -> Demonstrations:
    """Read all demonstrations of the given tasks from all files.

    Args:
        paths: HDF5 files, folders of such, and folders of LeRobot data sets.
        instructions: the simulator's; a demonstration's task is the index of its instruction.
        views: the simulator's; the first two are read from ``VIEW_DATASETS``.
        image_size: images of another size are resized.
        proprio: expected width of the proprioception, 0 for none.
        actions: the simulator's.
        drop_noops: leave out actions that neither move the arm nor change the gripper, as OpenVLA does. If the expert
            waits for its fingers to close, that also removes the waiting.

    LIBERO's official files store each observation *after* its action; they are realigned here.

    Raises DemonstrationError if a file is missing, damaged, lacks a needed view or proprioception, or holds no
    demonstration of these tasks.
    """
    known = {instruction: index for index, instruction in enumerate(instructions)}
    parts: list[Demonstration] = []
    for path in chain.from_iterable(_files(path) for path in paths):
        if is_lerobot_dataset(path):
            if drop_noops:
                raise DemonstrationError(f"{path}: idle steps can be left out of HDF5 files only")
            found = read_lerobot(path, known, views, image_size, proprio, actions)
        else:
            found = _read_file(path, known, views, image_size, proprio, actions, drop_noops)
        parts += found
    if not parts:
        raise DemonstrationError("no demonstration files were given")
    lengths = [len(part.actions) for part in parts]
    return Demonstrations(
        images=np.concatenate([part.images for part in parts]),
        proprio=np.concatenate([part.proprio for part in parts]),
        actions=np.concatenate([part.actions for part in parts]),
        task=np.repeat(np.array([part.task for part in parts], np.int32), lengths),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
    )


def _files(path: Path) -> list[Path]:
    """The path itself, or the HDF5 files in a folder that is no LeRobot data set."""
    if not path.is_dir() or is_lerobot_dataset(path):
        return [path]
    files = sorted(path.rglob("*.hdf5"))
    if not files:
        raise DemonstrationError(f"{path} holds neither HDF5 files nor a LeRobot data set: name another folder")
    return files


def _read_file(
    path: Path,
    known: Mapping[str, int],
    views: Sequence[str],
    image_size: int,
    proprio: int,
    space: ActionSpace,
    drop_noops: bool,
) -> list[Demonstration]:
    """All demonstrations of the known instructions in an HDF5 file."""
    with _open(path) as data:
        stated = {name: _instruction(path, data, data[name]) for name in sorted(data, key=_demo_number)}
        found = [
            _read_demo(path, data, data[name], views, image_size, proprio, space, drop_noops, known[instruction])
            for name, instruction in stated.items()
            if instruction in known
        ]
    if not found:
        raise no_demonstration(path, known, stated.values())
    return found


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


def _read_demo(
    path: Path,
    data: Any,
    demo: Any,
    views: Sequence[str],
    image_size: int,
    proprio: int,
    space: ActionSpace,
    drop_noops: bool,
    task: int,
) -> Demonstration:
    obs = demo["obs"]
    missing = [name for name in _datasets(views) if name not in obs]
    if missing:
        raise DemonstrationError(
            f"{path}, {demo.name} has no {missing[0]} for the views {list(views)}: "
            "collect it with that camera, or train without it"
        )
    actions = demo["actions"][()]
    keep = _moving(actions, space) if drop_noops else np.ones(len(actions), bool)
    rows = np.flatnonzero(keep)
    seen = rows
    if "macros_image_convention" in data.attrs and "vla_rl_format" not in data.attrs:
        rows = rows[rows > 0]
        seen = rows - 1  # an official file: the observation that the previous action led to
    grippers = space.grippers_of(data.attrs["actions"]) if "actions" in data.attrs else None
    images = np.stack([resized(obs[name][()][seen, ::-1, ::-1], image_size) for name in _datasets(views)], axis=1)
    return Demonstration(
        images, _read_proprio(path, demo, proprio)[seen], space.from_data(actions[rows], grippers), task
    )


def _read_proprio(path: Path, demo: Any, width: int) -> np.ndarray:
    obs, length = demo["obs"], len(demo["actions"])
    if width == 0:
        return np.zeros((length, 0), np.float32)
    if "proprio" in obs:
        values = obs["proprio"][()]
    elif "ee_states" in obs and "gripper_states" in obs:
        values = np.concatenate([obs["ee_states"][()], obs["gripper_states"][()]], axis=1)
    else:
        raise DemonstrationError(
            f"{path}, {demo.name} has no proprioception: set env.proprio=false, or collect it again"
        )
    if values.shape != (length, width):
        raise DemonstrationError(
            f"{path}, {demo.name} has proprioception of shape {values.shape}, expected {(length, width)}: "
            "it comes from another simulator"
        )
    return values.astype(np.float32)


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


def _datasets(views: Sequence[str]) -> tuple[str, ...]:
    if len(views) > len(VIEW_DATASETS):
        raise DemonstrationError(f"demonstration files hold {len(VIEW_DATASETS)} views at most, not {list(views)}")
    return VIEW_DATASETS[: len(views)]


def _instruction(path: Path, data: Any, demo: Any) -> str:
    """A demonstration's instruction. In LIBERO's official files it is the file's name, as in the benchmark."""
    if "language_instruction" in demo.attrs:
        return str(demo.attrs["language_instruction"])
    if path.stem.endswith("_demo"):
        return libero_instruction(path.stem.removesuffix("_demo"))
    return str(json.loads(data.attrs.get("problem_info", "{}")).get("language_instruction", ""))


def libero_instruction(name: str) -> str:
    """A LIBERO task's instruction, by its name: "KITCHEN_SCENE3_put_the_pan_down" means "put the pan down"."""
    return _SCENE_PREFIX.sub("", name).replace("_", " ")


def _demo_number(name: str) -> int:
    return int(name.rpartition("_")[2])
