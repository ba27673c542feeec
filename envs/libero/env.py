"""LIBERO behind the ``VectorEnv`` interface, following the evaluation protocol of the OpenVLA papers.

An episode consists of the placement (a benchmark initial state, or LIBERO's own sampler), settling no-ops, and control
steps at 20 Hz until success or the suite's step limit. Observations and simulator states equal those of hf-libero's
``OffScreenRenderEnv`` bit for bit, at lower cost (see ``fast.task_model``, ``fast.stepping`` and ``fast.rendering``).
"""

import gc
import importlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mujoco
import numpy as np

from envs.base import VectorEnv
from envs.base.vector_env import EnvError, EnvInstance
from envs.libero.bootstrap import import_libero
from envs.libero.config import LiberoConfig
from envs.libero.expert.expert import Expert
from envs.libero.fast.rendering import Renderer
from envs.libero.fast.stepping import SUBSTEPS
from envs.libero.fast.task_model import SimState, TaskModel
from envs.libero.protocol.conventions import NO_OP, pose
from envs.libero.sequential_env import JOINTS, STATE_DIM, SequentialVectorEnv, env_spec
from vla_rl.core.records import EpisodeSpec, Observation

__all__ = ["LiberoVectorEnv", "env_spec", "make_env"]

_TRIALS = 11  # of what is timed
_MEMORY_FACTOR = 2.0  # the GL library has its own copy; measured 1.9 to 2.4 on original assets at 128 and 256 pixels


def make_env(config: LiberoConfig, num_envs: int) -> VectorEnv:
    """See ``envs.make_env``."""
    if config.implementation == "reference":
        from envs.libero.reference_env import ReferenceLiberoVectorEnv

        return ReferenceLiberoVectorEnv(config, num_envs)
    return LiberoVectorEnv(config, num_envs)


@dataclass(slots=True)
class _Scene:
    """One task's model and renderer, in this process."""

    model: TaskModel
    renderer: Renderer
    cameras: list[int]

    @property
    def memory(self) -> float:
        """Estimated, in bytes."""
        return _MEMORY_FACTOR * mujoco.mj_sizeModel(self.model.model)


@dataclass(slots=True)
class _Instance(EnvInstance):
    scene: _Scene
    state: SimState
    expert: Expert | None = None


def preload() -> None:
    """Load what the first environment would. It starts no thread, and makes no GL context."""
    import numba

    import_libero()
    importlib.import_module("libero.libero.envs")
    numba.njit(lambda number: number)(0)  # all of numba, which the drawing's functions need


