"""Base of environments around others."""

from collections.abc import Sequence

import numpy as np

from envs.base.vector_env import VectorEnv
from vla_rl.core.records import EpisodeSpec, Observation, StepResult


class EnvWrapper(VectorEnv):
    """Everything passes through to the environment within; derive, and override what is different."""

    def __init__(self, env: VectorEnv) -> None:
        self.spec, self.num_envs, self._env = env.spec, env.num_envs, env

    def reset(self, env_ids: Sequence[int], episodes: Sequence[EpisodeSpec]) -> None:
        self._env.reset(env_ids, episodes)

    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> StepResult:
        return self._env.step(env_ids, actions)

    def observe(self, env_ids: Sequence[int], out: Observation) -> None:
        self._env.observe(env_ids, out)

    def frames(self, env_id: int) -> list[np.ndarray]:
        return self._env.frames(env_id)

    def potential(self, env_ids: Sequence[int]) -> np.ndarray:
        return self._env.potential(env_ids)

    def expert_action(self, env_id: int) -> np.ndarray:
        return self._env.expert_action(env_id)

    def state(self, env_ids: Sequence[int]) -> np.ndarray:
        return self._env.state(env_ids)

    def bare_seconds(self, env_id: int) -> dict[str, float]:
        return self._env.bare_seconds(env_id)

    def close(self) -> None:
        self._env.close()
