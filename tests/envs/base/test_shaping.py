"""envs.base.shaping: rewards gain exactly what the potential gained, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from envs import EnvConfig, make_env
from envs.base import VectorEnv
from envs.base.shaping import ShapedEnv, shaped
from envs.libero.config import LiberoConfig
from envs.tabletop.config import TabletopConfig
from envs.workload.config import WorkloadConfig
from vla_rl.core.records import EpisodeSpec

CONFIGS: list[EnvConfig] = [
    TabletopConfig(tasks=("reach",)),
    TabletopConfig(tasks=("push",)),
    TabletopConfig(tasks=("pick_place",)),
    WorkloadConfig(max_episode_steps=20, length_spread=0.6),
]


def _play(
    env: VectorEnv, episode: EpisodeSpec, rng: np.random.Generator | None, chunk: int = 3
) -> tuple[float, bool, list]:
    """Reward of one episode in the last environment, its success, and the potentials from start to end."""
    env_id = env.num_envs - 1
    env.reset([env_id], [episode])
    total, potentials = 0.0, [float(env.potential([env_id])[0])]
    while True:
        action = env.expert_action(env_id) if rng is None else rng.uniform(-1, 1, 7)
        result = env.step([env_id], np.tile(action, (1, 1 if rng is None else chunk, 1)).astype(np.float32))
        assert np.all(result.rewards[0, result.num_steps[0] :] == 0)
        total += float(result.rewards.sum())
        potentials.append(float(env.potential([env_id])[0]))
        if result.terminated[0] or result.truncated[0]:
            return total, bool(result.success[0]), potentials


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join([c.name, *getattr(c, "tasks", ())]))
def test_an_episode_gains_what_its_potential_gained(config: EnvConfig) -> None:
    plain, env = make_env(config, 3), shaped(make_env(config, 3), 0.5)
    assert isinstance(env, ShapedEnv)
    for seed in range(6):
        expert = seed % 2 == 0 and config.name != "workload"
        rngs = [None if expert else np.random.default_rng(seed) for _ in range(2)]
        bare, success, _ = _play(plain, EpisodeSpec(seed, 0, seed), rngs[0])
        total, same_success, potentials = _play(env, EpisodeSpec(seed, 0, seed), rngs[1])
        assert success == same_success
        assert bare == float(success)
        assert total == pytest.approx(bare + 0.5 * (potentials[-1] - potentials[0]), abs=1e-5)
        assert 0.0 <= min(potentials) <= max(potentials) <= 1.0
        assert max(potentials) > min(potentials)
        if success:
            assert potentials[-1] > potentials[0]


def test_without_shaping_nothing_stands_between() -> None:
    env = make_env(CONFIGS[0], 2)
    assert shaped(env, 0.0) is env


@pytest.mark.libero
def test_in_libero_a_grasp_counts() -> None:
    env = make_env(LiberoConfig(image_size=32), 2)
    _, success, potentials = _play(env, EpisodeSpec(0, 0, 1, init_state=0), None)
    assert success
    assert potentials[0] == 0.0
    assert set(potentials) == {0.0, 1.0}
    assert np.sum(potentials) >= 10, "from the grasp until the release"
    env.close()
