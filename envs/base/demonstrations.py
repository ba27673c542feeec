"""Demonstrations of any simulator, in the HDF5 layout of LIBERO's data sets or as data sets of LeRobot.

    data                          attributes: problem_info (JSON with language_instruction), num_demos, actions, ...
    └── demo_0                    attributes: num_samples, language_instruction, success, ...
        ├── actions               float64 [T, A]; LIBERO's gripper is -1 open .. 1 closed
        ├── rewards, dones        uint8 [T], 1 in the last step
        ├── states, robot_states  float64 [T, ...], if the simulator has them
        ├── scene_state           float32 [T, S], ``VectorEnv.state``, if the simulator gives it
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from envs.base import EnvError, VectorEnv, empty_observation
from envs.base.config import DemosConfig
from envs.base.demonstration_records import Demonstration, DemonstrationError, Demonstrations, Wanted
from envs.base.hdf5_reader import SCENE_STATE, SUFFIXES, read_hdf5
from envs.base.lerobot_reader import is_lerobot_dataset, read_lerobot
from vla_rl.core.actions import ActionSpace, end_effector
from vla_rl.core.files import replacing
from vla_rl.core.records import EnvSpec, EpisodeSpec

VIEW_DATASETS = ("agentview_rgb", "eye_in_hand_rgb")  # the first view, the second view
NOISE_MEMORY = 0.7  # correlation of the noise between two steps: single kicks would average out within a few steps
TURN_NOISE = 0.3  # noise on rotations, as a share of the noise on translations
_FORMAT_VERSION = 1
_ARM = end_effector()
_AS_STATED = DemosConfig()


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
        if env.spec.state_dim:
            row[SCENE_STATE] = env.state([0])[0]
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
    conventions: DemosConfig = _AS_STATED,
    drop_noops: bool = False,
) -> Demonstrations:
    """Read all demonstrations of the given tasks from all files.

    Args:
        paths: HDF5 files, folders of such, and folders of LeRobot data sets.
        instructions: the simulator's; a demonstration's task is the index of its instruction.
        views: the simulator's; their cameras are found by name.
        image_size: images of another size are resized.
        proprio: expected width of the proprioception, 0 for none.
        actions: the simulator's.
        conventions: what the files mean, where they do not say so.
        drop_noops: leave out actions that neither move the arm nor change the gripper, as OpenVLA does. If the expert
            waits for its fingers to close, that also removes the waiting.

    Raises DemonstrationError if a file is missing, damaged, does not fit the simulator, contradicts its conventions, or
    holds no demonstration of these tasks.
    """
    if unknown := sorted(conventions.cameras.keys() - set(views)):
        raise DemonstrationError(f"demos.cameras names the view {unknown[0]}; the simulator's are {list(views)}")
    tasks = {instruction: index for index, instruction in enumerate(instructions)}
    wanted = Wanted(tasks, views, image_size, proprio, actions, conventions, drop_noops)
    files = chain.from_iterable(map(_files, paths))
    return Demonstrations.gathered(chain.from_iterable(_read(path, wanted) for path in files), wanted)


def demonstrations_for(spec: EnvSpec, paths: Sequence[Path], conventions: DemosConfig) -> Demonstrations:
    """``read_demonstrations`` for the environments of ``spec``."""
    return read_demonstrations(
        paths,
        instructions=spec.instructions,
        views=spec.views,
        image_size=spec.image_size,
        proprio=spec.proprio_dim,
        actions=spec.actions,
        conventions=conventions,
    )


def _files(path: Path) -> list[Path]:
    """The path itself, or the HDF5 files in a folder that is no LeRobot data set."""
    if not path.is_dir() or is_lerobot_dataset(path):
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not files:
        raise DemonstrationError(f"{path} holds neither HDF5 files nor a LeRobot data set: name another folder")
    return files


def _read(path: Path, wanted: Wanted) -> Iterator[Demonstration]:
    if not is_lerobot_dataset(path):
        return read_hdf5(path, wanted)
    if wanted.drop_noops:
        raise DemonstrationError(f"{path}: idle steps can be left out of HDF5 files only")
    return read_lerobot(path, wanted)


def _datasets(views: Sequence[str]) -> tuple[str, ...]:
    if len(views) > len(VIEW_DATASETS):
        raise DemonstrationError(f"demonstration files hold {len(VIEW_DATASETS)} views at most, not {list(views)}")
    return VIEW_DATASETS[: len(views)]
