"""hf-libero's own environment behind the ``VectorEnv`` protocol: the reference for ``LiberoVectorEnv``.

One ``OffScreenRenderEnv`` a slot, driven as the evaluation scripts of the OpenVLA papers drive it: the model rebuilt at
every reset, every camera rendered at every control step, settling included. ``env.implementation=untouched`` selects
it, to measure what the other one gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.base import EnvError
from envs.libero.protocol.conventions import NO_OP, arm_noise, pose
from envs.libero.protocol.tasks import LiberoTask
from envs.libero.slots import Slot, SlotwiseEnv
from vla_rl.core.records import Episode, Observation


class UntouchedEnv:
    """One task's ``OffScreenRenderEnv``; ``obs`` is its latest observation."""

    def __init__(self, task: LiberoTask, cameras: Sequence[str], size: int) -> None:
        from libero.libero.envs.env_wrapper import OffScreenRenderEnv

        self.env: Any = OffScreenRenderEnv(
            bddl_file_name=str(task.bddl_file), camera_names=list(cameras), camera_heights=size, camera_widths=size
        )
        self.obs: dict[str, np.ndarray] = {}

    def reset(self, seed: int, init_state: np.ndarray | None, joint_noise: float, settle_steps: int) -> None:
        """Start an episode, settling steps included."""
        # Every rebuild appends LIBERO's samplers of joint positions once more, which shifts its random stream.
        self.env.env.object_property_initializers.clear()
        self.make_current()
        np.random.seed(seed)
        self.obs = self.env.reset()
        if init_state is not None:
            self.obs = self.env.set_init_state(init_state)
        elif joint_noise:
            state = self.env.get_sim_state()
            state[1:8] += arm_noise(seed, joint_noise)
            self.obs = self.env.set_init_state(state)
        for _ in range(settle_steps):
            self.step(NO_OP)

    def step(self, action: np.ndarray) -> bool:
        """One control step, float64 [7] in robosuite's convention; whether the goal holds after it."""
        self.make_current()
        self.obs, _, done, _ = self.env.step(list(action))
        return bool(done)

    def make_current(self) -> None:
        """Each of these environments has a GL context of its own."""
        self.env.env.sim._render_context_offscreen.gl_ctx.make_current()

    def image(self, camera: str) -> np.ndarray:
        """uint8 [H, W, 3], rotated by 180 degrees."""
        return self.obs[f"{camera}_image"][::-1, ::-1]

    def proprioception(self) -> np.ndarray:
        """float64 [8]."""
        return pose(self.obs["robot0_eef_pos"], self.obs["robot0_eef_quat"], self.obs["robot0_gripper_qpos"])

    def close(self) -> None:
        self.env.close()


@dataclass(slots=True)
class _Slot(Slot):
    env: UntouchedEnv


class UntouchedLiberoVectorEnv(SlotwiseEnv[_Slot]):
    """See the module. Raises as ``LiberoVectorEnv`` does."""

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """See ``VectorEnv.reset``."""
        config = self.config
        for index, episode in zip(slots, episodes, strict=True):
            init_state = self.init_state(episode)
            old = self.slots[index]
            if old is not None and old.episode.task == episode.task:
                env = old.env
            else:
                if old is not None:
                    old.env.close()
                env = UntouchedEnv(self.tasks[episode.task], self.spec.views, self.spec.image_size)
            env.reset(episode.seed, init_state, config.joint_noise, config.settle_steps)
            self.slots[index] = _Slot(episode, env)

    def _advance(self, slot: _Slot, command: np.ndarray) -> bool:
        return slot.env.step(command)

    def _frame(self, slot: _Slot) -> np.ndarray:
        return slot.env.image(self.spec.views[0])

    def observe(self, slots: Sequence[int], out: Observation) -> None:
        """See ``VectorEnv.observe``."""
        for index in slots:
            slot = self.occupied(index)
            for view, camera in enumerate(self.spec.views):
                out.images[index, view] = slot.env.image(camera)
            out.task[index] = slot.episode.task
            if self.spec.proprio_dim:
                out.proprio[index] = slot.env.proprioception()

    def expert_action(self, slot: int) -> np.ndarray:
        """There is none here."""
        raise EnvError("env.implementation=untouched has no expert: collect demonstrations with implementation=fast")

    def potential(self, slots: Sequence[int]) -> np.ndarray:
        """See ``VectorEnv.potential``. Always raises EnvError: it would take what hf-libero does not offer."""
        raise EnvError("env.implementation=untouched has no potential: set env.implementation=fast, or env.shaping=0")

    def close(self) -> None:
        """See ``VectorEnv.close``."""
        for slot in self.slots:
            if slot is not None:
                slot.env.close()
        self.slots = [None] * self.num_slots
