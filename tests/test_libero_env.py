"""LiberoVectorEnv against the untouched environment of hf-libero, bit for bit, and its own duties."""

import itertools
from functools import partial

import numpy as np
import pytest

from envs import make_env
from envs.base import EnvError, empty_observation
from envs.libero import env as env_module
from envs.libero.conventions import NO_OP, to_robosuite
from envs.libero.env import LiberoVectorEnv
from envs.libero.spec import libero_spec
from envs.libero.tasks import STEP_LIMITS, load_init_states, select_tasks, suite_tasks
from envs.libero.untouched import UntouchedEnv
from vla_rl.config import LiberoConfig
from vla_rl.types import Episode

pytestmark = pytest.mark.libero

SIZE = 48


def make(suite="libero_spatial", tasks=(0,), slots=1, **keys):
    return LiberoVectorEnv(LiberoConfig(suite=suite, tasks=tasks, image_size=SIZE, **keys), slots)


def random_actions(seed, steps, lean=-0.3):
    """Convention actions that reach the table, with some zero rotations (robosuite treats these apart)."""
    rng = np.random.default_rng(seed)
    actions = rng.uniform(-1, 1, (steps, 7)).astype(np.float32)
    actions[:, 2] += np.float32(lean)
    actions[::3, 3:6] = 0
    actions[:, 6] = rng.integers(0, 2, steps)
    return actions


class Untouched(UntouchedEnv):
    """Renders only where asked to: it would at every step, wanted or not, at many times the cost of all else."""

    def __init__(self, task, seed, init_state, joint_noise=0.0):
        super().__init__(task, ("agentview", "robot0_eye_in_hand"), SIZE)
        state = None if init_state is None else load_init_states(task)[init_state]
        self.reset(seed, state, joint_noise, settle_steps=9)
        self.play(NO_OP, render=True)

    def step(self, action):
        return self.play(action, render=False)

    def play(self, action, render):
        sim = self.env.env.sim
        sim.render = partial(type(sim).render, sim) if render else lambda **_: np.zeros((SIZE, SIZE, 3), np.uint8)
        return super().step(action)

    @property
    def state(self):
        return self.env.get_sim_state()


def assert_same_view(env, untouched):
    view = empty_observation(env.spec, env.num_slots)
    env.observe([0], view)
    for image, name in zip(view.images[0], env.spec.views, strict=True):
        assert np.array_equal(image, untouched.image(name))
    assert np.array_equal(view.proprio[0], untouched.proprioception().astype(np.float32))


def assert_exact(suite, number, init_state, actions, views_at, seed=11, joint_noise=0.0):
    """The same trajectory in both environments, while a second slot of the same model runs something else."""
    task = suite_tasks(suite)[number]
    env = make(suite, (number,), slots=2, wrist_camera=True, joint_noise=joint_noise)
    untouched = Untouched(task, seed, init_state, joint_noise)
    try:
        env.reset([1], [Episode(id=1, task=0, seed=seed + 1)])
        env.reset([0], [Episode(id=0, task=0, seed=seed, init_state=init_state)])
        assert np.array_equal(env.demo_state(0)["states"], untouched.state)
        assert_same_view(env, untouched)
        for step in itertools.count():
            action = actions(env, step)
            if action is None:
                return None
            result = env.step([0], action[None, None])
            done = untouched.play(to_robosuite(action), render=step in views_at)
            if step % 8 == 0:
                env.step([1], action[None, None])
            assert np.array_equal(env.demo_state(0)["states"], untouched.state), f"differs after step {step}"
            assert bool(result.success[0]) == bool(done)
            if step in views_at:
                assert_same_view(env, untouched)
            if done or result.truncated[0]:
                return bool(done)
    finally:
        untouched.close()
        env.close()


def test_the_reference_behaves_as_the_environment_through_the_protocol():
    """Settling, chunks, rewards, the end of an episode, views, proprioception: nothing differs but the time."""
    config = LiberoConfig(suite="libero_goal", tasks=(1,), image_size=32, joint_noise=0.02, max_episode_steps=10)
    envs = [make_env(config.model_copy(update={"implementation": name}), 1) for name in ("fast", "untouched")]
    views, results = [], []
    for env in envs:
        env.reset([0], [Episode(id=0, task=0, seed=5, record=True)])
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


def from_list(actions):
    return lambda env, step: actions[step] if step < len(actions) else None


@pytest.mark.parametrize(("suite", "number", "init_state"), [("libero_spatial", 4, 3), ("libero_10", 2, None)])
def test_equals_the_untouched_environment(suite, number, init_state):
    """State, success, images of both cameras and proprioception. Fixtures move, the stove has a lamp, drawers open."""
    assert_exact(suite, number, init_state, from_list(random_actions(0, 25)), views_at={0, 24})


def test_joint_noise_equals_an_initial_state_made_of_the_placement():
    assert_exact("libero_goal", 3, None, from_list(random_actions(2, 20)), views_at={0, 19}, joint_noise=0.02)