class LiberoVectorEnv(SequentialVectorEnv[_Instance]):
    """See the module. Environments that play the same task share its model; models of other tasks are cached."""

    def __init__(self, config: LiberoConfig, num_envs: int) -> None:
        super().__init__(config, num_envs)
        self._scenes: OrderedDict[int, _Scene] = OrderedDict()

    def _start(self, env_id: int, episode: EpisodeSpec, previous: _Instance | None) -> _Instance:
        """Place fixtures, and objects if ``init_state`` is None, by ``_placement_seed``."""
        scene = self._scene(episode.task)
        state = previous.state if previous is not None and previous.scene is scene else scene.model.new_state()
        scene.model.place(state, self._placement_seed(episode), self._init_state(episode), self.config.joint_noise)
        for _ in range(self.config.settle_steps):
            scene.model.step(state, NO_OP)
        return _Instance(episode, scene, state)

    def _execute(self, instance: _Instance, command: np.ndarray) -> bool:
        instance.scene.model.step(instance.state, command)
        return instance.scene.model.success(instance.state)

    def _frame(self, instance: _Instance) -> np.ndarray:
        return self._draw(instance)[0]

    def _images(self, instance: _Instance) -> np.ndarray:
        size = self.spec.image_size
        return self._draw(instance, np.empty((len(self.spec.views), size, size, 3), np.uint8))

    def _sense(self, env_ids: Sequence[int], out: Observation) -> None:
        for env_id in env_ids:
            instance = self.instance(env_id)
            self._draw(instance, out.images[env_id])
            if self.spec.proprio_dim:
                out.proprio[env_id] = _proprioception(instance.state)  # cast to float32

    def expert_action(self, env_id: int) -> np.ndarray:
        instance = self.instance(env_id)
        if instance.expert is None:
            instance.expert = Expert(instance.scene.model, instance.state)
        return instance.expert.action()

    def potential(self, env_ids: Sequence[int]) -> np.ndarray:
        """1 while the gripper holds an object of the task's goal, else 0."""
        held = [instance.scene.model.holds_object(instance.state) for instance in map(self.instance, env_ids)]
        return np.asarray(held, np.float32)

    def state(self, env_ids: Sequence[int]) -> np.ndarray:
        """Place of the gripper, then positions and velocities of all joints, filled up with zeros: scenes differ."""
        found = np.zeros((len(env_ids), STATE_DIM), np.float32)
        for row, state in zip(found, (self.instance(env_id).state for env_id in env_ids), strict=True):
            qpos, qvel = state.data.qpos, state.data.qvel
            if len(qpos) > JOINTS:
                raise EnvError(
                    f"the scene has {len(qpos)} joint positions, more than {JOINTS}: use another critic_reads"
                )
            row[:3] = state.seen.eef_pos
            row[3 : 3 + len(qpos)] = qpos
            row[3 + JOINTS : 3 + JOINTS + len(qvel)] = qvel
        return found

    def demo_state(self, env_id: int) -> dict[str, np.ndarray]:
        """What LIBERO's demonstration files hold in addition to images and action; see ``demonstrations``."""
        state = self.instance(env_id).state
        seen, data = state.seen, state.data
        eef = _proprioception(state)[:6]
        return {
            "states": np.concatenate([[data.time], data.qpos, data.qvel]),
            "robot_states": np.concatenate([seen.joints[7:], seen.eef_pos, seen.eef_quat[[1, 2, 3, 0]]]),
            "obs/ee_states": eef,
            "obs/ee_pos": eef[:3],
            "obs/ee_ori": eef[3:],
            "obs/gripper_states": seen.joints[7:].copy(),
            "obs/joint_states": seen.joints[:7].copy(),
        }

    def bare_seconds(self, env_id: int) -> dict[str, float]:
        instance = self.instance(env_id)
        scene, now = instance.scene, instance.state.data
        data = mujoco.MjData(scene.model.model)
        data.qpos[:], data.qvel[:], data.ctrl[:] = now.qpos, now.qvel, now.ctrl
        drawing = 0.0
        for camera in scene.cameras:
            scene.model.bind(instance.state)
            image = np.empty((self.spec.image_size, self.spec.image_size, 3), np.uint8)
            scene.renderer.render(camera, image)
            while scene.renderer.is_compared:  # with a full drawing, which came last
                scene.renderer.render(camera, image)
            drawing += _seconds(scene.renderer.again)
        return {"simulate": _seconds(partial(mujoco.mj_step, scene.model.model, data, SUBSTEPS)), "render": drawing}

    def close(self) -> None:
        super().close()
        while self._scenes:
            self._scenes.popitem()[1].renderer.close()
        gc.collect()

    def _scene(self, task: int) -> _Scene:
        """The task's model, from the cache or built now; models that no environment uses may be dropped for it."""
        scene = self._scenes.get(task)
        if scene is None:
            model = TaskModel(self.tasks[task], self.assets)
            renderer = Renderer(model.model, self.spec.image_size, antialiasing=self.config.antialiasing)
            scene = _Scene(model, renderer, [model.model.camera(name).id for name in self.spec.views])
            self._make_room(scene)
            self._scenes[task] = scene
        self._scenes.move_to_end(task)
        return scene

    def _make_room(self, scene: _Scene) -> None:
        in_use = {instance.episode.task for instance in self._instances if instance is not None}
        excess = scene.memory + sum(s.memory for s in self._scenes.values()) - self.config.model_cache_gib * 2**30
        for task in [task for task in self._scenes if task not in in_use]:  # the least recently used first
            if excess > 0:
                dropped = self._scenes.pop(task)
                excess -= dropped.memory
                dropped.renderer.close()
                del dropped
                gc.collect()  # robosuite's objects refer to each other in circles

    def _draw(self, instance: _Instance, out: np.ndarray | None = None) -> np.ndarray:
        """uint8 [V, H, W, 3]: all views, or only the main one if no array is given."""
        scene, state, size = instance.scene, instance.state, self.spec.image_size
        cameras = scene.cameras if out is not None else scene.cameras[:1]
        out = out if out is not None else np.empty((1, size, size, 3), np.uint8)
        scene.model.bind(state)
        scene.model.show_lamps(state.seen_lit)
        scene.renderer.pose(state.seen.qpos)
        for view, camera in enumerate(cameras):
            scene.renderer.render(camera, out[view])
        return out


def _seconds(work: Callable[[], None]) -> float:
    """The median of several calls."""
    marks = [time.perf_counter()]
    for _ in range(_TRIALS):
        work()
        marks.append(time.perf_counter())
    return float(np.median(np.diff(marks)))


def _proprioception(state: SimState) -> np.ndarray:
    """float64 [8]; see ``conventions.pose``."""
    seen = state.seen
    return pose(seen.eef_pos, seen.eef_quat[[1, 2, 3, 0]], seen.joints[7:])
