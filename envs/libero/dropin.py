"""hf-libero's ``OffScreenRenderEnv`` and benchmark at the speed of ``fast``, for code that was written for them.

    from envs.libero.dropin import OffScreenRenderEnv, get_benchmark_dict       # without torch, Ray and DeepSpeed

Observations, rewards and simulator states are those of hf-libero, bit for bit. LeRobot's environment runs on it, too:

    import envs.libero.dropin, lerobot.envs.libero
    lerobot.envs.libero.OffScreenRenderEnv = envs.libero.dropin.OffScreenRenderEnv

docs/fast_libero.md lists what is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import mujoco
import numpy as np

from envs.base import EnvError
from envs.libero.assets.resolve import AssetMode
from envs.libero.bootstrap import import_libero
from envs.libero.fast.rendering import Renderer
from envs.libero.fast.task_model import SimState, TaskModel
from envs.libero.protocol.tasks import STEP_LIMITS, LiberoTask, load_init_states, suite_tasks

CAMERAS = ("agentview", "robot0_eye_in_hand")
# Arguments of hf-libero's that may be given with these values, which are its defaults.
_FIXED: dict[str, Any] = {
    "robots": ["Panda"],
    "controller": "OSC_POSE",
    "gripper_types": "default",
    "initialization_noise": None,
    "has_renderer": False,
    "has_offscreen_renderer": True,
    "render_camera": "frontview",
    "render_collision_mesh": False,
    "render_visual_mesh": True,
    "control_freq": 20,
    "camera_depths": False,
    "camera_segmentations": None,
    "renderer": "mujoco",
    "renderer_config": None,
}
_IGNORED = {"render_gpu_device_id", "horizon", "ignore_done", "hard_reset"}  # they change no result here


class OffScreenRenderEnv:
    """One task. See the module; arguments with the names of hf-libero's mean the same.

    Args:
        bddl_file_name: one of hf-libero's 130 tasks.
        camera_heights, camera_widths: equal here: images are square.
        camera_names: of ``<name>_image`` in observations, whose rows run from bottom to top as hf-libero's do.
        use_camera_obs: without, observations have no images.
        joint_draws: how many times a reset draws the joints of drawers and knobs, which shifts all later placements.
            "once": every reset is a task's first one in LIBERO's benchmark. "as_hf_libero": its n-th reset draws n + 1
            times, since it appends its samplers at every rebuild.
        lazy_images: draw an image when it is looked up in the observation, by ``obs[...]`` alone.
        assets: "auto", or "placeholder".

    Raises EnvError for arguments that the fast implementation does not have, and as ``bootstrap.import_libero``.
    """

    def __init__(
        self,
        bddl_file_name: str | Path,
        camera_heights: int = 128,
        camera_widths: int = 128,
        camera_names: Sequence[str] = CAMERAS,
        use_camera_obs: bool = True,
        joint_draws: Literal["once", "as_hf_libero"] = "once",
        lazy_images: bool = False,
        assets: AssetMode = "auto",
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if name not in _IGNORED and (name not in _FIXED or value != _FIXED[name]):
                wanted = f"only {_FIXED[name]!r}" if name in _FIXED else "no such argument"
                raise EnvError(f"{name}={value!r}: fast LIBERO has {wanted}; use hf-libero's own OffScreenRenderEnv")
        if camera_heights != camera_widths:
            raise EnvError(f"images of {camera_heights}x{camera_widths}: fast LIBERO draws squares; use equal numbers")
        self.task = _task_of(Path(bddl_file_name))
        self.assets = import_libero(assets)
        self._model = TaskModel(self.task, self.assets)
        self._state: SimState = self._model.new_state()
        self._names = tuple(camera_names) if use_camera_obs else ()
        self._renderer = Renderer(self._model.model, camera_heights) if self._names else None
        self._lazy, self._joint_draws, self._resets = lazy_images, joint_draws, 0
        self.robots = [SimpleNamespace(controller=_Controller(self))]
        self.env = self  # as ``env.env`` of hf-libero's
        self.language_instruction = self.task.instruction
        self.obj_of_interest = self._model.env.obj_of_interest

    def seed(self, seed: int | None) -> None:
        """Seed numpy's global generator, from which LIBERO draws placements."""
        np.random.seed(seed)

    def reset(self) -> dict[str, np.ndarray]:
        self._resets += 1
        draws = self._resets + 1 if self._joint_draws == "as_hf_libero" else 1
        self._model.place(self._state, None, None, joint_draws=draws)
        return self._get_observations()

    def set_init_state(self, init_state: np.ndarray) -> dict[str, np.ndarray]:
        """Continue from a flattened simulator state, float64 [1 + nq + nv]; fixtures stay where ``reset`` put them."""
        self._model.restore(self._state, np.asarray(init_state, np.float64))
        return self._get_observations()

    def step(self, action: Sequence[float] | np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, dict[str, Any]]:
        """One control step; [7] in robosuite's convention: gripper -1 open, 1 closed."""
        self._model.step(self._state, np.asarray(action, np.float64))
        success = self._model.success(self._state)
        return self._get_observations(), float(success), success, {}

    def check_success(self) -> bool:
        return self._model.success(self._state)

    def get_sim_state(self) -> np.ndarray:
        """float64 [1 + nq + nv]: time, positions, velocities."""
        data = self._state.data
        return np.concatenate([[data.time], data.qpos, data.qvel])

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def _get_observations(self) -> dict[str, np.ndarray]:
        robot, moment = self._robot_state(), _Shown(self._state.seen.qpos.copy(), self._state.seen_lit)
        observation = _Observation(robot, self, moment)
        if not self._lazy:
            for name in self._names:
                _ = observation[f"{name}_image"]
        observation.update(self._object_poses(moment))
        parts = [value.ravel() for value in robot.values()]
        observation["robot0_proprio-state"] = np.concatenate(parts)
        return observation

    def _robot_state(self) -> dict[str, np.ndarray]:
        seen = self._state.seen
        joints, fingers = seen.joints[:7].copy(), seen.joints[7:].copy()
        return {
            "robot0_joint_pos": joints,
            "robot0_joint_pos_cos": np.cos(joints),
            "robot0_joint_pos_sin": np.sin(joints),
            "robot0_joint_vel": seen.speeds[:7].copy(),
            "robot0_eef_pos": seen.eef_pos.copy(),
            "robot0_eef_quat": seen.eef_quat[[1, 2, 3, 0]],
            "robot0_gripper_qpos": fingers,
            "robot0_gripper_qvel": seen.speeds[7:].copy(),
        }

    def _object_poses(self, moment: "_Shown") -> dict[str, np.ndarray]:
        """Position and quaternion (x, y, z, w) of every movable object."""
        model, data = self._model, self._model.scratch
        model.bind(self._state)
        data.qpos[:] = moment.qpos
        mujoco.mj_kinematics(model.model, data)
        poses = {}
        for name in model.env.objects_dict:
            body = model.env.obj_body_id[name]
            poses[f"{name}_pos"] = data.xpos[body].copy()
            poses[f"{name}_quat"] = data.xquat[body][[1, 2, 3, 0]]
        return poses

    def draw(self, name: str, moment: "_Shown") -> np.ndarray:
        """uint8 [H, W, 3] of a camera, rows from bottom to top. Raises KeyError for a camera that was not asked for."""
        if self._renderer is None or name not in self._names:
            raise KeyError(f"{name}_image")
        self._model.bind(self._state)
        self._model.show_lamps(moment.lit)
        self._renderer.pose(moment.qpos)
        size = self._renderer.size
        upright = np.empty((size, size, 3), np.uint8)
        self._renderer.render(self._model.model.camera(name).id, upright)
        return np.ascontiguousarray(upright[::-1, ::-1])

    @property
    def position(self) -> np.ndarray:
        """float64 [3]: the hand's (m), as the controller read it last."""
        return self._state.arm.controller.pos.copy()

    @property
    def orientation(self) -> np.ndarray:
        """float64 [3, 3]: the hand's, as the controller read it last."""
        return self._state.arm.controller.mat.copy()


