"""envs.base.real_time: training episodes take a robot's time, and nothing else changes."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from envs import make_env
from envs.base import empty_observation
from envs.base.config import RealTimeConfig
from envs.base.real_time import RealTimeEnv, paced
from envs.tabletop.config import TabletopConfig
from vla_rl.core.records import EpisodeSpec

PACE = RealTimeConfig(control_hz=50.0, inference_s=0.06, reset_s=0.2, speed=2.0)


def test_a_pace_in_seconds() -> None:
    assert PACE.robot_seconds(steps=100, chunks=10, episodes=2) == pytest.approx(2.0 + 0.6 + 0.4)
    assert RealTimeConfig().robot_seconds(steps=40, chunks=5, episodes=1) == pytest.approx(2.0 + 1.0 + 10.0)


@pytest.mark.parametrize("evaluation", [False, True])
def test_training_episodes_take_a_robots_time(evaluation: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr("envs.base.real_time.time", clock)  # its own: other threads of the test process sleep too
    plain, slow = (paced(make_env(TabletopConfig(), 2), pace) for pace in (None, PACE))
    assert isinstance(slow, RealTimeEnv)
    assert not isinstance(plain, RealTimeEnv)
    episodes = [EpisodeSpec(id=i, task=i, seed=i, evaluation=evaluation) for i in range(2)]
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 4, plain.spec.action_dim)).astype(np.float32)
    plain.reset([0, 1], episodes)
    expected = plain.step([0, 1], actions)
    assert expected.num_steps.max() == 4
    start = time.monotonic()
    slow.reset([0, 1], episodes)
    slow.observe([0, 1], empty_observation(slow.spec, 2))
    found = slow.step([0, 1], actions)
    assert len(slept) == (0 if evaluation else 2)
    if not evaluation:
        assert time.monotonic() - start >= 0.2 / 2 + (0.06 + 4 / 50) / 2
        slow.step([0, 1], actions[:, :1])
        assert slept[-1] <= 1 / 50 / 2, "as a chunk that an expert plays step by step: no inference between"
    for name in ("rewards", "num_steps", "terminated", "truncated", "success"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    for env in (plain, slow):
        env.close()
