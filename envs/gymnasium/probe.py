"""A short play of an environment of gymnasium with random actions, which tells what its spaces do not."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.base import EnvError
from envs.gymnasium.played import Played
from envs.gymnasium.sight import Sight
from envs.gymnasium.success import names_in
from vla_rl.core.actions import ActionSpace

_FIRST, _OTHERS, _RESETS = 160, 10, 5  # most steps of the first episode, of each other one; episodes
_IMAGE = 16  # size of the views, which are only tried


@dataclass(frozen=True)
class Probe:
    """``names``: in ``infos``, those of its steps. ``cut_at``: the fewest steps to a truncation; None: none seen.

    ``ranges``: float64 [P, 2], between which each number of the state lay.
    """

    steps: int
    infos: list[dict[str, Any]]
    cut_at: int | None
    ranges: np.ndarray

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for info in self.infos for name, _ in names_in(info)))

    def notes(self, sight: Sight, limit: int) -> list[str]:
        """What people should know of it, where ``limit`` is the time limit in steps."""
        notes, measured = [], int(np.isnan(sight.bounds()).any(axis=1).sum())
        if measured:
            notes.append(f"ranges: of {measured} numbers of the state as seen in {self.steps} steps of random actions")
        if self.cut_at is not None and self.cut_at < limit:
            notes.append(f"time limit: it truncated an episode by itself after {self.cut_at} of {limit} steps")
        return notes

    def limits(self, sight: Sight) -> tuple[tuple[float, float], ...]:
        """P pairs for ``EnvSpec.proprio_range``: as declared, or twice as wide as what was seen."""
        half = (self.ranges[:, 1] - self.ranges[:, 0])[:, None] / 2
        seen = self.ranges + np.where(half > 0, half, 1.0) * [-1.0, 1.0]
        bounds = sight.bounds()
        return tuple((float(low), float(high)) for low, high in np.where(np.isnan(bounds), seen, bounds))


def probe(env: Played, sight: Sight, actions: ActionSpace, limit: int) -> Probe:
    """Play a few resets with fixed seeds, and about 200 steps in all. Raises EnvError for what policies cannot see."""
    draw, infos, cuts, states = np.random.default_rng(0), list[dict[str, Any]](), list[int](), list[np.ndarray]()
    for seed in range(_RESETS):
        (observation, _), ended, played = env.reset(seed=seed), False, 0
        sight.images(observation, env.render, _IMAGE)
        states.append(_numbers(sight, observation))
        while not ended and played < min(_OTHERS if seed else _FIRST, limit):
            observation, _, terminated, truncated, info = env.step(draw.uniform(actions.low, actions.high))
            states.append(_numbers(sight, observation))
            infos.append(info)
            played, ended = played + 1, terminated or truncated
            if truncated and not terminated:
                cuts.append(played)
    seen = np.array(states)
    return Probe(len(infos), infos, min(cuts, default=None), np.stack([seen.min(axis=0), seen.max(axis=0)], axis=1))


def _numbers(sight: Sight, observation: Any) -> np.ndarray:
    for part in sight.state:
        array = part.of(observation).astype(np.float64)
        if not (abs(array) < np.finfo(np.float32).max).all():
            raise EnvError(
                f"{part.name} has numbers that are not finite, {array}: mend it, or leave it out of env.state"
            )
    return sight.numbers(observation)
