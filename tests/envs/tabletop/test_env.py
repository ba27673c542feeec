"""The tabletop behind the protocol: spec, stepping, observations, frames, demonstrations, speed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from envs.base import EnvError, empty_observation
from envs.base.demonstrations import HasDemoState
from envs.tabletop.config import TabletopConfig
from envs.tabletop.env import FRAME_SIZE, TabletopVectorEnv, env_spec
from envs.tabletop.world import MAX_STEP
from tests.envs.tabletop.tabletop_helpers import FAMILIES, act, make, observe, start


def test_instructions_enumerate_families_and_colors() -> None:
    spec = env_spec(TabletopConfig(tasks=FAMILIES))
    assert len(spec.instructions) == len(set(spec.instructions)) == 12
    assert spec.instructions[0] == "move to the red block"
    assert spec.instructions[5] == "push the green block into the square"
    assert spec.instructions[11] == "put the yellow block on the plate"
    assert env_spec(TabletopConfig(tasks=("push",))).instructions == spec.instructions[4:8]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (TabletopConfig(tasks=("reach", "reach")), "names a family twice"),
        (TabletopConfig(image_size=31), "env.image_size=31"),
    ],
)
def test_senseless_configurations_are_refused(config: TabletopConfig, text: str) -> None:
    with pytest.raises(EnvError, match=text):
        TabletopVectorEnv(config, 1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"task": 4}, "tasks 0..3"), ({"task": -1}, "task -1"), ({"init_state": 1000}, "states 0..999")],
)
def test_unknown_tasks_and_states_are_refused(fields: dict[str, int], text: str) -> None:
    with pytest.raises(EnvError, match=text):
        start(make(), **fields)


def test_same_actions_same_states_in_any_environment_next_to_any_neighbour() -> None:
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (20, 1, 7)).astype(np.float32)
    alone, together = make("pick_place"), make("pick_place", 3)
    start(alone, seed=5)
    for env_id in range(3):
        start(together, env_id=env_id, id=env_id, task=env_id, seed=40 + env_id)
    start(together, env_id=1, seed=5)
    for action in actions:
        one = alone.step([0], action[None])
        two = together.step([1], action[None])
        if not together.instance(2).running:
            start(together, env_id=2, seed=1)
        together.step([2], -action[None])
        np.testing.assert_array_equal(alone.demo_state(0)["states"], together.demo_state(1)["states"])
        assert one.terminated[0] == two.terminated[0]
        if one.terminated[0]:
            break


def test_chunk_stops_where_the_episode_ends() -> None:
    env = make("reach", 2)
    start(env, env_id=1)
    world = env._world
    world.tip[1, :2] = world.blocks[1, 0] - [2 * MAX_STEP, 0.0]
    result = act(env, (1, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), env_id=1)
    assert result.num_steps.tolist() == [4]
    assert result.rewards.tolist() == [[0, 0, 0, 1, 0]]
    assert result.terminated[0]
    assert result.success[0]
    assert not result.truncated[0]
    with pytest.raises(ValueError, match="env 1: episode 0 has ended"):
        act(env, (0, 0, 0, 0), env_id=1)


def test_time_limit_truncates() -> None:
    env = make("push", max_episode_steps=6)
    start(env)
    first = act(env, *[(0, 0, 0, 0)] * 4)
    assert not first.truncated[0]
    last = act(env, *[(0, 0, 0, 0)] * 4)
    assert last.num_steps.tolist() == [2]
    assert last.truncated[0]
    assert not last.terminated[0]
    assert not last.success[0]
    observe(env)  # the final observation can be read


def test_environments_run_independently() -> None:
    env = make("reach", 3, max_episode_steps=10)
    for env_id in range(3):
        start(env, env_id=env_id, id=env_id)
    env.step([0, 2], np.zeros((2, 8, 7), np.float32))
    result = env.step([2, 1], np.zeros((2, 8, 7), np.float32))
    assert result.num_steps.tolist() == [2, 8]
    assert result.truncated.tolist() == [True, False]


@pytest.mark.parametrize(
    ("env_ids", "actions", "text"),
    [
        ([0], np.zeros((1, 7), np.float32), "need"),
        ([0], np.zeros((1, 8, 6), np.float32), "need"),
        ([0], np.zeros((2, 8, 7), np.float32), "need"),
        ([0], np.zeros((1, 0, 7), np.float32), "need"),
        ([0, 0], np.zeros((2, 8, 7), np.float32), "twice"),
        ([0], np.full((1, 8, 7), np.nan, np.float32), "not finite"),
        ([1], np.zeros((1, 8, 7), np.float32), "env 1 holds no episode"),
    ],
)
def test_bad_steps_are_refused(env_ids: list[int], actions: np.ndarray, text: str) -> None:
    env = make("reach", 2)
    start(env)
    with pytest.raises(ValueError, match=text):
        env.step(env_ids, actions)


def test_latency_is_slept_for_executed_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("envs.tabletop.env.time.sleep", slept.append)
    env = make("reach", 2, latency_ms=4.0, max_episode_steps=5)
    start(env, env_id=0)
    start(env, env_id=1)
    env.step([0, 1], np.zeros((2, 8, 7), np.float32))
    assert slept == pytest.approx([0.04])  # 2 environments * 5 steps, not 2 * 8


def test_observation_holds_image_proprio_and_task() -> None:
    env = make("pick_place", 2)
    start(env, env_id=0, seed=1)
    start(env, env_id=1, seed=2, task=3)
    out = observe(env)
    assert out.images.shape == (2, 1, 64, 64, 3)
    assert out.task.tolist() == [0, 3]
    np.testing.assert_allclose(out.proprio[1, :3], env.demo_state(1)["obs/ee_pos"], rtol=1e-6)
    assert out.proprio[:, 3].tolist() == [1.0, 1.0]
    images = TabletopVectorEnv(TabletopConfig(tasks=("reach",), proprio=False), 1)
    start(images)
    assert observe(images).proprio.shape == (1, 0)


def test_observe_writes_only_the_given_rows() -> None:
    env = make("reach", 3)
    for env_id in range(3):
        start(env, env_id=env_id, seed=env_id)
    out = empty_observation(env.spec, 3)
    env.observe([1], out)
    assert out.images[1].any()
    assert not out.images[[0, 2]].any()


def test_an_environment_without_an_episode_shows_nothing() -> None:
    env = make("reach", 2)
    start(env, env_id=0)
    with pytest.raises(ValueError, match="env 1 holds no episode"):
        observe(env)


def test_frames_are_recorded_for_episodes_that_ask() -> None:
    env = make("reach", 2)
    start(env, env_id=0, record=True)
    start(env, env_id=1)
    env.step([0, 1], np.zeros((2, 5, 7), np.float32))
    assert len(env.frames(0)) == 5
    assert env.frames(0)[0].shape == (FRAME_SIZE, FRAME_SIZE, 3)
    assert env.frames(0)[0].dtype == np.uint8
    assert env.frames(1) == []
    start(env, env_id=0, record=True)
    assert env.frames(0) == []
    env.close()
    env.close()


def test_demo_state_holds_the_whole_state() -> None:
    env = make("push", distractors=3)
    start(env, seed=2)
    record = env.demo_state(0)
    assert isinstance(env, HasDemoState)  # what a demonstration collector asks for
    assert record["states"].shape == (8 + 3 * 4,)
    parts = np.append(record["obs/ee_pos"], record["obs/gripper_states"])
    np.testing.assert_array_equal(record["robot_states"], parts)
    np.testing.assert_array_equal(record["obs/proprio"], observe(env).proprio[0])
    act(env, (1, 0, 0, 0))
    assert env.demo_state(0)["states"][-1] == 1
    assert record["states"][-1] == 0  # a copy, not a view


def test_speed_on_one_core() -> None:
    env = TabletopVectorEnv(TabletopConfig(tasks=FAMILIES), 4)
    rng = np.random.default_rng(0)
    out = empty_observation(env.spec, 4)
    for env_id in range(4):
        start(env, env_id=env_id, seed=env_id)
    steps, begin = 0, time.process_time()
    while steps < 4000:
        env.observe(range(4), out)
        result = env.step(range(4), rng.uniform(-1, 1, (4, 8, 7)).astype(np.float32))
        steps += int(result.num_steps.sum())
        for env_id in np.flatnonzero(result.terminated | result.truncated).tolist():
            start(env, env_id=env_id, seed=steps, task=steps % 12)
    assert steps / (time.process_time() - begin) > 2000


def test_the_state_tells_where_everything_is() -> None:
    env = make("reach", 2, distractors=2)
    start(env, 0)
    first = env.state([0])
    assert first.shape == (1, env.spec.state_dim)
    assert first.dtype == np.float32
    assert np.allclose(first[0, :3], env._world.tip[0])
    assert np.allclose(first[0, 8:14], env._world.blocks[0].ravel())
    act(env, (1.0, 0.0, 0.0, 1.0))
    moved = np.flatnonzero(env.state([0])[0] != first[0])
    assert 0 in moved, "the finger tips, along x"
    assert not set(moved) & set(range(8, 14)), "the blocks lie still"
    env.close()
