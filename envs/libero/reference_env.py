"""hf-libero's own environment behind the ``VectorEnv`` interface: the reference for ``LiberoVectorEnv``.

Each environment is one ``OffScreenRenderEnv``, used as the evaluation scripts of the OpenVLA papers use it: the model
is rebuilt at every reset, and every camera is rendered at every control step, settling included. Select it with
``env.implementation=reference``, to measure what the fast implementation gains.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.base import EnvError
from envs.base.vector_env import EnvInstance
from envs.libero.protocol.conventions import NO_OP, arm_noise, pose
from envs.libero.protocol.tasks import LiberoTask
from envs.libero.sequential_env import SequentialVectorEnv
from vla_rl.core.records import EpisodeSpec


class ReferenceEnv:
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
        """One control step, float64 [7] in robosuite's convention; returns whether the goal holds after it."""
        self.make_current()
        self.obs, _, done, _ = self.env.step(list(action))
        return bool(done)

    def make_current(self) -> None:
        """Select this environment's GL context: each has its own."""
        self.env.env.sim._render_context_offscreen.gl_ctx.make_current()

    def image(self, camera: str) -> np.ndarray:
        """uint8 [H, W, 3], rotated by 180 degrees."""
        return self.obs[f"{camera}_image"][::-1, ::-1]

    def proprioception(self) -> np.ndarray:
        """float64 [8]; see ``conventions.pose``."""
        return pose(self.obs["robot0_eef_pos"], self.obs["robot0_eef_quat"], self.obs["robot0_gripper_qpos"])

    def close(self) -> None:
        self.env.close()


@dataclass(slots=True)
class _Instance(EnvInstance):
    env: ReferenceEnv


class ReferenceLiberoVectorEnv(SequentialVectorEnv[_Instance]):
    """See the module. It has no expert and no potential: hf-libero offers neither."""

    def _start(self, env_id: int, episode: EpisodeSpec, previous: _Instance | None) -> _Instance:
        if previous is not None and previous.episode.task == episode.task:
            env = previous.env
        else:
            if previous is not None:
                previous.env.close()
            env = ReferenceEnv(self.tasks[episode.task], self.spec.views, self.spec.image_size)
        seed, start = self._placement_seed(episode), self._init_state(episode)
        env.reset(seed, start, self.config.joint_noise, self.config.settle_steps)
        return _Instance(episode, env)

    def _execute(self, instance: _Instance, command: np.ndarray) -> bool:
        return instance.env.step(command)

    def _frame(self, instance: _Instance) -> np.ndarray:
        return instance.env.image(self.spec.views[0])

    def _images(self, instance: _Instance) -> np.ndarray:
        return np.stack([instance.env.image(camera) for camera in self.spec.views])

    def _proprio(self, instance: _Instance) -> np.ndarray:
        return instance.env.proprioception()

    def expert_action(self, env_id: int) -> np.ndarray:
        raise EnvError("env.implementation=reference has no expert: collect demonstrations with implementation=fast")

    def potential(self, env_ids: Sequence[int]) -> np.ndarray:
        raise EnvError("env.implementation=reference has no potential: set env.implementation=fast, or env.shaping=0")

    def close(self) -> None:
        for instance in self._instances:
            if instance is not None:
                instance.env.close()
        super().close()
