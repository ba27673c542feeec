"""LIBERO behind the ``VectorEnv`` protocol, by the evaluation protocol of the OpenVLA papers.

An episode is: placement (a benchmark initial state, or LIBERO's own sampler), settling no-ops, then control steps at
20 Hz until success or the suite's step limit. What a policy sees and what the simulator computes equal the untouched
``OffScreenRenderEnv`` bit for bit; what differs is the cost (see ``task_model``, ``stepping`` and ``rendering``).
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from envs.base import EnvError, VectorEnv
from envs.libero.bootstrap import import_libero
from envs.libero.conventions import pose, to_robosuite
from envs.libero.expert import Expert
from envs.libero.rendering import Renderer
from envs.libero.spec import libero_spec
from envs.libero.task_model import SlotState, TaskModel
from envs.libero.tasks import load_init_states, select_tasks
from vla_rl.config import LiberoConfig
from vla_rl.types import Episode, Observation, StepResult

MAX_CACHED_MODELS = 10  # a whole suite of ten; 0.15 to 0.25 GiB each (measured on original assets at 128 pixels)
_SETTLE = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])


@dataclass(slots=True)
class _Scene:
    """One task's model and renderer, in this process."""

    model: TaskModel
    renderer: Renderer
    cameras: list[int]


@dataclass(slots=True)
class _Slot:
    scene: _Scene
    state: SlotState
    episode: Episode
    steps: int = 0
    running: bool = True
    frames: list[np.ndarray] = field(default_factory=list)
    expert: Expert | None = None


