"""LIBERO stepped fast equals the reference environment: a new robosuite or mujoco that breaks this is noticed here."""

import time

import numpy as np
import pytest

from envs import make_env
from envs.base import EnvError, empty_observation
from envs.libero.config import LiberoConfig
from tests.envs.libero.libero_exactness import assert_exact, from_list, make, noisy_expert, random_actions
from vla_rl.core.records import EpisodeSpec

pytestmark = pytest.mark.libero


def test_the_reference_behaves_as_the_environment_through_the_protocol():
    """Settling, chunks, rewards, the end of an episode, views, proprioception: nothing differs but the time."""
    config = LiberoConfig(suite="libero_goal", tasks=(1,), image_size=32, joint_noise=0.02, max_episode_steps=10)
    envs = [make_env(config.model_copy(update={"implementation": name}), 1) for name in ("fast", "reference")]
    views, results = [], []
    for env in envs:
        env.reset([0], [EpisodeSpec(id=0, task=0, seed=5, record=True)])
        results.append([env.step([0], random_actions(4, 6)[None]) for _ in range(2)])
        view = empty_observation(env.spec, 1)
        env.observe([0], view)
        views.append(view)
    for one, two in zip(*results, strict=True):
        for name in ("rewards", "num_steps", "terminated", "truncated", "success"):
            assert np.array_equal(getattr(one, name), getattr(two, name)), name
    assert results[0][1].truncated[0]
    assert results[0][1].num_steps[0] == 4
    assert np.array_equal(views[0].images, views[1].images)
    assert np.array_equal(views[0].proprio, views[1].proprio)
    assert all(np.array_equal(a, b) for a, b in zip(envs[0].frames(0), envs[1].frames(0), strict=True))
    for env in envs:
        env.close()


@pytest.mark.parametrize(("suite", "number", "init_state"), [("libero_spatial", 4, 3), ("libero_10", 2, None)])
def test_equals_the_reference_environment(suite, number, init_state):
    """State, success, images of both cameras and proprioception. Fixtures move, the stove has a lamp, drawers open."""
    assert_exact(suite, number, init_state, from_list(random_actions(0, 25)), views_at={0, 24})


def test_measuring_bare_costs_changes_nothing():
    """Those of physics and pixels, for `vla-rl benchmark limit`."""
    env = make(wrist_camera=True)
    env.reset([0], [EpisodeSpec(id=0, task=0, seed=0, init_state=0)])
    before, after = empty_observation(env.spec, 1), empty_observation(env.spec, 1)
    env.observe([0], before)
    state = env.demo_state(0)["states"]
    found = env.bare_seconds(0)
    assert found.keys() == {"simulate", "render"}
    assert min(found.values()) > 0
    took = []
    for _ in range(5):
        start = time.perf_counter()
        env.observe([0], after)
        took.append(time.perf_counter() - start)
    assert found["render"] < np.median(took), "of what an observation takes, and not of drawings that are compared"
    assert np.array_equal(before.images, after.images)
    assert np.array_equal(env.demo_state(0)["states"], state)
    env.close()


def test_joint_noise_equals_an_initial_state_made_of_the_placement():
    assert_exact("libero_goal", 3, None, from_list(random_actions(2, 20)), views_at={0, 19}, joint_noise=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "number", "init_state"),
    [
        ("libero_spatial", 0, 0),
        ("libero_spatial", 9, None),
        ("libero_object", 7, None),
        ("libero_goal", 1, 5),
        ("libero_10", 5, 2),
        ("libero_90", 12, None),
    ],
)
def test_equals_the_reference_environment_over_expert_episodes(suite, number, init_state):
    success = assert_exact(suite, number, init_state, noisy_expert(0), views_at=set(range(0, 600, 40)))
    assert success is not None


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "number"), [("libero_90", 20), ("libero_goal", 7), ("libero_object", 0)])
def test_equals_the_reference_environment_over_long_random_episodes(suite, number):
    assert_exact(suite, number, None, from_list(random_actions(1, 150)), views_at={50, 100, 149})


_EPISODES = [
    (suite, number)
    for suite, numbers in {
        "libero_spatial": (1, 6),
        "libero_object": (2, 9),
        "libero_goal": (0, 5),
        "libero_10": (1, 8),
        "libero_90": (40, 73),
    }.items()
    for number in numbers
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("suite", "number"), _EPISODES)
def test_equals_the_reference_environment_over_whole_episodes(suite, number, seed):
    """Seed 0: a benchmark state and the expert where it has a plan. Seeds 1, 2: sampled placements, random actions."""
    init_state = 17 if seed == 0 else None
    random = from_list(random_actions(seed, 600))
    views = set(range(0, 600, 100))
    try:
        actions = noisy_expert(seed) if seed == 0 else random
        ended = assert_exact(suite, number, init_state, actions, views_at=views, seed=seed)
    except EnvError:
        ended = assert_exact(suite, number, init_state, random, views_at=views, seed=seed)
    assert ended is not None, "the episode was not played to its end"
