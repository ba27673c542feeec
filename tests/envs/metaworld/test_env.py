"""Meta-World's tasks: placements, steps, pictures and the scripted experts are Meta-World's own, and repeat."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import mujoco
import numpy as np
import pytest
from pydantic import ValidationError

from envs import env_spec, make_env
from envs.base import EnvError, empty_observation
from envs.metaworld import env as module
from envs.metaworld.config import MetaWorldConfig
from envs.metaworld.env import ACTIONS, MetaWorldVectorEnv
from envs.metaworld.tasks import INSTRUCTIONS, MT10
from vla_rl.core.records import EpisodeSpec

REACH, WINDOW = MT10.index("reach-v3"), MT10.index("window-open-v3")
RANDOM = np.random.default_rng(0).uniform(-1, 1, (1, 12, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def mt10() -> Iterator[MetaWorldVectorEnv]:
    env = make_env(MetaWorldConfig(image_size=48, rendering="plain"), 2)
    assert isinstance(env, MetaWorldVectorEnv)
    yield env
    env.close()


def state(env: MetaWorldVectorEnv, env_id: int) -> np.ndarray:
    simulation = env.instance(env_id).simulation
    data = simulation.env.data
    parts = data.qpos, data.qvel, data.mocap_pos.ravel(), data.qacc_warmstart, data.xpos.ravel(), data.site_xpos.ravel()
    return np.concatenate([*parts, simulation.seen, [simulation.reward]])


def played(env: MetaWorldVectorEnv, env_id: int, episode: EpisodeSpec) -> np.ndarray:
    """All states of an episode's start, and after random actions."""
    env.reset([env_id], [episode])
    start = state(env, env_id)
    env.step([env_id], RANDOM)
    return np.stack([start, state(env, env_id)])


@pytest.mark.parametrize("name", MT10)
def test_an_episode_repeats_bit_for_bit_wherever_and_after_whatever(mt10: MetaWorldVectorEnv, name: str) -> None:
    task = MT10.index(name)
    first = played(mt10, 0, EpisodeSpec(0, task, 7))
    mt10.reset([0], [EpisodeSpec(1, task, 8)])
    while mt10.instance(0).running:
        mt10.step([0], mt10.expert_action(0)[None, None])  # which moves things
    assert np.array_equal(played(mt10, 0, EpisodeSpec(2, task, 7)), first)
    assert np.array_equal(played(mt10, 1, EpisodeSpec(3, task, 7)), first)


def test_placements_of_seeds_and_of_benchmark_states_are_all_different(mt10: MetaWorldVectorEnv) -> None:
    episodes = [EpisodeSpec(i, REACH, seed=i) for i in range(3)]
    episodes += [EpisodeSpec(i, REACH, seed=0, init_state=i) for i in range(3)]
    starts = set()
    for episode in episodes:
        mt10.reset([0], [episode])
        starts.add(tuple(mt10.instance(0).simulation.env._target_pos))
    assert len(starts) == len(episodes)
    mt10.reset([0], [EpisodeSpec(0, REACH, seed=99, init_state=2)])
    assert tuple(mt10.instance(0).simulation.env._target_pos) in starts, "the state's number decides, not the seed"


@pytest.mark.parametrize("name", MT10)
def test_the_scripted_expert_solves_the_task(mt10: MetaWorldVectorEnv, name: str) -> None:
    mt10.reset([0], [EpisodeSpec(0, MT10.index(name), 0, init_state=0)])
    before = mt10.potential([0])[0]
    result = mt10.step([0], mt10.expert_action(0)[None, None])
    while not (result.terminated[0] or result.truncated[0]):
        result = mt10.step([0], mt10.expert_action(0)[None, None])
    assert result.success[0]
    assert result.rewards.tolist() == [[1.0]]
    assert 30 < mt10.instance(0).steps < 250
    assert before < 0.25
    assert before + 0.1 < mt10.potential([0])[0] <= 1


def test_minus_one_opens_the_gripper_and_one_closes_it(mt10: MetaWorldVectorEnv) -> None:
    seen = empty_observation(mt10.spec, 2)
    openings = []
    for command in (ACTIONS.dims[3].gripper.open, ACTIONS.dims[3].gripper.closed):  # type: ignore[union-attr]
        mt10.reset([0], [EpisodeSpec(0, REACH, 0)])
        mt10.step([0], np.tile(np.float32([0, 0, 0, command]), (1, 30, 1)))
        mt10.observe([0], seen)
        openings.append(seen.proprio[0, 3])
    assert openings[0] > 0.9 > 0.5 > openings[1]


