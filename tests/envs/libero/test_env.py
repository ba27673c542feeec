"""LiberoVectorEnv's own duties; that it equals the reference environment is tested in ``test_exactness``."""

import numpy as np
import pytest

from envs.base import EnvError, empty_observation
from envs.libero.config import LiberoConfig
from envs.libero.env import LiberoVectorEnv, env_spec
from envs.libero.protocol.conventions import to_robosuite
from envs.libero.protocol.suites import select_tasks
from envs.libero.protocol.tasks import STEP_LIMITS, load_init_states, suite_tasks
from envs.libero.sequential_env import JOINTS
from tests.envs.libero.libero_exactness import make, random_actions
from vla_rl.core.records import EpisodeSpec

pytestmark = pytest.mark.libero


def test_joint_noise_spreads_the_arm_as_the_benchmark_does():
    env = make(joint_noise=0.02)
    place = env._scene(0).model.place
    state = env._scene(0).model.new_state()
    sampled = []
    for seed in range(40):
        place(state, seed, None, 0.02)
        sampled.append(state.data.qpos[:7].copy())
    env.close()
    benchmark = load_init_states(suite_tasks("libero_spatial")[0])[:, 1:8]
    assert np.std(benchmark, axis=0).mean() == pytest.approx(np.std(sampled, axis=0).mean(), rel=0.3)


def test_all_tasks_are_listed_as_the_benchmark_lists_them(capsys):
    LiberoVectorEnv(LiberoConfig(), 1).close()  # makes the import below safe
    from libero.libero.benchmark import get_benchmark

    for suite in STEP_LIMITS:
        theirs = get_benchmark(suite)()
        ours = suite_tasks(suite)
        assert [(t.name, t.language) for t in theirs.tasks] == [(t.name, t.instruction) for t in ours]
        assert all(task.bddl_file.is_file() for task in ours)
    theirs = get_benchmark("libero_10")().get_task_init_states(4)
    assert np.array_equal(theirs, load_init_states(suite_tasks("libero_10")[4]))
    assert sum(len(suite_tasks(suite)) for suite in STEP_LIMITS) == 130


def test_spec_follows_the_protocol():
    spec = env_spec(LiberoConfig(suite="libero_10", tasks=(3, 1), wrist_camera=True))
    assert (spec.suite, spec.max_episode_steps) == ("libero_10", 520)
    assert spec.views == ("agentview", "robot0_eye_in_hand")
    assert spec.instructions[1] == suite_tasks("libero_10")[1].instruction
    assert (spec.proprio_dim, spec.action_dim, spec.init_states) == (8, 7, 50)
    blind = env_spec(LiberoConfig(proprio=False, tasks=(), max_episode_steps=33))
    assert (blind.proprio_dim, blind.max_episode_steps, len(blind.instructions)) == (0, 33, 10)
    assert [STEP_LIMITS[f"libero_{s}"] for s in ("spatial", "object", "goal", "10", "90")] == [220, 280, 300, 520, 400]


def test_missing_tasks_and_states_are_named():
    with pytest.raises(EnvError, match=r"libero_spatial has no task 10: its tasks are 0\.\.9"):
        select_tasks("libero_spatial", (2, 10))
    with pytest.raises(EnvError, match="no suite 'libero_100'"):
        suite_tasks("libero_100")
    env = make()
    with pytest.raises(EnvError, match=r"episode 7 asks for initial state 50 of task 0: .* states 0\.\.49"):
        env.reset([0], [EpisodeSpec(id=7, task=0, seed=0, init_state=50)])
    with pytest.raises(EnvError, match="episode 8 asks for task 1"):
        env.reset([0], [EpisodeSpec(id=8, task=1, seed=0)])
    env.close()


def test_gripper_convention():
    commands = to_robosuite(np.array([[0.1, 0, 0, 0, 0, 0, g] for g in (0.0, 0.3, 0.5, 0.8, 1.0)]))
    assert commands[:, 6].tolist() == [1, 1, 0, -1, -1]
    assert (commands[:, 0] == 0.1).all()


def test_placements_depend_on_the_seed_alone():
    """Same seed, same state: in a new simulator, in any environment, whatever ran before, whatever numpy's state."""
    env = make(tasks=(0, 4), num_envs=2)
    env.reset([0], [EpisodeSpec(id=0, task=1, seed=5)])
    first = env.demo_state(0)["states"]
    np.random.seed(99)
    before = np.random.get_state()[1].copy()
    env.reset([0, 1], [EpisodeSpec(id=1, task=0, seed=6), EpisodeSpec(id=2, task=1, seed=8)])
    env.step([0, 1], np.stack([random_actions(1, 4), random_actions(2, 4)]))
    env.reset([1], [EpisodeSpec(id=3, task=1, seed=5)])
    assert np.array_equal(env.demo_state(1)["states"], first)
    assert np.array_equal(np.random.get_state()[1], before)
    env.reset([1], [EpisodeSpec(id=4, task=1, seed=6)])
    assert not np.array_equal(env.demo_state(1)["states"], first)
    env.close()


