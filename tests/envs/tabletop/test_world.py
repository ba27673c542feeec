"""The tabletop's physics."""

from __future__ import annotations

import numpy as np

from envs.tabletop.world import BLOCK_HALF, BLOCK_HEIGHT, CONTACT, World, advance
from tests.envs.tabletop.tabletop_helpers import make, start


def world_with_block(tip: tuple[float, float, float], aperture: float, *blocks: tuple[float, float]) -> World:
    world = World.empty(1, len(blocks))
    world.tip[0], world.aperture[0] = tip, aperture
    world.blocks[0] = world.placed[0] = blocks
    return world


def move(world: World, *actions: tuple[float, float, float, float]) -> None:
    for dx, dy, dz, gripper in actions:
        advance(world, np.array([0]), np.array([[dx, dy, dz, 0, 0, 0, gripper]], np.float32))


def test_low_fingers_push_and_high_fingers_pass() -> None:
    low = world_with_block((0.3, 0.5, 0.02), 0.0, (0.5, 0.5))
    move(low, *[(1, 0, 0, 0)] * 5)
    np.testing.assert_allclose(low.blocks[0, 0], (0.5 + CONTACT, 0.5), atol=1e-9)
    high = world_with_block((0.3, 0.5, BLOCK_HEIGHT), 0.0, (0.5, 0.5))
    move(high, *[(1, 0, 0, 0)] * 5)
    np.testing.assert_array_equal(high.blocks[0, 0], (0.5, 0.5))


def test_a_pushed_block_follows_sideways_motion() -> None:
    world = world_with_block((0.5 - CONTACT, 0.5, 0.02), 0.0, (0.5, 0.5))
    move(world, *[(1, 0.5, 0, 0)] * 4)
    np.testing.assert_allclose(world.blocks[0, 0] - world.tip[0, :2], (CONTACT, 0.0), atol=1e-6)


def test_closed_fingers_land_on_a_block_and_open_ones_straddle_it() -> None:
    closed = world_with_block((0.5, 0.5, 0.12), 0.0, (0.5, 0.5))
    move(closed, *[(0, 0, -1, 0)] * 4)
    assert closed.tip[0, 2] == BLOCK_HEIGHT
    opened = world_with_block((0.5, 0.5, 0.12), 1.0, (0.51, 0.5))
    move(opened, *[(0, 0, -1, 1)] * 4)
    assert opened.tip[0, 2] == 0.02
    np.testing.assert_array_equal(opened.blocks[0, 0], (0.51, 0.5))


def test_grasp_carry_and_release() -> None:
    world = world_with_block((0.5, 0.5, 0.02), 1.0, (0.52, 0.5))
    move(world, (0, 0, 0, 0), (0, 0, 0, 0))
    assert world.held[0] == 0
    move(world, *[(0, 0, 1, 0)] * 3, *[(0, 1, 0, 0)] * 5)
    np.testing.assert_allclose(world.blocks[0, 0], (0.5, 0.7))
    move(world, (0, 0, 0, 1), (0, 0, 0, 1), (0, 1, 0, 1))
    assert world.held[0] == -1
    np.testing.assert_allclose(world.blocks[0, 0], (0.5, 0.7))


def test_closing_beside_or_above_a_block_grasps_nothing() -> None:
    for tip in ((0.5 + CONTACT, 0.5, 0.02), (0.5, 0.5, 0.1)):
        world = world_with_block(tip, 1.0, (0.5, 0.5))
        move(world, *[(0, 0, 0, 0)] * 4)
        assert world.held[0] == -1


def test_straddled_block_is_dragged() -> None:
    world = world_with_block((0.5, 0.5, 0.02), 1.0, (0.5, 0.5))
    move(world, *[(1, 0, 0, 1)] * 5)
    assert 0.0 < world.tip[0, 0] - world.blocks[0, 0, 0] < CONTACT
    move(world, (0, 0, 0, 0), (0, 0, 0, 0))
    assert world.held[0] == 0


def test_a_pushed_block_shoves_the_next_one() -> None:
    world = world_with_block((0.3 - CONTACT, 0.5, 0.02), 0.0, (0.3, 0.5), (0.3 + 2 * BLOCK_HALF, 0.5))
    move(world, *[(1, 0, 0, 0)] * 3)
    np.testing.assert_allclose(world.blocks[0, 1] - world.blocks[0, 0], (2 * BLOCK_HALF, 0.0), atol=1e-6)


def test_nothing_leaves_the_table() -> None:
    env = make("pick_place", 8, distractors=4, max_episode_steps=200)
    rng = np.random.default_rng(1)
    for env_id in range(8):
        start(env, env_id=env_id, seed=env_id)
    for _ in range(60):
        running = [env_id for env_id in range(8) if env.instance(env_id).running]
        env.step(running, rng.uniform(-2, 2, (len(running), 8, 7)).astype(np.float32))
        for env_id in (e for e in running if not env.instance(e).running):
            start(env, env_id=env_id, seed=int(rng.integers(1000)))
        assert env._world.blocks.min() >= BLOCK_HALF - 1e-9
        assert env._world.blocks.max() <= 1 - BLOCK_HALF + 1e-9
        assert env._world.tip.min() >= 0.0
        assert env._world.tip.max() <= 1.0
