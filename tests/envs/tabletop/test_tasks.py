"""The tabletop's tasks: placements, success and failure, expert."""

from __future__ import annotations

import numpy as np
import pytest

from envs.tabletop.env import TabletopVectorEnv
from envs.tabletop.tasks import COLORS, DISTURBED, INIT_STATES, PLATE_RADIUS
from envs.tabletop.world import BLOCK_HALF, CONTACT, MAX_STEP
from tests.envs.tabletop.tabletop_helpers import FAMILIES, act, make, start
from vla_rl.core.records import EpisodeSpec


def test_placement_is_a_function_of_task_and_seed() -> None:
    one, two = make("push", 3, distractors=2), make("push", 1, distractors=2)
    start(two, id=1, seed=7)
    act(two, (1, 1, -1, 1))
    start(one, env_id=2, id=5, seed=8, task=1)
    start(one, env_id=2, id=9, seed=7)
    start(two, id=2, seed=7)
    np.testing.assert_array_equal(one.demo_state(2)["states"], two.demo_state(0)["states"])
    start(two, id=2, seed=8)
    assert not np.array_equal(one.demo_state(2)["states"], two.demo_state(0)["states"])


def test_benchmark_states_are_held_out_and_ignore_the_seed() -> None:
    env = make("pick_place", 2)
    benchmark = set()
    for i in range(INIT_STATES):
        start(env, env_id=0, seed=3, init_state=i)
        start(env, env_id=1, seed=4, init_state=i)
        state = env.demo_state(0)["states"]
        np.testing.assert_array_equal(state, env.demo_state(1)["states"])
        benchmark.add(state.tobytes())
    assert len(benchmark) == INIT_STATES
    for seed in range(2 * INIT_STATES):
        start(env, seed=seed)
        assert env.demo_state(0)["states"].tobytes() not in benchmark


def test_distractors_make_the_color_matter() -> None:
    env = make("reach", distractors=4)
    for seed in range(20):
        start(env, seed=seed, task=seed % 4)
        colors = [COLORS[int(c)] for c in env.demo_state(0)["states"][-6:-1]]
        assert sorted(colors) == sorted(COLORS)
        assert colors[0] == COLORS[seed % 4]


def test_passing_over_a_block_is_not_stopping_there() -> None:
    env = make("reach")
    start(env)
    env._world.tip[0, :2] = env._world.blocks[0, 0] - [2 * MAX_STEP, 0.0]
    result = act(env, *[(1, 0, 0, 0)] * 6)
    assert not result.terminated[0]


def test_stopping_over_a_distractor_fails() -> None:
    env = make("reach")
    start(env)
    env._world.tip[0, :2] = env._world.blocks[0, 1]
    result = act(env, *[(0, 0, 0, 0)] * 3)
    assert result.terminated[0]
    assert not result.success[0]
    assert result.rewards.sum() == 0
    assert result.num_steps.tolist() == [2]


def test_shifting_a_distractor_fails() -> None:
    env = make("push")
    start(env)
    world = env._world
    world.blocks[0, 1] = world.placed[0, 1] = (0.5, 0.5)
    world.tip[0] = (0.5 - CONTACT, 0.5, 0.02)
    result = act(env, *[(1, 0, 0, 0)] * 3)
    assert result.terminated[0]
    assert not result.success[0]
    assert world.blocks[0, 1, 0] - 0.5 > DISTURBED


def test_grasping_a_distractor_fails() -> None:
    env = make("pick_place")
    start(env)
    env._world.tip[0] = (*env._world.blocks[0, 1], 0.02)
    result = act(env, *[(0, 0, 0, 0)] * 4)
    assert result.terminated[0]
    assert not result.success[0]


def test_a_block_held_over_the_plate_is_not_yet_on_it() -> None:
    env = make("pick_place")
    start(env)
    world = env._world
    world.tip[0] = (*world.goal[0], 0.1)
    world.blocks[0, 0], world.held[0], world.aperture[0] = world.goal[0], 0, 0.0
    assert not act(env, *[(0, 0, 0, 0)] * 4).terminated[0]
    assert act(env, *[(0, 0, 0, 1)] * 4).success[0]
    assert PLATE_RADIUS > BLOCK_HALF  # the drawn plate is larger than what stands on it


def play(env: TabletopVectorEnv, chunk: int, noise: float, seed: int) -> tuple[bool, int]:
    """One episode of the expert, planning ``chunk`` actions on a copy and executing them in open loop."""
    start(env, env_id=0, seed=seed, task=seed % 4)
    rng = np.random.default_rng(seed)
    total = 0
    while True:
        start(env, env_id=1, seed=seed, task=seed % 4)
        for name in ("tip", "aperture", "held", "blocks", "placed", "settled", "goal"):
            array = getattr(env._world, name)
            array[1] = array[0]
        plan = []
        for _ in range(chunk):
            plan.append(env.expert_action(1))
            if env.step([1], plan[-1][None, None]).terminated[0]:
                break
        actions = np.stack(plan)
        actions[:, :3] += rng.normal(0.0, noise, (len(plan), 3))
        result = env.step([0], actions[None])
        total += int(result.num_steps[0])
        if result.terminated[0] or result.truncated[0]:
            return bool(result.success[0]), total


@pytest.mark.parametrize("family", FAMILIES)
def test_expert_solves_every_family(family: str) -> None:
    env = make(family, 8, distractors=2)
    limit = int(0.6 * env.spec.max_episode_steps)
    solved = 0
    for first in range(0, 120, 8):
        env_ids = list(range(8))
        env.reset(env_ids, [EpisodeSpec(id=i, task=i % 4, seed=i) for i in range(first, first + 8)])
        for _ in range(limit):
            result = env.step(env_ids, np.stack([env.expert_action(e) for e in env_ids])[:, None])
            solved += int(result.success.sum())
            env_ids = [e for e, over in zip(env_ids, result.terminated, strict=True) if not over]
            if not env_ids:
                break
    assert solved >= 0.98 * 120


@pytest.mark.parametrize("family", FAMILIES)
def test_expert_works_in_open_loop_chunks_and_recovers_from_noise(family: str) -> None:
    env = make(family, 2)
    exact = [play(env, chunk=8, noise=0.0, seed=s) for s in range(10)]
    assert all(success for success, _ in exact)
    noisy = [play(env, chunk=8, noise=0.2, seed=s)[0] for s in range(20)]
    assert np.mean(noisy) >= 0.9
