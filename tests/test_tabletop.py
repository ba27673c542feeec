"""The tabletop simulator: protocol, physics, rules, expert, drawing."""

from __future__ import annotations

import time

import numpy as np
import pytest

from envs.base import EnvError, empty_observation
from envs.tabletop import FRAME_SIZE, TabletopVectorEnv, tabletop_spec
from envs.tabletop_tasks import COLORS, DISTURBED, FAMILIES, INIT_STATES, PLATE_RADIUS
from envs.tabletop_world import BLOCK_HALF, BLOCK_HEIGHT, CONTACT, MAX_STEP, World, advance
from vla_rl.config import TabletopConfig
from vla_rl.types import Episode, Observation, StepResult

ALL = ("reach", "push", "pick_place")


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


def world_with_block(tip: tuple[float, float, float], aperture: float, *blocks: tuple[float, float]) -> World:
    world = World.empty(1, len(blocks))
    world.tip[0], world.aperture[0] = tip, aperture
    world.blocks[0] = world.placed[0] = blocks
    return world


def move(world: World, *actions: tuple[float, float, float, float]) -> None:
    for dx, dy, dz, gripper in actions:
        advance(world, np.array([0]), np.array([[dx, dy, dz, 0, 0, 0, gripper]], np.float32))


# --- spec and episodes ----------------------------------------------------------------------------------------------


def test_instructions_enumerate_families_and_colors() -> None:
    spec = tabletop_spec(TabletopConfig(tasks=ALL))
    assert len(spec.instructions) == len(set(spec.instructions)) == 12
    assert spec.instructions[0] == "move to the red block"
    assert spec.instructions[5] == "push the green block into the square"
    assert spec.instructions[11] == "put the yellow block on the plate"
    assert tabletop_spec(TabletopConfig(tasks=("push",))).instructions == spec.instructions[4:8]


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
    ("fields", "text"), [({"task": 4}, "tasks 0..3"), ({"task": -1}, "task -1"), ({"init_state": 50}, "states 0..49")]
)
def test_unknown_tasks_and_states_are_refused(fields: dict[str, int], text: str) -> None:
    with pytest.raises(EnvError, match=text):
        start(make(), **fields)


def test_placement_is_a_function_of_task_and_seed() -> None:
    one, two = make("push", 3, distractors=2), make("push", 1, distractors=2)
    start(two, id=1, seed=7)
    act(two, (1, 1, -1, 1))
    start(one, slot=2, id=5, seed=8, task=1)
    start(one, slot=2, id=9, seed=7)
    start(two, id=2, seed=7)
    np.testing.assert_array_equal(one.demo_record(2)["states"], two.demo_record(0)["states"])
    start(two, id=2, seed=8)
    assert not np.array_equal(one.demo_record(2)["states"], two.demo_record(0)["states"])


def test_benchmark_states_are_held_out_and_ignore_the_seed() -> None:
    env = make("pick_place", 2)
    benchmark = set()
    for i in range(INIT_STATES):
        start(env, slot=0, seed=3, init_state=i)
        start(env, slot=1, seed=4, init_state=i)
        state = env.demo_record(0)["states"]
        np.testing.assert_array_equal(state, env.demo_record(1)["states"])
        benchmark.add(state.tobytes())
    assert len(benchmark) == INIT_STATES
    for seed in range(2 * INIT_STATES):
        start(env, seed=seed)
        assert env.demo_record(0)["states"].tobytes() not in benchmark


def test_same_actions_same_states_in_any_slot_beside_any_neighbour() -> None:
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (20, 1, 7)).astype(np.float32)
    alone, beside = make("pick_place"), make("pick_place", 3)
    start(alone, seed=5)
    for slot in range(3):
        start(beside, slot=slot, id=slot, task=slot, seed=40 + slot)
    start(beside, slot=1, seed=5)
    for action in actions:
        one = alone.step([0], action[None])
        two = beside.step([1], action[None])
        if not beside._running[2]:
            start(beside, slot=2, seed=1)
        beside.step([2], -action[None])
        np.testing.assert_array_equal(alone.demo_record(0)["states"], beside.demo_record(1)["states"])
        assert one.terminated[0] == two.terminated[0]
        if one.terminated[0]:
            break


def test_distractors_make_the_color_matter() -> None:
    env = make("reach", distractors=4)
    for seed in range(20):
        start(env, seed=seed, task=seed % 4)
        colors = [COLORS[int(c)] for c in env.demo_record(0)["states"][-6:-1]]
        assert sorted(colors) == sorted(COLORS)
        assert colors[0] == COLORS[seed % 4]


# --- stepping -------------------------------------------------------------------------------------------------------