def test_environments_of_one_model_do_not_disturb_each_other():
    """Also what is written into the shared model (places of fixtures) and what is drawn."""
    actions = random_actions(3, 12)
    episodes = [EpisodeSpec(id=0, task=0, seed=1), EpisodeSpec(id=1, task=0, seed=2)]
    together, alone = make(num_envs=2), make(num_envs=1)
    view, single = empty_observation(together.spec, 2), empty_observation(alone.spec, 1)
    together.reset([0, 1], episodes)
    for start in range(0, 12, 4):
        together.step([1, 0], np.stack([actions[start : start + 4][::-1], actions[start : start + 4]]))
    together.observe([1, 0], view)
    alone.reset([0], episodes[:1])
    alone.step([0], actions[None])
    alone.observe([0], single)
    assert np.array_equal(together.demo_state(0)["states"], alone.demo_state(0)["states"])
    assert np.array_equal(view.images[0], single.images[0])
    assert np.array_equal(view.proprio[0], single.proprio[0])
    assert not np.array_equal(view.images[1], single.images[0])
    together.close()
    alone.close()


def test_the_state_is_that_of_the_physics_engine():
    env = make(num_envs=2)
    env.reset([1], [EpisodeSpec(id=0, task=0, seed=3)])
    (first,) = env.state([1])
    data = env.instance(1).state.data
    assert (first.shape, first.dtype) == ((env.spec.state_dim,), np.float32)
    assert np.array_equal(first[3 : 3 + len(data.qpos)], data.qpos.astype(np.float32))
    assert np.count_nonzero(first) <= 3 + len(data.qpos) + len(data.qvel), "the rest is filled up"
    env.step([1], random_actions(1, 4)[None])
    (later,) = env.state([1])
    assert (later[3 + JOINTS :][:7] != first[3 + JOINTS :][:7]).all(), "velocities of the arm"
    env.close()


def test_the_time_limit_truncates_within_a_chunk():
    env = make(max_episode_steps=5, num_envs=2)
    env.reset([1], [EpisodeSpec(id=0, task=0, seed=0, record=True)])
    first = env.step([1], np.zeros((1, 3, 7), np.float32))
    second = env.step([1], np.zeros((1, 3, 7), np.float32))
    assert (first.num_steps[0], first.truncated[0]) == (3, False)
    assert (second.num_steps[0], second.truncated[0], second.terminated[0]) == (2, True, False)
    assert second.rewards.shape == (1, 3)
    frames = env.frames(1)
    assert len(frames) == 5
    view = empty_observation(env.spec, 2)
    env.observe([1], view)
    assert np.array_equal(frames[-1], view.images[1, 0])
    with pytest.raises(ValueError, match="env 1: episode 0 has ended"):
        env.step([1], np.zeros((1, 3, 7), np.float32))
    with pytest.raises(ValueError, match="env 0 holds no episode"):
        env.step([0], np.zeros((1, 3, 7), np.float32))
    with pytest.raises(ValueError, match="not finite: they hold nan"):
        env.step([1], np.full((1, 3, 7), np.nan))
    env.close()


def test_success_terminates_with_reward_one():
    env = make("libero_object", (0,))
    env.reset([0], [EpisodeSpec(id=0, task=0, seed=0)])
    while True:
        chunk = env.expert_action(0)[None, None]
        result = env.step([0], chunk)
        if result.terminated[0] or result.truncated[0]:
            break
        assert result.rewards.sum() == 0
    assert (result.terminated[0], result.truncated[0], result.success[0]) == (True, False, True)
    assert result.rewards.tolist() == [[1.0]]
    env.close()


def test_models_are_cached_within_a_bound():
    """With almost no cache, only models that environments use stay."""
    env = make(tasks=(0, 1, 2), num_envs=2, model_cache_gib=1e-3)
    env.reset([0], [EpisodeSpec(id=0, task=0, seed=3)])
    state, view = env.demo_state(0)["states"], empty_observation(env.spec, 2)
    env.observe([0], view)
    image = view.images[0].copy()
    env.reset([1], [EpisodeSpec(id=1, task=1, seed=0)])
    env.reset([1], [EpisodeSpec(id=2, task=2, seed=0)])
    assert list(env._scenes) == [0, 2]
    env.reset([1], [EpisodeSpec(id=3, task=1, seed=0)])
    env.reset([1], [EpisodeSpec(id=4, task=0, seed=3)])
    assert len(env._scenes) == 2
    assert np.array_equal(env.demo_state(1)["states"], state)
    env.observe([0, 1], view)
    assert np.array_equal(view.images[0], image)
    assert np.array_equal(view.images[1], image)
    env.close()
    env.close()