def test_axes_are_those_of_the_state(mt10: MetaWorldVectorEnv) -> None:
    seen = empty_observation(mt10.spec, 2)
    for axis in range(3):
        mt10.reset([0], [EpisodeSpec(0, REACH, 0)])
        mt10.observe([0], seen)
        before = seen.proprio[0].copy()
        action = np.zeros((1, 10, 4), np.float32)
        action[..., axis] = 1
        mt10.step([0], action)
        mt10.observe([0], seen)
        moved = seen.proprio[0, :3] - before[:3]
        assert moved.argmax() == axis
        assert 0.03 < moved[axis] < 0.12, "ten steps of a centimetre, and the arm lags behind"


def test_pictures_are_those_of_meta_world_turned_upright() -> None:
    env = make_env(MetaWorldConfig(tasks=("window-open-v3",), image_size=64), 2)
    assert isinstance(env, MetaWorldVectorEnv)
    seen = empty_observation(env.spec, 2)
    env.reset([0, 1], [EpisodeSpec(0, 0, 3), EpisodeSpec(1, 0, 4)])
    env.observe([0, 1], seen)
    scene = env.instance(1).simulation.env
    camera = {"width": 64, "height": 64, "camera_name": "corner4"}
    from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

    mujoco.mj_forward(scene.model, scene.data)  # what a reset places last is in the first picture
    own = MujocoRenderer(scene.model, scene.data, **camera)
    picture = own.render("rgb_array")
    assert picture is not None
    assert np.array_equal(picture[::-1, ::-1], seen.images[1, 0])
    assert not np.array_equal(seen.images[0], seen.images[1])
    own.close()
    env.close()


def test_plain_pictures_show_the_same_scene_without_shadows(mt10: MetaWorldVectorEnv) -> None:
    images = {}
    for rendering in ("plain", "full"):
        env = make_env(MetaWorldConfig(tasks=("window-open-v3",), image_size=48, rendering=rendering), 1)
        seen = empty_observation(env.spec, 1)
        env.reset([0], [EpisodeSpec(0, 0, 3)])
        env.observe([0], seen)
        images[rendering] = seen.images[0, 0].astype(float)
        env.close()
    difference = np.abs(images["plain"] - images["full"])
    assert 1 < difference.mean() < 20
    mt10.reset([1], [EpisodeSpec(0, WINDOW, 3)])
    seen = empty_observation(mt10.spec, 2)
    mt10.observe([1], seen)
    assert np.array_equal(seen.images[1, 0], images["plain"]), "what else a process draws changes nothing"


def test_the_spec_of_mt10_and_of_named_tasks() -> None:
    spec = env_spec(MetaWorldConfig())
    assert spec.instructions == tuple(INSTRUCTIONS[name] for name in MT10)
    assert len(set(spec.instructions)) == 10
    assert spec.max_episode_steps == 500
    assert env_spec(MetaWorldConfig(tasks=("reach-v3",), proprio=False)).proprio_dim == 0


@pytest.mark.parametrize(
    ("tasks", "problem"),
    [
        (("reach-v2",), "no task reach-v2: did you mean reach-v3?"),
        (("cook",), "no task cook: see docs/metaworld.md"),
        (("push-v3", "reach-v3", "push-back-v3"), "push-v3 and push-back-v3 have the same instruction"),
    ],
)
def test_tasks_that_cannot_be_are_refused(tasks: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        MetaWorldConfig(tasks=tasks)


def test_a_missing_package_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "metaworld" else find(name))
    with pytest.raises(EnvError, match=r"'metaworld' is missing: bash scripts/setup\.sh"):
        module.env_spec(MetaWorldConfig())


def test_the_names_are_those_of_meta_world(mt10: MetaWorldVectorEnv) -> None:
    from metaworld import env_dict

    assert tuple(env_dict.MT10_V3) == MT10
    assert set(env_dict.ALL_V3_ENVIRONMENTS) == set(INSTRUCTIONS)