@dataclass(frozen=True, slots=True)
class _Shown:
    """What an observation shows."""

    qpos: np.ndarray
    lit: np.ndarray


class _Observation(dict[str, np.ndarray]):
    """An observation that draws images when they are looked up."""

    def __init__(self, values: dict[str, np.ndarray], env: OffScreenRenderEnv, moment: _Shown) -> None:
        super().__init__(values)
        self._env, self._moment = env, moment

    def __missing__(self, key: str) -> np.ndarray:
        if not key.endswith("_image"):
            raise KeyError(key)
        image = self[key] = self._env.draw(key.removesuffix("_image"), self._moment)
        return image


class _Controller:
    """What code reads of robosuite's controller. Displacements are relative; setting that otherwise raises EnvError."""

    def __init__(self, env: OffScreenRenderEnv) -> None:
        self._env = env

    @property
    def ee_pos(self) -> np.ndarray:
        return self._env.position

    @property
    def ee_ori_mat(self) -> np.ndarray:
        return self._env.orientation

    @property
    def use_delta(self) -> bool:
        return True

    @use_delta.setter
    def use_delta(self, value: bool) -> None:
        if not value:
            raise EnvError("fast LIBERO has relative actions (use_delta=True) only; use hf-libero's OffScreenRenderEnv")


class Task(NamedTuple):
    """As hf-libero's benchmark describes a task."""

    name: str
    language: str
    problem: str
    problem_folder: str
    bddl_file: str
    init_states_file: str


class Benchmark:
    """One suite, with the methods of hf-libero's benchmark that evaluations use, and without torch.

    ``task_order_index`` must be 0, the order of the published results.
    """

    def __init__(self, name: str, task_order_index: int = 0) -> None:
        if task_order_index != 0:
            raise EnvError(f"task_order_index={task_order_index}: only 0, the benchmark's own order, is here")
        self.name = name
        self._tasks = suite_tasks(name)
        self.tasks = [_described(task) for task in self._tasks]
        self.n_tasks = len(self.tasks)

    def get_num_tasks(self) -> int:
        return self.n_tasks

    def get_task_names(self) -> list[str]:
        return [task.name for task in self.tasks]

    def get_task(self, i: int) -> Task:
        return self.tasks[i]

    def get_task_bddl_file_path(self, i: int) -> str:
        return str(self._tasks[i].bddl_file)

    def get_task_init_states(self, i: int) -> np.ndarray:
        """float64 [50, 1 + nq + nv]."""
        return load_init_states(self._tasks[i])


def get_benchmark_dict() -> dict[str, Any]:
    """Constructors of the suites by name, as hf-libero's function of this name."""
    return {name: partial(Benchmark, name) for name in STEP_LIMITS}


def _described(task: LiberoTask) -> Task:
    files = task.bddl_file.name, task.bddl_file.with_suffix(".pruned_init").name
    return Task(task.name, task.instruction, "Libero", task.suite, *files)


def _task_of(bddl_file: Path) -> LiberoTask:
    suite = bddl_file.parent.name
    if suite in STEP_LIMITS:
        for task in suite_tasks(suite):
            if task.bddl_file.name == bddl_file.name:
                return task
    raise EnvError(f"{bddl_file} is none of hf-libero's 130 tasks: fast LIBERO plays these only")
