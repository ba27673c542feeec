"""Reward shaping by potential differences, around any simulator that has a potential.

Every chunk's reward gains ``scale * (potential after - potential before)``: an episode gains as much as its potential
grew, whatever the way there, so circling earns nothing (Ng, Harada and Russell, 1999, without their discount; RL4VLA's
reward of ManiSkill's tasks is of this kind). Success is not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from envs.base import VectorEnv
from vla_rl.core.records import Episode, Observation, StepResult


def shaped(env: VectorEnv, scale: float) -> VectorEnv:
    """``env`` itself where ``scale`` is 0."""
    return ShapedEnv(env, scale) if scale else env


class ShapedEnv(VectorEnv):
    """``env`` with shaped rewards; all else passes through. Raises EnvError where it has no potential."""

    def __init__(self, env: VectorEnv, scale: float) -> None:
        self.spec, self.num_slots = env.spec, env.num_slots
        self._env, self._scale = env, scale
        self._potential = np.zeros(env.num_slots, np.float32)

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        self._env.reset(slots, episodes)
        self._potential[list(slots)] = self._env.potential(slots)

    def step(self, slots: Sequence[int], actions: np.ndarray) -> StepResult:
        result = self._env.step(slots, actions)
        rows, reached = list(slots), self._env.potential(slots)
        rewards = result.rewards.copy()
        rewards[np.arange(len(rows)), result.num_steps - 1] += self._scale * (reached - self._potential[rows])
        self._potential[rows] = reached
        return replace(result, rewards=rewards)

    def observe(self, slots: Sequence[int], out: Observation) -> None:
        self._env.observe(slots, out)

    def frames(self, slot: int) -> list[np.ndarray]:
        return self._env.frames(slot)

    def potential(self, slots: Sequence[int]) -> np.ndarray:
        return self._env.potential(slots)

    def expert_action(self, slot: int) -> np.ndarray:
        return self._env.expert_action(slot)

    def close(self) -> None:
        self._env.close()
