"""What a simulator shows where demonstrations begin, and where their actions lead in it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from envs.base.demonstration_records import Demonstrations
from envs.base.vector_env import EnvError, VectorEnv, empty_observation
from vla_rl.core.records import EpisodeSpec, Observation

_PLACEMENTS, _MOST_PLACEMENTS = 6, 64  # whose beginnings are looked at; more where none begins as the demonstrations do
_NEAR = 0.02  # of a number's range in the demonstrations
_REPLAYS = 4
_LONGEST, _EVERY = 60, 3  # control steps of a replay, and between two looks


class Replay(NamedTuple):
    """A demonstration's actions, played in the simulator from a similar beginning; m looks at it."""

    rows: np.ndarray  # int64 [m], of the demonstrations
    images: np.ndarray  # uint8 [m, V, S, S, 3]
    proprio: np.ndarray  # float32 [m, P]


class Simulated(NamedTuple):
    """A simulator's side of the comparison."""

    images: np.ndarray  # uint8 [n, V, S, S, 3], at the beginning of n episodes
    proprio: np.ndarray  # float32 [n, P], likewise
    expert: np.ndarray  # float32 [n, A], its first actions; no row without an expert
    replays: Sequence[Replay]


def simulate(env: VectorEnv, demos: Demonstrations) -> Simulated:
    """In environment 0. Nothing here is random, so that two calls agree."""
    tasks = np.unique(demos.task).tolist()
    chosen = np.unique(np.linspace(0, demos.num_demonstrations - 1, _REPLAYS).astype(int))
    size = np.maximum(np.ptp(demos.proprio, axis=0), 1e-6)
    starts = demos.proprio[demos.offsets[chosen]]
    begun: list[tuple[EpisodeSpec, Observation, np.ndarray | None]] = []
    far = np.full((_MOST_PLACEMENTS, len(chosen)), np.inf)
    for number in range(_MOST_PLACEMENTS):
        if number >= _PLACEMENTS and far.min(axis=0).max() < _NEAR:
            break
        episode = EpisodeSpec(number, tasks[number % len(tasks)], number)
        env.reset([0], [episode])
        seen = _look(env)
        begun.append((episode, seen, _expert(env)))
        away = (np.abs(starts - seen.proprio[0]) / size).max(axis=1, initial=0.0)
        far[number] = np.where(demos.task[demos.offsets[chosen]] == episode.task, away, np.inf)
    nearest = far.argmin(axis=0)
    replays = [_replay(env, demos, d, begun[n][0]) for d, n in zip(chosen.tolist(), nearest.tolist(), strict=True)]
    expert = [action for _, _, action in begun if action is not None]
    return Simulated(
        images=np.stack([seen.images[0] for _, seen, _ in begun]),
        proprio=np.stack([seen.proprio[0] for _, seen, _ in begun]),
        expert=np.array(expert, np.float32).reshape(-1, env.spec.action_dim),
        replays=replays,
    )


def _look(env: VectorEnv) -> Observation:
    seen = empty_observation(env.spec, env.num_envs)
    env.observe([0], seen)
    return seen


def _expert(env: VectorEnv) -> np.ndarray | None:
    try:
        return env.expert_action(0)
    except EnvError:
        return None


def _replay(env: VectorEnv, demos: Demonstrations, number: int, episode: EpisodeSpec) -> Replay:
    first, end = (int(row) for row in demos.offsets[number : number + 2])
    env.reset([0], [episode])
    rows, seen = [], []
    for row in range(first, min(end, first + _LONGEST)):
        if (row - first) % _EVERY == 0:
            rows.append(row)
            seen.append(_look(env))
        result = env.step([0], demos.actions[row][None, None])
        if result.terminated[0] or result.truncated[0]:
            break
    return Replay(np.array(rows), np.stack([s.images[0] for s in seen]), np.stack([s.proprio[0] for s in seen]))