def test_chunk_stops_where_the_episode_ends() -> None:
    env = make("reach", 2)
    start(env, slot=1)
    world = env._world
    world.tip[1, :2] = world.blocks[1, 0] - [2 * MAX_STEP, 0.0]
    result = act(env, (1, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), slot=1)
    assert result.num_steps.tolist() == [4]
    assert result.rewards.tolist() == [[0, 0, 0, 1, 0]]
    assert result.terminated[0]
    assert result.success[0]
    assert not result.truncated[0]
    with pytest.raises(ValueError, match=r"slots \[1\] run no episode"):
        act(env, (0, 0, 0, 0), slot=1)


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


def test_slots_run_independently() -> None:
    env = make("reach", 3, max_episode_steps=10)
    for slot in range(3):
        start(env, slot=slot, id=slot)
    env.step([0, 2], np.zeros((2, 8, 7), np.float32))
    result = env.step([2, 1], np.zeros((2, 8, 7), np.float32))
    assert result.num_steps.tolist() == [2, 8]
    assert result.truncated.tolist() == [True, False]


@pytest.mark.parametrize(
    ("slots", "actions", "text"),
    [
        ([0], np.zeros((1, 7), np.float32), "need"),
        ([0], np.zeros((1, 8, 6), np.float32), "need"),
        ([0], np.zeros((2, 8, 7), np.float32), "need"),
        ([0], np.zeros((1, 0, 7), np.float32), "need"),
        ([0, 0], np.zeros((2, 8, 7), np.float32), "twice"),
        ([0], np.full((1, 8, 7), np.nan, np.float32), "not finite"),
        ([1], np.zeros((1, 8, 7), np.float32), "run no episode"),
    ],
)
def test_bad_steps_are_refused(slots: list[int], actions: np.ndarray, text: str) -> None:
    env = make("reach", 2)
    start(env)
    with pytest.raises(ValueError, match=text):
        env.step(slots, actions)


def test_latency_is_slept_for_executed_steps_only() -> None:
    env = make("reach", 2, latency_ms=4.0, max_episode_steps=5)
    start(env, slot=0)
    start(env, slot=1)
    begin = time.perf_counter()
    env.step([0, 1], np.zeros((2, 8, 7), np.float32))
    assert 0.04 <= time.perf_counter() - begin < 0.064  # 2 slots * 5 steps, not 2 * 8


# --- rules ----------------------------------------------------------------------------------------------------------


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


# --- physics --------------------------------------------------------------------------------------------------------


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
    for slot in range(8):
        start(env, slot=slot, seed=slot)
    for _ in range(60):
        running = np.flatnonzero(env._running)
        env.step(running.tolist(), rng.uniform(-2, 2, (len(running), 8, 7)).astype(np.float32))
        for slot in np.flatnonzero(~env._running):
            start(env, slot=int(slot), seed=int(rng.integers(1000)))
        assert env._world.blocks.min() >= BLOCK_HALF - 1e-9
        assert env._world.blocks.max() <= 1 - BLOCK_HALF + 1e-9
        assert env._world.tip.min() >= 0.0
        assert env._world.tip.max() <= 1.0


# --- expert ---------------------------------------------------------------------------------------------------------


def play(env: TabletopVectorEnv, chunk: int, noise: float, seed: int) -> tuple[bool, int]:
    """One episode of the expert, planning ``chunk`` actions on a copy and executing them in open loop."""
    start(env, slot=0, seed=seed, task=seed % 4)
    rng = np.random.default_rng(seed)
    total = 0
    while True:
        start(env, slot=1, seed=seed, task=seed % 4)
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


@pytest.mark.parametrize("family", ALL)
def test_expert_solves_every_family(family: str) -> None:
    env = make(family, 8, distractors=2)
    limit = int(0.6 * env.spec.max_episode_steps)
    solved = 0
    for first in range(0, 120, 8):
        slots = list(range(8))
        env.reset(slots, [Episode(id=i, task=i % 4, seed=i) for i in range(first, first + 8)])
        for _ in range(limit):
            result = env.step(slots, np.stack([env.expert_action(s) for s in slots])[:, None])
            solved += int(result.success.sum())
            slots = [s for s, over in zip(slots, result.terminated, strict=True) if not over]
            if not slots:
                break
    assert solved >= 0.98 * 120


@pytest.mark.parametrize("family", ALL)
def test_expert_works_in_open_loop_chunks_and_recovers_from_noise(family: str) -> None:
    env = make(family, 2)
    exact = [play(env, chunk=8, noise=0.0, seed=s) for s in range(10)]
    assert all(success for success, _ in exact)
    noisy = [play(env, chunk=4, noise=0.2, seed=s)[0] for s in range(20)]
    assert np.mean(noisy) >= 0.7


