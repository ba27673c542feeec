"""Small steps on the tabletop, for its tests."""

from __future__ import annotations

import numpy as np

from envs.base import empty_observation
from envs.tabletop.config import TabletopConfig
from envs.tabletop.env import TabletopVectorEnv
from vla_rl.core.records import Episode, Observation, StepResult

FAMILIES = ("reach", "push", "pick_place")


def make(family: str = "reach", slots: int = 1, **keys: object) -> TabletopVectorEnv:
    return TabletopVectorEnv(TabletopConfig(tasks=(family,), **keys), slots)  # type: ignore[arg-type]


def start(env: TabletopVectorEnv, slot: int = 0, **fields: object) -> None:
    values = {"id": 0, "task": 0, "seed": 0} | fields
    env.reset([slot], [Episode(**values)])  # type: ignore[arg-type]


def act(env: TabletopVectorEnv, *actions: tuple[float, float, float, float], slot: int = 0) -> StepResult:
    """Execute (dx, dy, dz, gripper) rows as one chunk."""
    chunk = np.zeros((1, len(actions), 7), np.float32)
    chunk[0, :, [0, 1, 2, 6]] = np.array(actions, np.float32).T
    return env.step([slot], chunk)


def observe(env: TabletopVectorEnv) -> Observation:
    out = empty_observation(env.spec, env.num_slots)
    env.observe(range(env.num_slots), out)
    return out
