"""A short play of an environment of gymnasium with random actions, which tells what its spaces do not."""

from typing import Any, NamedTuple

import numpy as np

from envs.base import EnvError
from envs.gymnasium.played import Played
from envs.gymnasium.sight import Sight
from vla_rl.core.actions import ActionSpace

_FIRST, _OTHERS, _RESETS = 160, 10, 5  # most steps of the first episode, of each other one; episodes
_IMAGE = 16  # size of the views, which are only tried


class Probe(NamedTuple):
    """``infos``: of the steps. ``ranges``: P pairs for ``EnvSpec.proprio_range``. ``notes``: for people."""

    infos: list[dict[str, Any]]
    ranges: tuple[tuple[float, float], ...]
    notes: list[str]


def probe(env: Played, sight: Sight, actions: ActionSpace, limit: int) -> Probe:
    """Play a few resets with fixed seeds, and about 200 steps in all. Raises EnvError for what policies cannot see.

    Ranges are as declared, or else twice as wide as what was seen. ``limit``: the time limit, in steps.
    """
    draw, cuts = np.random.default_rng(0), set[int]()
    infos, states = list[dict[str, Any]](), list[np.ndarray]()
    for seed in range(_RESETS):
        (observation, _), ended, steps = env.reset(seed=seed), False, 0
        sight.images(observation, env.render, _IMAGE)
        states.append(sight.numbers(observation))
        while not ended and steps < min(_OTHERS if seed else _FIRST, limit):
            observation, _, terminated, truncated, info = env.step(draw.uniform(actions.low, actions.high))
            infos.append(info)
            states.append(sight.numbers(observation))
            steps, ended = steps + 1, terminated or truncated
            cuts |= {steps} if truncated and steps < limit else set()
    seen, declared = np.array(states), sight.bounds()
    if not (wrong := abs(seen) < np.finfo(np.float32).max).all():
        raise EnvError(f"its state has numbers that are not finite, such as {seen[~wrong][0]}: set env.state")
    low, high = seen.min(axis=0), seen.max(axis=0)
    half = np.where(high > low, (high - low) / 2, 1.0)
    ranges = np.where(np.isnan(declared), np.stack([low - half, high + half], axis=1), declared)
    notes = [f"time limit: an episode was truncated after {min(cuts)} of {limit} steps"] if cuts else []
    if measured := int(np.isnan(declared).any(axis=1).sum()):
        notes.append(f"ranges: of {measured} numbers of the state as seen in {len(infos)} steps of random actions")
    return Probe(infos, tuple((float(a), float(b)) for a, b in ranges), notes)