def test_joint_noise_spreads_the_arm_as_the_benchmark_does():
    env = make(joint_noise=0.02)
    place = env._scene(0).model.place
    slot = env._scene(0).model.new_slot()
    sampled = []
    for seed in range(40):
        place(slot, seed, None, 0.02)
        sampled.append(slot.data.qpos[:7].copy())
    env.close()
    benchmark = load_init_states(suite_tasks("libero_spatial")[0])[:, 1:8]
    assert np.std(benchmark, axis=0).mean() == pytest.approx(np.std(sampled, axis=0).mean(), rel=0.3)


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
def test_equals_the_untouched_environment_over_expert_episodes(suite, number, init_state):
    rng = np.random.default_rng(0)

    def noisy_expert(env, step):
        action = env.expert_action(0)
        action[:6] += 0.2 * rng.normal(size=6).astype(np.float32)
        return action

    success = assert_exact(suite, number, init_state, noisy_expert, views_at=set(range(0, 600, 40)))
    assert success is not None


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "number"), [("libero_90", 20), ("libero_goal", 7), ("libero_object", 0)])
def test_equals_the_untouched_environment_over_long_random_episodes(suite, number):
    assert_exact(suite, number, None, from_list(random_actions(1, 150)), views_at={50, 100, 149})


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
    spec = libero_spec(LiberoConfig(suite="libero_10", tasks=(3, 1), wrist_camera=True))
    assert spec.max_episode_steps == 520
    assert spec.views == ("agentview", "robot0_eye_in_hand")
    assert spec.instructions[1] == suite_tasks("libero_10")[1].instruction
    assert (spec.proprio_dim, spec.action_dim, spec.init_states) == (8, 7, 50)
    blind = libero_spec(LiberoConfig(proprio=False, tasks=(), max_episode_steps=33))
    assert (blind.proprio_dim, blind.max_episode_steps, len(blind.instructions)) == (0, 33, 10)
    assert [STEP_LIMITS[f"libero_{s}"] for s in ("spatial", "object", "goal", "10", "90")] == [220, 280, 300, 520, 400]


def test_missing_tasks_and_states_are_named():
    with pytest.raises(EnvError, match=r"libero_spatial has no task 10: its tasks are 0\.\.9"):
        select_tasks("libero_spatial", (2, 10))
    with pytest.raises(EnvError, match="no suite 'libero_100'"):
        suite_tasks("libero_100")
    env = make()
    with pytest.raises(EnvError, match=r"episode 7 asks for initial state 50: libero_spatial/0 has 0\.\.49"):
        env.reset([0], [Episode(id=7, task=0, seed=0, init_state=50)])
    with pytest.raises(EnvError, match="episode 8 asks for task 1"):
        env.reset([0], [Episode(id=8, task=1, seed=0)])
    env.close()


def test_gripper_convention():
    commands = to_robosuite(np.array([[0.1, 0, 0, 0, 0, 0, g] for g in (0.0, 0.3, 0.5, 0.8, 1.0)]))
    assert commands[:, 6].tolist() == [1, 1, 0, -1, -1]
    assert (commands[:, 0] == 0.1).all()
    with pytest.raises(ValueError, match="finite, got nan"):
        to_robosuite(np.full((1, 7), np.nan))


def test_placements_depend_on_the_seed_alone():
    """Same seed, same state: in a new environment, in another slot, whatever ran before, whatever numpy's state."""
    env = make(tasks=(0, 4), slots=2)
    env.reset([0], [Episode(id=0, task=1, seed=5)])
    first = env.demo_state(0)["states"]
    np.random.seed(99)
    before = np.random.get_state()[1].copy()
    env.reset([0, 1], [Episode(id=1, task=0, seed=6), Episode(id=2, task=1, seed=8)])
    env.step([0, 1], np.stack([random_actions(1, 4), random_actions(2, 4)]))
    env.reset([1], [Episode(id=3, task=1, seed=5)])
    assert np.array_equal(env.demo_state(1)["states"], first)
    assert np.array_equal(np.random.get_state()[1], before)
    env.reset([1], [Episode(id=4, task=1, seed=6)])
    assert not np.array_equal(env.demo_state(1)["states"], first)
    env.close()


def test_slots_of_one_model_do_not_disturb_each_other():
    """Also what is written into the shared model (places of fixtures) and what is drawn."""
    actions = random_actions(3, 12)
    episodes = [Episode(id=0, task=0, seed=1), Episode(id=1, task=0, seed=2)]
    together, alone = make(slots=2), make(slots=1)
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


def test_the_time_limit_truncates_within_a_chunk():
    env = make(max_episode_steps=5, slots=2)
    env.reset([1], [Episode(id=0, task=0, seed=0, record=True)])
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
    with pytest.raises(ValueError, match="slot 1: episode 0 has ended"):
        env.step([1], np.zeros((1, 3, 7), np.float32))
    with pytest.raises(ValueError, match="slot 0 holds no episode"):
        env.step([0], np.zeros((1, 3, 7), np.float32))
    env.close()


def test_success_terminates_with_reward_one():
    env = make("libero_object", (0,))
    env.reset([0], [Episode(id=0, task=0, seed=0)])
    while True:
        chunk = env.expert_action(0)[None, None]
        result = env.step([0], chunk)
        if result.terminated[0] or result.truncated[0]:
            break
        assert result.rewards.sum() == 0
    assert (result.terminated[0], result.truncated[0], result.success[0]) == (True, False, True)
    assert result.rewards.tolist() == [[1.0]]
    env.close()


def test_models_are_cached_within_a_bound(monkeypatch):
    monkeypatch.setattr(env_module, "MAX_CACHED_MODELS", 2)
    env = make(tasks=(0, 1, 2), slots=2)
    env.reset([0], [Episode(id=0, task=0, seed=3)])
    state, view = env.demo_state(0)["states"], empty_observation(env.spec, 2)
    env.observe([0], view)
    image = view.images[0].copy()
    env.reset([1], [Episode(id=1, task=1, seed=0)])
    env.reset([1], [Episode(id=2, task=2, seed=0)])
    assert list(env._scenes) == [0, 2]
    env.reset([1], [Episode(id=3, task=1, seed=0)])
    env.reset([1], [Episode(id=4, task=0, seed=3)])
    assert len(env._scenes) == 2
    assert np.array_equal(env.demo_state(1)["states"], state)
    env.observe([0, 1], view)
    assert np.array_equal(view.images[0], image)
    assert np.array_equal(view.images[1], image)
    env.close()
    env.close()
