"""LIBERO behind the ``VectorEnv`` protocol, by the evaluation protocol of the OpenVLA papers.

An episode is: placement (a benchmark initial state, or LIBERO's own sampler), settling no-ops, then control steps at
20 Hz until success or the suite's step limit. What a policy sees and what the simulator computes equal the untouched
``OffScreenRenderEnv`` bit for bit; what differs is the cost (see ``task_model``, ``stepping`` and ``rendering``).
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import mujoco
import numpy as np

from envs.libero.config import LiberoConfig
from envs.libero.expert.expert import Expert
from envs.libero.fast.rendering import Renderer
from envs.libero.fast.task_model import SlotState, TaskModel
from envs.libero.protocol.conventions import NO_OP, pose
from envs.libero.slots import Slot, SlotwiseEnv
from vla_rl.core.records import Episode, Observation

_MEMORY_FACTOR = 2.0  # the GL library has its own copy; measured 1.9 to 2.4 on original assets at 128 and 256 pixels


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
class _Slot(Slot):
    scene: _Scene
    state: SlotState
    expert: Expert | None = None


class LiberoVectorEnv(SlotwiseEnv[_Slot]):
    """See the module. Raises EnvError where LIBERO is missing, and as ``SlotwiseEnv`` does."""

    def __init__(self, config: LiberoConfig, num_slots: int) -> None:
        super().__init__(config, num_slots)
        self._scenes: OrderedDict[int, _Scene] = OrderedDict()

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """See ``VectorEnv.reset``. Fixtures, and objects where ``init_state`` is None, are placed by ``episode.seed``.

        Raises EnvError where the task or the initial state does not exist.
        """
        for index, episode in zip(slots, episodes, strict=True):
            init_state = self.init_state(episode)
            old, self.slots[index] = self.slots[index], None  # from here on it holds no model
            scene = self._scene(episode.task)
            state = old.state if old is not None and old.scene is scene else scene.model.new_slot()
            self.slots[index] = slot = _Slot(episode, scene, state)
            scene.model.place(state, episode.seed, init_state, self.config.joint_noise)
            for _ in range(self.config.settle_steps):
                scene.model.step(slot.state, NO_OP)

    def _advance(self, slot: _Slot, command: np.ndarray) -> bool:
        slot.scene.model.step(slot.state, command)
        return slot.scene.model.success(slot.state)

    def _frame(self, slot: _Slot) -> np.ndarray:
        return self._images(slot)[0]

    def observe(self, slots: Sequence[int], out: Observation) -> None:
        """See ``VectorEnv.observe``."""
        for index in slots:
            slot = self.occupied(index)
            self._images(slot, out.images[index])
            out.task[index] = slot.episode.task
            if self.spec.proprio_dim:
                out.proprio[index] = proprioception(slot.state)  # cast to float32

    def expert_action(self, slot: int) -> np.ndarray:
        """See ``VectorEnv.expert_action``. Raises EnvError where no plan is known for the task's goal."""
        occupied = self.occupied(slot)
        if occupied.expert is None:
            occupied.expert = Expert(occupied.scene.model, occupied.state)
        return occupied.expert.action()

    def potential(self, slots: Sequence[int]) -> np.ndarray:
        """1 where the gripper holds an object of the task's goal, else 0."""
        held = [slot.scene.model.holds_object(slot.state) for slot in map(self.occupied, slots)]
        return np.asarray(held, np.float32)

    def demo_state(self, slot: int) -> dict[str, np.ndarray]:
        """What LIBERO's demonstration files hold of a moment beside images and action; see ``demonstrations``."""
        state = self.occupied(slot).state
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
        self.slots = [None] * self.num_slots
        while self._scenes:
            self._scenes.popitem()[1].renderer.close()
        gc.collect()

    def _scene(self, task: int) -> _Scene:
        """The task's model, from the cache or built; others that no slot needs may be dropped for it."""
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
        in_use = {slot.episode.task for slot in self.slots if slot is not None}
        excess = scene.memory + sum(s.memory for s in self._scenes.values()) - self.config.model_cache_gib * 2**30
        for task in [task for task in self._scenes if task not in in_use]:  # the least recently used first
            if excess > 0:
                dropped = self._scenes.pop(task)
                excess -= dropped.memory
                dropped.renderer.close()
                del dropped
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


def proprioception(state: SlotState) -> np.ndarray:
    """float64 [8]; see ``conventions.pose``."""
    seen = state.seen
    return pose(seen.eef_pos, seen.eef_quat[[1, 2, 3, 0]], seen.joints[7:])
