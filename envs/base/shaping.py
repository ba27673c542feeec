"""Reward shaping by potential differences, around any simulator that has a potential.

Every chunk's reward gains ``scale * (potential after - potential before)``. An episode therefore gains as much as its
potential grew, whatever path it took. With ``algo.gamma=1`` circling therefore earns nothing (Ng, Harada and Russell,
1999). Below 1 it does earn a little: what is gained early counts more than what is lost later, because the differences
are not discounted as theirs are. RL4VLA's reward for ManiSkill's tasks is of this kind. Success is not changed.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from envs.base import VectorEnv
from envs.base.wrapper import EnvWrapper
from vla_rl.core.records import EpisodeSpec, StepResult


def shaped(env: VectorEnv, scale: float) -> VectorEnv:
    """``env`` with shaped rewards; ``env`` itself if ``scale`` is 0."""
    return ShapedEnv(env, scale) if scale else env


class ShapedEnv(EnvWrapper):
    """``env`` with shaped rewards; everything else passes through. Raises EnvError if it has no potential."""

    def __init__(self, env: VectorEnv, scale: float) -> None:
        super().__init__(env)
        self._scale = scale
        self._potential = np.zeros(env.num_envs, np.float32)

    def reset(self, env_ids: Sequence[int], episodes: Sequence[EpisodeSpec]) -> None:
        self._env.reset(env_ids, episodes)
        self._potential[list(env_ids)] = self._env.potential(env_ids)

    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> StepResult:
        result = self._env.step(env_ids, actions)
        rows, reached = list(env_ids), self._env.potential(env_ids)
        rewards = result.rewards.copy()
        rewards[np.arange(len(rows)), result.num_steps - 1] += self._scale * (reached - self._potential[rows])
        self._potential[rows] = reached
        return replace(result, rewards=rewards)
