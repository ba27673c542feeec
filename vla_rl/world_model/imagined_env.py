"""The world model as a simulator: imagined episodes start in real states, and policy, inference and recording see no
difference.

An episode is one chunk: the model rates it, and the rating is the episode's return. So nothing is bootstrapped, and no
frame has to be predicted. The reward of step k is the probability of success there; the last step also earns the
discounted value of what follows, less the penalty for disagreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from envs.base import EnvError
from envs.base.vector_env import EnvInstance, SimulatorEnv
from vla_rl.core.records import Array, EnvSpec, EpisodeSpec, Observation, StepResult


@dataclass(frozen=True, slots=True)
class Start:
    """A real state in which imagined episodes begin: one row of a trajectory's arrays, and the frozen features."""

    images: Array  # uint8 [V, H, W, 3]
    proprio: Array  # float32 [P]
    task: int
    elapsed: float
    features: Array  # float32 [F]


@dataclass(frozen=True, slots=True)
class ChunkRating:
    """What n chunks are expected to earn."""

    mean: Array  # float32 [n]
    deviation: Array  # float32 [n], between the members of the ensemble
    success_at: Array  # float32 [n, K], probability of success at each step


class ChunkRater(Protocol):
    """What an imagined environment asks the world model."""

    def start(self, number: int) -> Start:
        """The state with this number, which ``EpisodeSpec.seed`` names. Raises KeyError if there is none."""

    def rate(self, starts: Sequence[Start], actions: Array) -> ChunkRating:
        """Rate a chunk in each state; ``actions``: float32 [n, K, A], in physical units."""


@dataclass(slots=True)
class _Imagined(EnvInstance):
    start: Start


class ImaginedEnv(SimulatorEnv[_Imagined]):
    """See the module. ``disagreement``: the penalty for each unit of the ensemble's standard deviation."""

    def __init__(self, spec: EnvSpec, num_envs: int, rater: ChunkRater, disagreement: float) -> None:
        super().__init__(replace(spec, assets="imagined"), num_envs)
        self._rater, self._disagreement = rater, disagreement

    def _start(self, env_id: int, episode: EpisodeSpec, previous: _Imagined | None) -> _Imagined:
        start = self._rater.start(episode.seed)
        return _Imagined(episode, start, steps=round(start.elapsed * self.spec.max_episode_steps))

    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> StepResult:
        instances = self._running_instances(env_ids, actions)
        n, chunk = actions.shape[:2]
        left = np.array([self.spec.max_episode_steps - instance.steps for instance in instances])
        num_steps = np.minimum(chunk, left).astype(np.int32)
        rating = self._rater.rate([instance.start for instance in instances], actions)
        rewards = rating.success_at * (np.arange(chunk) < num_steps[:, None])
        rest = rating.mean - rewards.sum(axis=1) - self._disagreement * rating.deviation
        rewards[np.arange(n), num_steps - 1] += rest
        for instance, steps in zip(instances, num_steps.tolist(), strict=True):
            instance.steps += steps
            instance.running = False
        no = np.zeros(n, bool)
        return StepResult(rewards.astype(np.float32), num_steps, ~no, no, no)

    def _sense(self, env_ids: Sequence[int], out: Observation) -> None:
        for env_id in env_ids:
            start = self.instance(env_id).start
            out.images[env_id], out.proprio[env_id], out.task[env_id] = start.images, start.proprio, start.task

    def expert_action(self, env_id: int) -> np.ndarray:
        raise EnvError("an imagined environment has no scripted expert")

    def potential(self, env_ids: Sequence[int]) -> np.ndarray:
        raise EnvError("an imagined environment has no potential: set env.shaping=0")
