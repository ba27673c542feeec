"""Small steps on the tabletop, for its tests."""

from __future__ import annotations

import numpy as np

from envs.base import empty_observation
from envs.tabletop.config import TabletopConfig
from envs.tabletop.env import TabletopVectorEnv
from vla_rl.core.records import EpisodeSpec, Observation, StepResult

FAMILIES = ("reach", "push", "pick_place")


def make(family: str = "reach", num_envs: int = 1, **keys: object) -> TabletopVectorEnv:
    return TabletopVectorEnv(TabletopConfig(tasks=(family,), **keys), num_envs)  # type: ignore[arg-type]


def start(env: TabletopVectorEnv, env_id: int = 0, **fields: object) -> None:
    values = {"id": 0, "task": 0, "seed": 0} | fields
    env.reset([env_id], [EpisodeSpec(**values)])  # type: ignore[arg-type]


def act(env: TabletopVectorEnv, *actions: tuple[float, float, float, float], env_id: int = 0) -> StepResult:
    """Execute (dx, dy, dz, gripper) rows as one chunk."""
    chunk = np.zeros((1, len(actions), 7), np.float32)
    chunk[0, :, [0, 1, 2, 6]] = np.array(actions, np.float32).T
    return env.step([env_id], chunk)


def observe(env: TabletopVectorEnv) -> Observation:
    out = empty_observation(env.spec, env.num_envs)
    env.observe(range(env.num_envs), out)
    return out
