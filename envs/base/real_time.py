"""A robot's pace around any simulator, to measure what learning would cost on one: it sleeps, and computes nothing."""

import time
from collections.abc import Sequence

import numpy as np

from envs.base.config import RealTimeConfig
from envs.base.vector_env import VectorEnv
from envs.base.wrapper import EnvWrapper
from vla_rl.core.records import EpisodeSpec, Observation, StepResult


def paced(env: VectorEnv, pace: RealTimeConfig | None) -> VectorEnv:
    """``env`` at a robot's pace; ``env`` itself without one."""
    return RealTimeEnv(env, pace) if pace else env


class RealTimeEnv(EnvWrapper):
    """Resets and chunks take as long as ``pace`` says; those of evaluations, which ask no robot, only what they take.

    Environments that are stepped together are robots that move at the same time: the longest chunk counts. A robot
    stands still for its inference once after each observation, also where an expert then plays the chunk step by step.
    """

    def __init__(self, env: VectorEnv, pace: RealTimeConfig) -> None:
        super().__init__(env)
        self._pace = pace
        self._is_robot = np.zeros(env.num_envs, bool)
        self._observed = np.zeros(env.num_envs, bool)  # since their last step

    def reset(self, env_ids: Sequence[int], episodes: Sequence[EpisodeSpec]) -> None:
        start = time.monotonic()
        super().reset(env_ids, episodes)
        self._is_robot[list(env_ids)] = [not episode.evaluation for episode in episodes]
        if self._is_robot[list(env_ids)].any():
            self._wait(start, self._pace.robot_seconds(episodes=1))

    def observe(self, env_ids: Sequence[int], out: Observation) -> None:
        super().observe(env_ids, out)
        self._observed[list(env_ids)] = True

    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> StepResult:
        start = time.monotonic()
        result = super().step(env_ids, actions)
        rows = np.asarray(env_ids)
        robots = self._is_robot[rows]
        if robots.any():
            chunks = int(self._observed[rows[robots]].any())
            self._wait(start, self._pace.robot_seconds(steps=int(result.num_steps[robots].max()), chunks=chunks))
        self._observed[rows] = False
        return result

    def _wait(self, start: float, seconds: float) -> None:
        time.sleep(max(0.0, start + seconds / self._pace.speed - time.monotonic()))