# --- observations ---------------------------------------------------------------------------------------------------


def test_observation_holds_image_proprio_and_task() -> None:
    env = make("pick_place", 2)
    start(env, slot=0, seed=1)
    start(env, slot=1, seed=2, task=3)
    out = observe(env)
    assert out.images.shape == (2, 1, 64, 64, 3)
    assert out.task.tolist() == [0, 3]
    np.testing.assert_allclose(out.proprio[1, :3], env.demo_record(1)["ee_pos"], rtol=1e-6)
    assert out.proprio[:, 3].tolist() == [1.0, 1.0]
    images = TabletopVectorEnv(TabletopConfig(tasks=("reach",), proprio=False), 1)
    start(images)
    assert observe(images).proprio.shape == (1, 0)


def test_observe_writes_only_the_given_rows() -> None:
    env = make("reach", 3)
    for slot in range(3):
        start(env, slot=slot, seed=slot)
    out = empty_observation(env.spec, 3)
    env.observe([1], out)
    assert out.images[1].any()
    assert not out.images[[0, 2]].any()


@pytest.mark.parametrize("family", ALL)
def test_everything_that_matters_is_visible(family: str) -> None:
    env = make(family)
    start(env, seed=4)
    before = observe(env).images
    world = env._world
    for name, index, delta in [
        ("tip", 0, 0.01),
        ("tip", 1, 0.01),
        ("tip", 2, 0.01),
        ("blocks", (0, 0), 0.01),
        ("blocks", (1, 1), 0.01),
        ("aperture", (), -0.3 if family == "pick_place" else 0.3),
        *([] if family == "reach" else [("goal", 0, 0.01)]),
    ]:
        array = getattr(world, name)
        key = (0, *index) if isinstance(index, tuple) else (0, index)
        saved = array[key]
        array[key] = saved + delta
        assert not np.array_equal(observe(env).images, before), f"{name} {index} does not show"
        array[key] = saved
    np.testing.assert_array_equal(observe(env).images, before)


def test_families_and_colors_look_different() -> None:
    env = TabletopVectorEnv(TabletopConfig(tasks=ALL, distractors=0), 1)
    start(env, task=0, seed=1)
    red = observe(env).images.copy()
    env._colors[0, 0] = COLORS.index("blue")
    assert not np.array_equal(observe(env).images, red)
    env._colors[0, 0] = COLORS.index("red")
    marks = []
    for family in range(len(FAMILIES)):
        env._family[0] = family
        env._world.goal[0] = (0.5, 0.5)
        marks.append(observe(env).images.copy())
    assert not np.array_equal(marks[0], marks[1])
    assert not np.array_equal(marks[1], marks[2])


def test_frames_are_recorded_for_episodes_that_ask() -> None:
    env = make("reach", 2)
    start(env, slot=0, record=True)
    start(env, slot=1)
    env.step([0, 1], np.zeros((2, 5, 7), np.float32))
    assert len(env.frames(0)) == 5
    assert env.frames(0)[0].shape == (FRAME_SIZE, FRAME_SIZE, 3)
    assert env.frames(0)[0].dtype == np.uint8
    assert env.frames(1) == []
    start(env, slot=0, record=True)
    assert env.frames(0) == []
    env.close()
    env.close()


def test_demo_record_holds_the_whole_state() -> None:
    env = make("push", distractors=3)
    start(env, seed=2)
    record = env.demo_record(0)
    assert record["states"].shape == (8 + 3 * 4,)
    assert all(array.dtype == np.float64 for array in record.values())
    np.testing.assert_array_equal(record["robot_states"], np.append(record["ee_pos"], record["gripper_states"]))
    np.testing.assert_allclose(record["robot_states"], observe(env).proprio[0], rtol=1e-6)
    act(env, (1, 0, 0, 0))
    assert env.demo_record(0)["states"][-1] == 1
    assert record["states"][-1] == 0  # a copy, not a view


def test_speed_on_one_core() -> None:
    env = TabletopVectorEnv(TabletopConfig(tasks=ALL), 4)
    rng = np.random.default_rng(0)
    out = empty_observation(env.spec, 4)
    for slot in range(4):
        start(env, slot=slot, seed=slot)
    steps, begin = 0, time.process_time()
    while steps < 4000:
        env.observe(range(4), out)
        result = env.step(range(4), rng.uniform(-1, 1, (4, 8, 7)).astype(np.float32))
        steps += int(result.num_steps.sum())
        for slot in np.flatnonzero(result.terminated | result.truncated).tolist():
            start(env, slot=slot, seed=steps, task=steps % 12)
    assert steps / (time.process_time() - begin) > 2000