class LiberoVectorEnv(VectorEnv):
    """``num_slots`` episodes of LIBERO tasks in one process, stepped in turn.

    Raises EnvError where LIBERO, its GL library or a configured task is missing, ValueError where ``num_slots`` is not
    positive.
    """

    def __init__(self, config: LiberoConfig, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots={num_slots}: a vectorized environment needs at least one slot")
        self._assets = import_libero(config.assets)
        self._tasks = select_tasks(config.suite, config.tasks)
        self._settle_steps = config.settle_steps
        self._joint_noise = config.joint_noise
        self._antialiasing = config.antialiasing
        self.num_slots = num_slots
        self.spec = libero_spec(config)
        self._scenes: OrderedDict[int, _Scene] = OrderedDict()
        self._slots: list[_Slot | None] = [None] * num_slots

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """See ``VectorEnv.reset``. Fixtures, and objects where ``init_state`` is None, are placed by ``episode.seed``.

        Raises EnvError where the task or the initial state does not exist.
        """
        for index, episode in zip(slots, episodes, strict=True):
            init_state = self._init_state(episode)
            old, self._slots[index] = self._slots[index], None  # from here on it holds no model
            scene = self._scene(episode.task)
            state = old.state if old is not None and old.scene is scene else scene.model.new_slot()
            self._slots[index] = slot = _Slot(scene, state, episode)
            scene.model.place(state, episode.seed, init_state, self._joint_noise)
            for _ in range(self._settle_steps):
                scene.model.step(slot.state, _SETTLE)

    def step(self, slots: Sequence[int], actions: np.ndarray) -> StepResult:
        """See ``VectorEnv.step``. Raises ValueError for a slot without a running episode and for NaN or infinity."""
        count, chunk = actions.shape[:2]
        rewards = np.zeros((count, chunk), np.float32)
        num_steps = np.zeros(count, np.int32)
        success = np.zeros(count, bool)
        truncated = np.zeros(count, bool)
        for row, index in enumerate(slots):
            slot = self._running(index)
            commands = to_robosuite(actions[row])
            for command in commands:
                slot.scene.model.step(slot.state, command)
                slot.steps += 1
                num_steps[row] += 1
                if slot.episode.record:
                    slot.frames.append(self._images(slot)[0])
                success[row] = slot.scene.model.success(slot.state)
                truncated[row] = not success[row] and slot.steps >= self.spec.max_episode_steps
                if success[row] or truncated[row]:
                    slot.running = False
                    break
            rewards[row, num_steps[row] - 1] = success[row]
        return StepResult(rewards, num_steps, terminated=success, truncated=truncated, success=success.copy())

    def observe(self, slots: Sequence[int], out: Observation) -> None:
        """See ``VectorEnv.observe``."""
        for index in slots:
            slot = self._occupied(index)
            self._images(slot, out.images[index])
            out.task[index] = slot.episode.task
            if self.spec.proprio_dim:
                out.proprio[index] = proprioception(slot.state)  # cast to float32

    def frames(self, slot: int) -> list[np.ndarray]:
        """See ``VectorEnv.frames``: the main view after each control step."""
        return self._occupied(slot).frames

    def expert_action(self, slot: int) -> np.ndarray:
        """See ``VectorEnv.expert_action``. Raises EnvError where no plan is known for the task's goal."""
        occupied = self._occupied(slot)
        if occupied.expert is None:
            occupied.expert = Expert(occupied.scene.model, occupied.state)
        return occupied.expert.action()

    def demo_state(self, slot: int) -> dict[str, np.ndarray]:
        """What LIBERO's demonstration files hold of a moment beside images and action (see ``envs.demos``)."""
        state = self._occupied(slot).state
        seen, data = state.seen, state.data
        eef = proprioception(state)[:6]
        return {
            "states": np.concatenate([[data.time], data.qpos, data.qvel]),
            "robot_states": np.concatenate([seen.joints[7:], seen.eef_pos, seen.eef_quat[[1, 2, 3, 0]]]),
            "obs/ee_states": eef,
            "obs/ee_pos": eef[:3],
            "obs/ee_ori": eef[3:],
            "obs/gripper_states": seen.joints[7:].copy(),
            "obs/joint_states": seen.joints[:7].copy(),
        }

    def close(self) -> None:
        """See ``VectorEnv.close``."""
        self._slots = [None] * self.num_slots
        while self._scenes:
            self._scenes.popitem()[1].renderer.close()
        gc.collect()

    def _init_state(self, episode: Episode) -> np.ndarray | None:
        if not 0 <= episode.task < len(self._tasks):
            raise EnvError(f"episode {episode.id} asks for task {episode.task}: there are {len(self._tasks)} (from 0)")
        if episode.init_state is None:
            return None
        task = self._tasks[episode.task]
        states = load_init_states(task)
        if not 0 <= episode.init_state < len(states):
            raise EnvError(
                f"episode {episode.id} asks for initial state {episode.init_state}: {task} has 0..{len(states) - 1}"
            )
        return states[episode.init_state]

    def _scene(self, task: int) -> _Scene:
        """The task's model, from the cache or built; one that no slot needs may be dropped for it."""
        scene = self._scenes.get(task)
        if scene is None:
            self._make_room()
            model = TaskModel(self._tasks[task], self._assets)
            renderer = Renderer(model.model, self.spec.image_size, antialiasing=self._antialiasing)
            scene = _Scene(model, renderer, [model.model.camera(name).id for name in self.spec.views])
            self._scenes[task] = scene
        self._scenes.move_to_end(task)
        return scene

    def _make_room(self) -> None:
        in_use = {slot.episode.task for slot in self._slots if slot is not None}
        for task in [task for task in self._scenes if task not in in_use]:  # the least recently used first
            if len(self._scenes) >= MAX_CACHED_MODELS:
                self._scenes.pop(task).renderer.close()
                gc.collect()  # robosuite's objects refer to each other in circles

    def _images(self, slot: _Slot, out: np.ndarray | None = None) -> np.ndarray:
        """uint8 [V, H, W, 3]: all views, or the main one alone where no array is given."""
        scene, state, size = slot.scene, slot.state, self.spec.image_size
        cameras = scene.cameras if out is not None else scene.cameras[:1]
        out = out if out is not None else np.empty((1, size, size, 3), np.uint8)
        scene.model.bind(state)
        scene.model.show_lamps(state.seen_lit)
        scene.renderer.pose(state.seen.qpos)
        for view, camera in enumerate(cameras):
            scene.renderer.render(camera, out[view])
        return out

    def _occupied(self, index: int) -> _Slot:
        slot = self._slots[index]
        if slot is None:
            raise ValueError(f"slot {index} holds no episode: reset it first")
        return slot

    def _running(self, index: int) -> _Slot:
        slot = self._occupied(index)
        if not slot.running:
            raise ValueError(f"slot {index}: episode {slot.episode.id} has ended: reset the slot before stepping it")
        return slot


def proprioception(state: SlotState) -> np.ndarray:
    """float64 [8]; see ``conventions.pose``."""
    seen = state.seen
    return pose(seen.eef_pos, seen.eef_quat[[1, 2, 3, 0]], seen.joints[7:])
