"""Declared actions: conversions, and the way of an action from an environment through files and a policy, and back."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from envs.base import EnvInstance, Outcome, SequentialEnv
from envs.base.demonstrations import collect, read_demonstrations
from envs.base.lerobot_writer import EpisodeData, add_pending, save_episode
from envs.base.recorder import RecordedEnv
from envs.libero.sequential_env import env_spec as libero_spec
from envs.maniskill.tasks import maniskill_spec
from envs.metaworld.env import ACTIONS as META_WORLD
from envs.tabletop.env import env_spec as tabletop_spec
from vla_rl.core.actions import OPENVLA, ROBOSUITE, ActionDim, ActionSpace, Gripper, assumed, end_effector
from vla_rl.core.records import EnvSpec, EpisodeSpec
from vla_rl.policies.base.gaussian import GaussianPolicy, GaussianPolicyConfig
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.openvla_oft.action_codec import ActionCodec
from vla_rl.policies.pi0.statistics import Statistics

STEPS = 40
SPACES = {
    "end effector, as LIBERO, ManiSkill and tabletop declare it": end_effector(),
    "Meta-World's": META_WORLD,
    "2 numbers": ActionSpace.from_box([-1, -1], [1, 1], {}),
    "3, asymmetric": ActionSpace.from_box([0, -5, 2], [1, 0.5, 100], {}),
    "7 without a gripper": ActionSpace.from_box([-1] * 7, [1] * 7, {}),
    "8, a gripper that is not the last": ActionSpace.from_box([-2] * 8, [2] * 8, {3: "closes"}),
    "8, in metres of opening": ActionSpace.from_box([-1] * 7 + [0.0], [1] * 7 + [0.08], {7: "opens"}),
    "14 with two grippers": ActionSpace.from_box([-3, *[-1] * 12, 0], [3, *[1] * 12, 1], {6: "closes", 13: "opens"}),
    "two, of which data sets have one otherwise": ActionSpace(
        (ActionDim("a", 0, 4), ActionDim("left", 0, 1, gripper=OPENVLA, data=ROBOSUITE), ActionDim("b", turn=True))
    ),
}


@dataclass
class Episode(EnvInstance):
    actions: np.ndarray


class Scripted(SequentialEnv[Episode]):
    """Its expert plays random actions within the limits, grippers open or closed; the last step succeeds."""

    def __init__(self, space: ActionSpace) -> None:
        super().__init__(EnvSpec("scripted", ("main",), 16, 1, space, STEPS, ("do it",)), 1)
        self.executed: list[np.ndarray] = []

    def _start(self, env_id: int, episode: EpisodeSpec, previous: Episode | None) -> Episode:
        space, rng = self.spec.actions, np.random.default_rng(episode.seed)
        actions = rng.uniform(space.low, space.high, (STEPS, len(space)))
        for i in space.grippers:
            actions[:, i] = np.where(rng.random(STEPS) < 0.5, space.low[i], space.high[i])
        return Episode(episode, actions=actions.astype(np.float32))

    def _advance(self, instance: Episode, action: np.ndarray) -> Outcome:
        self.executed.append(action.copy())
        return Outcome(0.0, success=instance.steps == STEPS - 1)

    def _images(self, instance: Episode) -> np.ndarray:
        return np.zeros((1, 16, 16, 3), np.uint8)

    def _proprio(self, instance: Episode) -> np.ndarray:
        return np.zeros(1)

    def expert_action(self, env_id: int) -> np.ndarray:
        instance = self.instance(env_id)
        action: np.ndarray = instance.actions[instance.steps]
        return action


def as_hdf5(env: Scripted, folder: Path) -> Path:
    collect(env, [EpisodeSpec(0, 0, 7)], folder / "demos.hdf5")
    return folder / "demos.hdf5"


def as_lerobot(env: Scripted, folder: Path) -> Path:
    """What a run records (``log.dataset``)."""
    recorded = RecordedEnv(env, folder / "lerobot")
    recorded.reset([0], [EpisodeSpec(0, 0, 7)])
    recorded.step([0], np.stack([env.instance(0).actions]))
    add_pending(folder / "lerobot", env.spec)
    return folder / "lerobot"


def assert_within_half_a_bin(codec: ActionCodec, actions: np.ndarray, expected: np.ndarray) -> None:
    width = np.where(codec.bounds.mask, np.subtract(codec.bounds.q99, codec.bounds.q01), 2) / 255
    assert (np.abs(codec.decode(codec.encode(actions)) - expected) <= 0.501 * width).all()


@pytest.mark.parametrize("write", [as_hdf5, as_lerobot])
@pytest.mark.parametrize("name", SPACES)
def test_from_the_environment_through_files_and_clone_back(
    name: str, write: Callable[[Scripted, Path], Path], tmp_path: Path
) -> None:
    env = Scripted(SPACES[name])
    space, path = env.spec.actions, write(env, tmp_path)
    spec = env.spec
    demos = read_demonstrations(
        [path], instructions=spec.instructions, views=spec.views, image_size=16, proprio=1, actions=space
    )
    played = np.stack(env.executed)
    assert np.allclose(demos.actions, played, atol=1e-6 * (space.high - space.low)), "environment to data set and back"
    tokens = ActionCodec.of_space(space).of_actions(demos.actions)
    inside = np.clip(played, tokens.bounds.q01, tokens.bounds.q99)
    assert_within_half_a_bin(tokens, demos.actions, inside)  # the clone's target
    exact = Statistics.of(demos.actions)
    assert np.allclose(exact.denormalize(exact.normalize(demos.actions)), played, atol=1e-5)
    assert_within_half_a_bin(ActionCodec.of_space(space), played, played)  # of a policy that has seen no data


def test_a_gaussian_policy_acts_within_the_limits() -> None:
    space = SPACES["3, asymmetric"]
    spec = Scripted(space).spec

    class Blind(GaussianPolicy):
        def __init__(self, config: GaussianPolicyConfig, spec: EnvSpec) -> None:
            super().__init__(config, spec, width=1)

        def features(self, seen: PolicyInput) -> Tensor:
            return seen.proprio

    policy = Blind(GaussianPolicyConfig(chunk_size=1), spec)
    ends = policy.decode({"actions": np.float32([[[-1, -1, -1]], [[1, 1, 1]]])})[:, 0]
    assert np.allclose(ends, [space.low, space.high])
    between = Statistics.between(space.low, space.high, space.scaled)
    assert np.allclose(between.denormalize(np.float32([[-1, -1, -1], [1, 1, 1]])), [space.low, space.high])


def test_the_simulators_declare_an_arm_with_a_gripper() -> None:
    from envs.libero.config import LiberoConfig
    from envs.maniskill.config import ManiSkillConfig
    from envs.tabletop.config import TabletopConfig

    specs = [maniskill_spec(ManiSkillConfig()), tabletop_spec(TabletopConfig()), libero_spec(LiberoConfig())]
    assert [spec.actions.grippers for spec in specs] == [(6,)] * 3
    assert all(spec.actions.data_grippers() == {6: ROBOSUITE} for spec in specs), "as their data sets have it"
    assert [spec.robot for spec in specs] == ["panda", "unknown", "panda"]


def test_grippers_of_data_are_converted_and_nothing_else() -> None:
    space = end_effector()
    data = np.float32([[0.5, 0, 0, 0, 0, -1, -1], [3, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0.5], [0] * 6 + [-7]])
    assert space.from_data(data)[:, 6].tolist() == [1, 0, 0.25, 1], "open, closed, between, clipped"
    assert np.array_equal(space.from_data(data)[:, :6], data[:, :6])
    stated = space.data_grippers(Gripper(open=0.0, closed=1.0))
    assert space.from_data(np.float32([[0] * 7]), stated)[0, 6] == 1.0
    scale, shift = space.affine()
    assert (scale[6], shift[6]) == (-0.5, 0.5)
    assert assumed(7) == space
    assert assumed(3).grippers == ()


def test_a_file_states_its_grippers() -> None:
    metres = SPACES["8, in metres of opening"]
    assert metres.grippers_of(metres.described()) == {7: Gripper(open=0.08, closed=0.0)}
    with pytest.raises(ValueError, match=r"grippers in the dimensions \[7\], the environment's in \[\]"):
        SPACES["7 without a gripper"].grippers_of(metres.described())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ActionDim("x", 0.0, np.inf), "finite low < high"),
        (lambda: ActionDim("x", 1.0, 1.0), "finite low < high"),
        (lambda: ActionSpace(()), "names of their own"),
        (lambda: ActionSpace((ActionDim("x"), ActionDim("x"))), "names of their own"),
        (lambda: Gripper(1.0, 1.0), "two different numbers"),
    ],
)
def test_what_cannot_be_an_action(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_what_is_recorded_is_what_was_executed(tmp_path: Path) -> None:
    """A policy's number beyond the limits is not what the environment did."""
    env = Scripted(SPACES["3, asymmetric"])
    recorded = RecordedEnv(env, tmp_path)
    recorded.reset([0], [EpisodeSpec(0, 0, 1)])
    recorded.step([0], np.full((1, STEPS, 3), 1e3, np.float32))
    add_pending(tmp_path, env.spec)
    keys = {"instructions": env.spec.instructions, "views": env.spec.views, "image_size": 16, "proprio": 0}
    assert np.allclose(read_demonstrations([tmp_path], actions=env.spec.actions, **keys).actions, env.spec.actions.high)


def test_a_data_set_says_what_its_actions_are(tmp_path: Path) -> None:
    import json

    env = Scripted(SPACES["14 with two grippers"])
    images, ones = np.zeros((3, 1, 16, 16, 3), np.uint8), np.ones((3, 14), np.float32)
    save_episode(tmp_path, EpisodeData("do it", images, np.zeros((3, 1)), ones, np.zeros(3), True), env.spec)
    add_pending(tmp_path, env.spec)
    info = json.loads((tmp_path / "meta/info.json").read_text())
    assert info["features"]["action"]["names"] == [f"action_{i}" for i in range(14)]
    assert (info["robot_type"], info["fps"]) == ("unknown", 20)
