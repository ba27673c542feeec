"""The world model as a simulator: imagined episodes start in real states, and policy, inference and recording see no
difference.

The model does not draw what happens: an imagined episode goes on for as many chunks as its horizon, each weighed by the
probability that nothing has ended before, times the discount. The reward of step k is the probability of success there,
so weighed; the last step also earns the discounted value of what follows. So the episode's return is its expected one,
and nothing is bootstrapped. With a horizon of one chunk no frame has to be predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np

from envs.base import EnvError
from envs.base.vector_env import EnvInstance, SimulatorEnv
from vla_rl.core.records import Array, EnvSpec, EpisodeSpec, Observation, StepResult


@dataclass(frozen=True, slots=True)
class State:
    """A real state, or one that is predicted: one row of a trajectory's arrays, and the frozen features."""

    images: Array  # uint8 [V, H, W, 3]
    first: Array  # uint8 [V, H, W, 3], the real episode's first frame
    proprio: Array  # float32 [P]
    task: int
    elapsed: float
    features: Array  # float32 [F]


@dataclass(frozen=True, slots=True)
class ChunkRating:
    """What n chunks are expected to lead to, and to earn."""

    mean: Array  # float32 [n], expected return
    deviation: Array  # float32 [n], between the members of the ensemble
    success_at: Array  # float32 [n, K], probability of success at each step
    continuation: Array  # float32 [n], the discount times the probability that nothing ends
    next_proprio: Array  # float32 [n, P]


class Dynamics(Protocol):
    """What an imagined environment asks the world model."""

    def start(self, number: int) -> tuple[State, int]:
        """The state with this number, which ``EpisodeSpec.seed`` names, and the horizon, in chunks. Raises KeyError."""

    def rate(self, states: Sequence[State], actions: Array) -> ChunkRating:
        """Rate a chunk in each state; ``actions``: float32 [n, K, A], in physical units."""

    def advance(self, states: Sequence[State], rating: ChunkRating, elapsed: Sequence[float]) -> list[State]:
        """The states after the rated chunks."""


@dataclass(slots=True)
class _Imagined(EnvInstance):
    state: State
    chunks_left: int
    weight: float = 1.0  # of what follows


class ImaginedEnv(SimulatorEnv[_Imagined]):
    """See the module. ``disagreement``: the penalty for each unit of the ensemble's standard deviation."""

    def __init__(self, spec: EnvSpec, num_envs: int, dynamics: Dynamics, disagreement: float) -> None:
        super().__init__(replace(spec, assets="imagined"), num_envs)
        self._dynamics, self._disagreement = dynamics, disagreement

    def _start(self, env_id: int, episode: EpisodeSpec, previous: _Imagined | None) -> _Imagined:
        state, horizon = self._dynamics.start(episode.seed)
        steps = round(state.elapsed * self.spec.max_episode_steps)
        return _Imagined(episode, state, horizon, steps=steps)

    def _step(self, env_ids: Sequence[int], instances: list[_Imagined], actions: np.ndarray) -> StepResult:
        n, chunk = actions.shape[:2]
        left = np.array([self.spec.max_episode_steps - instance.steps for instance in instances])
        num_steps = np.minimum(chunk, left).astype(np.int32)
        rating = self._dynamics.rate([instance.state for instance in instances], actions)
        for instance, steps in zip(instances, num_steps.tolist(), strict=True):
            instance.steps += steps
            instance.chunks_left -= 1
            instance.running = instance.chunks_left > 0 and instance.steps < self.spec.max_episode_steps
        ends = np.array([not instance.running for instance in instances])
        weight = np.array([instance.weight for instance in instances])
        rewards = rating.success_at * (np.arange(chunk) < num_steps[:, None])
        rest = np.where(ends, rating.mean - rewards.sum(axis=1), 0.0) - self._disagreement * rating.deviation
        rewards[np.arange(n), num_steps - 1] += rest
        self._go_on([i for i in range(n) if not ends[i]], instances, rating)
        no = np.zeros(n, bool)
        return StepResult((rewards * weight[:, None]).astype(np.float32), num_steps, ends, no, no)

    def _go_on(self, rows: Sequence[int], instances: Sequence[_Imagined], rating: ChunkRating) -> None:
        """Move the instances of these rows to their next state."""
        if not rows:
            return
        moving = [instances[i] for i in rows]
        elapsed = [instance.steps / self.spec.max_episode_steps for instance in moving]
        rated = ChunkRating(**{f.name: getattr(rating, f.name)[list(rows)] for f in fields(rating)})
        states = self._dynamics.advance([instance.state for instance in moving], rated, elapsed)
        for instance, state, continuation in zip(moving, states, rated.continuation.tolist(), strict=True):
            instance.state = state
            instance.weight *= continuation

    def _sense(self, env_ids: Sequence[int], out: Observation) -> None:
        for env_id in env_ids:
            state = self.instance(env_id).state
            out.images[env_id], out.proprio[env_id], out.task[env_id] = state.images, state.proprio, state.task

    def state(self, env_ids: Sequence[int]) -> np.ndarray:
        """See ``VectorEnv``. The simulator's state is not imagined: zeros, which nobody reads."""
        return np.zeros((len(env_ids), self.spec.state_dim), np.float32)

    def expert_action(self, env_id: int) -> np.ndarray:
        raise EnvError("an imagined environment has no scripted expert")

    def potential(self, env_ids: Sequence[int]) -> np.ndarray:
        raise EnvError("an imagined environment has no potential: set env.shaping=0")
