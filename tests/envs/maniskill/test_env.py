"""ManiSkill behind the protocol: the real simulator, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from envs.base import EnvError, empty_observation
from envs.base.demonstrations import HasDemoState, collect, read_demonstrations
from envs.maniskill.config import ManiSkillConfig
from envs.maniskill.env import ManiSkillVectorEnv
from envs.maniskill.tasks import TASKS
from vla_rl.core.records import EpisodeSpec, Observation, StepResult

pytestmark = pytest.mark.maniskill

SIZE = 64


def make(*tasks: str, num_envs: int = 1, **keys: object) -> ManiSkillVectorEnv:
    values = {"tasks": tasks or ("PushCube-v1",), "image_size": SIZE, "backend": "physx_cpu"} | keys
    return ManiSkillVectorEnv(ManiSkillConfig(**values), num_envs)  # type: ignore[arg-type]


def start(env: ManiSkillVectorEnv, env_id: int = 0, **fields: object) -> None:
    values = {"id": 0, "task": 0, "seed": 0} | fields
    env.reset([env_id], [EpisodeSpec(**values)])  # type: ignore[arg-type]


def random_actions(seed: int, count: int) -> np.ndarray:
    """float32 [count, 7]."""
    actions = np.random.default_rng(seed).uniform(-1, 1, (count, 7)).astype(np.float32)
    actions[:, 6] = actions[:, 6] > 0
    return actions


def act(env: ManiSkillVectorEnv, actions: np.ndarray, env_id: int = 0) -> StepResult:
    return env.step([env_id], actions[None])


def observe(env: ManiSkillVectorEnv) -> Observation:
    out = empty_observation(env.spec, env.num_envs)
    env.observe(range(env.num_envs), out)
    return out


def state(env: ManiSkillVectorEnv, env_id: int = 0) -> np.ndarray:
    return env.demo_state(env_id)["states"]


def play(env: ManiSkillVectorEnv, env_id: int = 0) -> tuple[bool, int]:
    """Success and length of one expert episode that has been started."""
    for step in range(1, 1000):
        result = act(env, env.expert_action(env_id)[None], env_id)
        if result.terminated[0] or result.truncated[0]:
            return bool(result.success[0]), step
    raise AssertionError("the episode did not end")


@pytest.fixture(scope="module")
def push() -> Iterator[ManiSkillVectorEnv]:
    """Two environments of PushCube-v1; making a scene takes a while."""
    env = make(num_envs=2)
    yield env
    env.close()


def test_the_same_seed_gives_the_same_episode_in_any_environment_whatever_ran_before(push: ManiSkillVectorEnv) -> None:
    actions = random_actions(0, 12)
    fresh = make()
    start(fresh, seed=7)
    act(fresh, actions)
    start(push, env_id=0, seed=3)
    play(push)
    start(push, env_id=1, seed=4)
    act(push, random_actions(1, 9), env_id=1)
    for env_id in (0, 1):
        start(push, env_id=env_id, seed=7)
        act(push, actions, env_id=env_id)
        assert np.array_equal(state(push, env_id), state(fresh))
    start(push, seed=8)
    assert not np.array_equal(state(push), state(push, 1))
    assert np.array_equal(observe(push).images[1], observe(fresh).images[0])
    fresh.close()


def test_global_random_state_neither_matters_nor_changes(push: ManiSkillVectorEnv) -> None:
    import torch

    np.random.seed(1)
    torch.manual_seed(1)
    before = np.random.get_state()[1].copy(), torch.get_rng_state().clone()
    start(push, env_id=0, seed=5)
    assert np.array_equal(np.random.get_state()[1], before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    np.random.seed(2)
    torch.manual_seed(2)
    start(push, env_id=1, seed=5)
    assert np.array_equal(state(push, 0), state(push, 1))


def test_initial_states_are_fixed_and_differ(push: ManiSkillVectorEnv) -> None:
    start(push, env_id=0, seed=5, init_state=3)
    start(push, env_id=1, seed=6, init_state=3)
    assert np.array_equal(state(push, 0), state(push, 1))
    start(push, env_id=1, seed=6, init_state=4)
    assert not np.array_equal(state(push, 0), state(push, 1))


@pytest.mark.parametrize(
    ("fields", "text"), [({"task": 1}, r"tasks 0\.\.0"), ({"task": -1}, "task -1"), ({"init_state": 50}, r"0\.\.49")]
)
def test_unknown_tasks_and_states_are_refused(push: ManiSkillVectorEnv, fields: dict[str, int], text: str) -> None:
    with pytest.raises(EnvError, match=text):
        start(push, **fields)


def test_a_chunk_stops_where_the_cube_is_on_the_target(push: ManiSkillVectorEnv) -> None:
    start(push, seed=2)
    success, steps = play(push)
    assert success
    start(push, seed=2)
    for _ in range(steps - 1):
        act(push, push.expert_action(0)[None])
    result = act(push, np.repeat(push.expert_action(0)[None], 5, axis=0))
    assert result.num_steps.tolist() == [1]
    assert result.rewards.tolist() == [[1, 0, 0, 0, 0]]
    assert (result.terminated[0], result.truncated[0], result.success[0]) == (True, False, True)
    with pytest.raises(ValueError, match="env 0: episode 0 has ended"):
        act(push, np.zeros((1, 7), np.float32))


def test_the_time_limit_truncates_within_a_chunk() -> None:
    env = make(max_episode_steps=5, num_envs=2)
    start(env, env_id=1, record=True)
    still = np.zeros((3, 7), np.float32)
    first, second = act(env, still, env_id=1), act(env, still, env_id=1)
    assert (first.num_steps[0], first.truncated[0]) == (3, False)
    assert (second.num_steps[0], second.truncated[0], second.terminated[0]) == (2, True, False)
    assert second.rewards.tolist() == [[0, 0, 0]]
    frames = env.frames(1)
    assert len(frames) == 5
    view = empty_observation(env.spec, 2)
    env.observe([1], view)
    assert np.array_equal(frames[-1], view.images[1, 0])
    assert not view.images[0].any()
    with pytest.raises(ValueError, match="env 0 holds no episode"):
        act(env, still)
    with pytest.raises(ValueError, match="env 0 holds no episode"):
        env.observe([0], view)
    env.close()
    env.close()


def test_environments_that_are_not_stepped_stand_still(push: ManiSkillVectorEnv) -> None:
    start(push, env_id=0, seed=1)
    start(push, env_id=1, seed=2)
    before = state(push, 0)
    act(push, random_actions(2, 6), env_id=1)
    assert np.array_equal(state(push, 0), before)


@pytest.mark.parametrize(
    ("env_ids", "actions", "text"),
    [
        ([0], np.zeros((1, 7), np.float32), "need"),
        ([0], np.zeros((1, 8, 6), np.float32), "need"),
        ([0], np.zeros((1, 0, 7), np.float32), "need"),
        ([0, 0], np.zeros((2, 8, 7), np.float32), "twice"),
        ([0], np.full((1, 8, 7), np.nan, np.float32), "not finite"),
    ],
)
def test_bad_steps_are_refused(push: ManiSkillVectorEnv, env_ids: list[int], actions: np.ndarray, text: str) -> None:
    start(push)
    with pytest.raises(ValueError, match=text):
        push.step(env_ids, actions)


def test_the_gripper_opens_at_one_and_closes_at_zero(push: ManiSkillVectorEnv) -> None:
    """And proprioception shows it, as well as the motion of the hand."""
    start(push, seed=1)
    command = np.array([[0, 0, 1, 0, 0, 0, 0]] * 4, np.float32)
    resting = observe(push).proprio[0]
    act(push, command)
    closed = observe(push).proprio[0]
    act(push, command * 0 + [0, 0, 0, 0, 0, 0, 1])
    opened = observe(push).proprio[0]
    assert closed[6:].max() < 0.01 < 0.03 < opened[6:].min()
    assert closed[2] - resting[2] > 0.1
    np.testing.assert_allclose(closed[:2], resting[:2], atol=0.02)
    assert np.abs(resting[3:6]).max() < 0.2  # pointing down is no turn


def test_rendering_happens_only_in_observe(push: ManiSkillVectorEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    start(push, env_id=0)
    start(push, env_id=1)
    taken: list[str] = []
    for instance in push._instances:
        assert instance is not None
        (camera,) = instance.simulation.env._sensors.values()
        monkeypatch.setattr(camera, "capture", lambda capture=camera.capture: (taken.append("picture"), capture()))
    start(push, env_id=0)
    act(push, random_actions(0, 4))
    assert taken == []
    view = empty_observation(push.spec, 2)
    push.observe([1], view)
    assert taken == ["picture"]
    assert view.images.shape == (2, 1, SIZE, SIZE, 3)
    assert view.images[1].std() > 10


def test_environments_change_tasks_and_scenes_are_used_again() -> None:
    env = make("PickCube-v1", "PushCube-v1", num_envs=2)
    start(env, env_id=0, task=0, seed=1)
    picking = state(env, 0)
    start(env, env_id=1, task=1, seed=1)
    view = observe(env)
    assert view.task.tolist() == [0, 1]
    scenes = {id(instance.simulation) for instance in env._instances if instance}
    start(env, env_id=0, task=0, seed=4)
    env.reset([1], [EpisodeSpec(id=1, task=0, seed=1)])  # a second scene of the first task
    assert np.array_equal(state(env, 1), picking)
    start(env, env_id=0, task=1, seed=1)  # the scene that environment 1 has left
    assert np.array_equal(observe(env).images[0], view.images[1])
    assert {id(env._instances[0].simulation)} < scenes
    env.close()


@pytest.mark.parametrize("shown", [True, False])
def test_the_goal_is_drawn_where_wanted(shown: bool) -> None:
    env = make("PickCube-v1", show_goal=shown)
    start(env, seed=1)
    image = observe(env).images[0, 0].astype(int)
    green = (image[..., 1] > image[..., 0] + 60) & (image[..., 1] > image[..., 2] + 60)
    assert bool(green.any()) is shown
    env.close()


def test_the_potential_grows_on_the_expert_s_way(push: ManiSkillVectorEnv) -> None:
    start(push, seed=3)
    before = push.potential([0])
    assert play(push)[0]
    assert before.dtype == np.float32
    assert 0.0 < before[0] < 0.5 < push.potential([0])[0] <= 1.0


@pytest.mark.parametrize("task", ["PushCube-v1", "PickCube-v1", "StackCube-v1"])
def test_the_expert_solves(task: str) -> None:
    env = make(task)
    results = []
    for seed in range(8):
        start(env, seed=seed)
        results.append(play(env)[0])
    assert np.mean(results) >= 0.85
    env.close()


def test_demonstrations_can_be_cloned(push: ManiSkillVectorEnv, tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert isinstance(push, HasDemoState)
    path = tmp_path / "demos.hdf5"
    counts = collect(push, [EpisodeSpec(id=i, task=0, seed=i) for i in range(2)], path, noise=0.1)
    assert counts.written == 2
    demos = read_demonstrations(
        [path],
        instructions=[TASKS["PushCube-v1"].instruction],
        views=push.spec.views,
        image_size=SIZE,
        proprio=8,
    )
    assert demos.images.shape == (counts.steps, 1, SIZE, SIZE, 3)
    start(push, seed=0)
    np.testing.assert_array_equal(demos.images[0], observe(push).images[0])
    np.testing.assert_allclose(demos.proprio[0], observe(push).proprio[0], rtol=1e-6)
    np.testing.assert_allclose(demos.actions[0], push.expert_action(0), atol=1e-6)
