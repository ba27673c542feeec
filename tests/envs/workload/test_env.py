"""The workload simulator: known lengths, known costs, images that tell where they come from."""

from __future__ import annotations

import time

import numpy as np
import pytest

from envs.base import EnvError, empty_observation
from envs.workload.config import WorkloadConfig
from envs.workload.env import WorkloadVectorEnv, decode_image, encode_image, plan_episode
from vla_rl.core.records import EpisodeSpec


def make(num_envs: int = 1, **keys: object) -> WorkloadVectorEnv:
    return WorkloadVectorEnv(WorkloadConfig(**keys), num_envs)  # type: ignore[arg-type]


def actions(n: int, chunk: int = 8) -> np.ndarray:
    return np.zeros((n, chunk, 7), np.float32)


def seed_of(config: WorkloadConfig, success: bool, truncated: bool) -> int:
    plans = ((seed, plan_episode(config, seed)) for seed in range(1000))
    return next(seed for seed, plan in plans if (plan.success, plan.truncated) == (success, truncated))


def test_images_tell_episode_and_step() -> None:
    env = make(3)
    env.reset([0, 1, 2], [EpisodeSpec(id=10**12 + i, task=i % 2, seed=i) for i in range(3)])
    env.step([1], actions(1))
    out = empty_observation(env.spec, 3)
    env.observe([0, 1, 2], out)
    assert [decode_image(image[0]) for image in out.images] == [(10**12, 0), (10**12 + 1, 8), (10**12 + 2, 0)]
    assert out.images.min() > 0
    assert out.proprio.min() > 0
    assert out.task.tolist() == [0, 1, 0]


@pytest.mark.parametrize("size", [4, 5, 16, 64])
@pytest.mark.parametrize(("episode", "step"), [(0, 0), (2**62, 2**31 - 1), (255, 16)])
def test_encoding_is_reversible_and_never_zero(size: int, episode: int, step: int) -> None:
    image = encode_image(episode, step, size)
    assert image.shape == (size, size, 3)
    assert image.min() > 0
    assert decode_image(image) == (episode, step)


def test_damaged_images_are_found() -> None:
    good, other = encode_image(7, 3, 16), encode_image(7, 4, 16)
    for y, x, c in [(0, 0, 0), (15, 15, 2), (8, 3, 1)]:
        torn = good.copy()
        torn[y, x, c] ^= 1
        with pytest.raises(ValueError, match="not as the workload simulator wrote it"):
            decode_image(torn)
    with pytest.raises(ValueError, match="not as"):
        decode_image(np.concatenate([good[:8], other[8:]]))
    with pytest.raises(ValueError, match="768 of 768 bytes are 0"):
        decode_image(np.zeros((16, 16, 3), np.uint8))
    with pytest.raises(ValueError, match="not an image"):
        decode_image(good.astype(np.float32))


def test_lengths_are_as_planned() -> None:
    config = WorkloadConfig(max_episode_steps=40, length_spread=0.5)
    env = WorkloadVectorEnv(config, 1)
    lengths = []
    for seed in range(30):
        plan = plan_episode(config, seed)
        assert plan == plan_episode(config, seed)
        env.reset([0], [EpisodeSpec(id=seed, task=0, seed=seed)])
        steps = 0
        while True:
            result = env.step([0], actions(1))
            steps += int(result.num_steps[0])
            if result.terminated[0] or result.truncated[0]:
                break
            assert result.rewards.sum() == 0
        assert steps == plan.length
        assert bool(result.success[0]) == plan.success
        assert bool(result.truncated[0]) == plan.truncated
        assert result.rewards.sum() == plan.success
        assert bool(result.terminated[0]) != plan.truncated
        lengths.append(steps)
    assert 20 <= min(lengths) < 25
    assert 35 < max(lengths) <= 40


def test_without_spread_all_episodes_last_the_same() -> None:
    config = WorkloadConfig(max_episode_steps=12)
    assert {plan_episode(config, seed).length for seed in range(50)} == {12}
    assert plan_episode(WorkloadConfig(max_episode_steps=1, length_spread=1.0), 3).length == 1


def test_outcomes_have_their_shares() -> None:
    plans = [plan_episode(WorkloadConfig(length_spread=1.0), seed) for seed in range(2000)]
    assert 0.45 < np.mean([plan.success for plan in plans]) < 0.55
    assert 0.2 < np.mean([plan.truncated for plan in plans]) < 0.3
    assert not any(plan.success and plan.truncated for plan in plans)


def test_reward_falls_on_the_last_executed_step() -> None:
    config = WorkloadConfig(max_episode_steps=10)
    env = WorkloadVectorEnv(config, 2)
    seeds = [seed_of(config, True, False), seed_of(config, False, True)]
    env.reset([0, 1], [EpisodeSpec(id=i, task=0, seed=seed) for i, seed in enumerate(seeds)])
    env.step([0, 1], actions(2))
    result = env.step([1, 0], actions(2))
    assert result.num_steps.tolist() == [2, 2]
    assert result.rewards.tolist() == [[0.0] * 8, [0, 1, 0, 0, 0, 0, 0, 0]]
    assert result.terminated.tolist() == [False, True]
    assert result.truncated.tolist() == [True, False]
    with pytest.raises(ValueError, match="env 0: episode 0 has ended"):
        env.step([0, 1], actions(2))


def test_costs_are_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("envs.workload.env.time.sleep", slept.append)
    env = make(2, step_ms=2.0, render_ms=10.0, max_episode_steps=9)
    env.reset([0, 1], [EpisodeSpec(id=i, task=0, seed=i) for i in range(2)])
    env.step([0, 1], actions(2))
    env.step([0], actions(1))  # one step is left, not eight
    env.observe([0, 1], empty_observation(env.spec, 2))
    assert slept == pytest.approx([0.032, 0.002, 0.02])


def test_costs_are_real_time() -> None:
    env = make(step_ms=2.0)
    env.reset([0], [EpisodeSpec(id=0, task=0, seed=0)])
    begin = time.perf_counter()
    env.step([0], actions(1))
    assert time.perf_counter() - begin >= 0.016


def test_frames_are_recorded_for_episodes_that_ask() -> None:
    env = make(2)
    env.reset([0, 1], [EpisodeSpec(id=3, task=0, seed=0, record=True), EpisodeSpec(id=4, task=0, seed=0)])
    env.step([0, 1], actions(2, 3))
    assert [decode_image(frame) for frame in env.frames(0)] == [(3, 1), (3, 2), (3, 3)]
    assert env.frames(1) == []
    env.close()
    env.close()


def test_errors_name_the_remedy() -> None:
    with pytest.raises(EnvError, match="image_size=3"):
        make(image_size=3)
    env = make()
    with pytest.raises(EnvError, match=r"tasks 0\.\.1"):
        env.reset([0], [EpisodeSpec(id=0, task=2, seed=0)])
    with pytest.raises(EnvError, match=r"states 0\.\.49"):
        env.reset([0], [EpisodeSpec(id=0, task=0, seed=0, init_state=50)])
    with pytest.raises(ValueError, match="env 0 holds no episode"):
        env.step([0], actions(1))
    with pytest.raises(ValueError, match="env 0 holds no episode"):
        env.observe([0], empty_observation(env.spec, 1))
    env.reset([0], [EpisodeSpec(id=0, task=0, seed=0)])
    with pytest.raises(ValueError, match="need"):
        env.step([0], actions(2))
    with pytest.raises(EnvError, match="no expert"):
        env.expert_action(0)
