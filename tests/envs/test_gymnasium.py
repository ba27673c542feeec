"""Both directions of gymnasium: its environments as simulators, and the simulators as its environments."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envs import env_spec, make_env
from envs.base import EnvError, empty_observation
from envs.gymnasium.config import GymnasiumConfig
from envs.gymnasium.registration import IDS, register
from tests import ROOT
from vla_rl.config.loading import load_config
from vla_rl.core.records import EpisodeSpec


class Point(gymnasium.Env):
    """A point on a line, with the forms of observation that packages of robot tasks have."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, speed: float = 1.0, form: str = "dict") -> None:
        self.render_mode, self.speed, self.form = render_mode, speed, form
        self.action_space = spaces.Box(np.float32([-2.0, 0.0]), np.float32([4.0, 1.0]))
        vector = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        seen = {"camera": spaces.Dict({"top": spaces.Box(0, 255, (3, 20, 24), np.uint8)}), "joints": vector}
        self.observation_space = spaces.Dict(seen | {"goal": vector}) if form == "dict" else vector
        self.at = 0.0

    def _seen(self) -> Any:
        vector = np.array([self.at, self.got[0]])
        image = np.full((3, 20, 24), int(np.clip(self.at * 10, 0, 255)), np.uint8)
        return {"camera": {"top": image}, "joints": vector, "goal": vector + 1} if self.form == "dict" else vector

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.at, self.got = float(self.np_random.uniform(0, 5)), np.zeros(2)
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict]:
        assert self.action_space.contains(action)
        self.got = action
        self.at += self.speed * float(action[0])
        return self._seen(), -abs(self.at - 9), False, False, {"is_success": self.at > 9}

    def render(self) -> np.ndarray:
        return np.full((30, 30, 3), 77, np.uint8)


def crowd(num_envs: int, max_episode_steps: int, autoreset: str = "NextStep", **keys: Any) -> SyncVectorEnv:
    """Points that exist only as a vector."""
    make = functools.partial(gymnasium.make, "Point-v0", max_episode_steps=max_episode_steps, **keys)
    return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode(autoreset))


@pytest.fixture(autouse=True)
def point() -> Iterator[None]:
    gymnasium.register("Point-v0", entry_point=Point, max_episode_steps=6, disable_env_checker=True)
    gymnasium.register("Crowd-v0", vector_entry_point=crowd, max_episode_steps=6)
    yield
    del gymnasium.registry["Point-v0"], gymnasium.registry["Crowd-v0"]


def test_an_environment_becomes_a_simulator() -> None:
    config = GymnasiumConfig(id="Point-v0", options={"speed": 0.5}, image_size=16)
    spec = env_spec(config)
    assert (spec.views, spec.proprio_dim, spec.action_dim) == (("camera/top",), 4, 2)
    assert (spec.max_episode_steps, spec.instructions) == (6, ("Point",))
    env = make_env(config, 2)
    env.reset([0, 1], [EpisodeSpec(0, 0, 5), EpisodeSpec(1, 0, 5, init_state=3)])
    seen = empty_observation(spec, 2)
    env.observe([0, 1], seen)
    start = seen.proprio[:, 2].copy()  # goal, joints: gymnasium sorts them
    assert start[1] == pytest.approx(np.random.default_rng(3).uniform(0, 5), rel=1e-6)
    assert (seen.images[1] == int(start[1] * 10)).all()
    result = env.step([1], np.float32([[[1.0, 0.5], [5.0, -9.0]]]))  # within the limits; beyond them
    env.observe([1], seen)
    assert seen.proprio[1, 2] - start[1] == pytest.approx(0.5 * 1.0 + 0.5 * 4.0, rel=1e-5)
    assert result.num_steps.tolist() == [2]
    assert result.rewards.sum() == 0.0
    while not (result := env.step([1], np.float32([[[4.0, 0.0]]]))).success[0]:
        assert not result.truncated[0]
    assert result.terminated[0], "success ends the episode"
    assert result.rewards.tolist() == [[1.0]]
    lasting = make_env(config.model_copy(update={"ends_on_success": False}), 1)
    lasting.reset([0], [EpisodeSpec(0, 0, 5, init_state=3)])
    result = lasting.step([0], np.float32([[[4.0, 0.0]] * 9]))
    assert (result.num_steps[0], result.success[0], result.rewards.sum()) == (6, True, 1.0)
    lasting.close()
    idle = env.step([0], np.float32([[[0.0, 0.0]] * 9]))
    assert (idle.truncated[0], idle.num_steps[0]) == (True, 6)
    with pytest.raises(EnvError, match=r"no scripted expert: name files of demonstrations in sft\.demos"):
        env.expert_action(0)
    env.close()


_RENDERED = {"image": "render", "ends_on_success": False}


@pytest.mark.parametrize(
    ("autoreset", "keys"),
    [("NextStep", {}), ("SameStep", {}), ("Disabled", {}), ("NextStep", _RENDERED), ("Disabled", _RENDERED)],
)
def test_a_vector_becomes_a_simulator_that_plays_the_same(autoreset: str, keys: dict) -> None:
    played = []
    for name, options in (("Point-v0", {}), ("Crowd-v0", {"autoreset": autoreset})):
        config = GymnasiumConfig(id=name, options={"speed": 0.5, **options}, instruction="go", **keys)
        spec, env = env_spec(config), make_env(config, 2)
        seen, found = empty_observation(spec, 2), [spec.views, spec.proprio_dim, spec.max_episode_steps]
        env.reset([0, 1], [EpisodeSpec(0, 0, 5), EpisodeSpec(1, 0, 5, init_state=3)])
        for number in range(2, 6):
            env_id = number % 2
            ended = False
            while not ended:
                result = env.step([env_id], np.float32([[[0.8, 0.5], [1.0, -9.0]]]))
                env.observe([env_id], seen)
                ended = bool(result.terminated[0] or result.truncated[0])
                found += [result, seen.images[env_id].copy(), seen.proprio[env_id].copy()]
            env.reset([env_id], [EpisodeSpec(number, 0, number)])
        env.close()
        played.append(found)
    single, vector = played
    assert len(single) == len(vector) > 20
    for one, other in zip(single, vector, strict=True):
        np.testing.assert_equal(vars_of(other), vars_of(one))


def vars_of(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def test_what_the_policy_sees_can_be_chosen() -> None:
    rendered = GymnasiumConfig(id="Point-v0", options={"form": "vector"}, reward="env", max_episode_steps=3)
    spec = env_spec(rendered)
    assert (spec.views, spec.proprio_dim, spec.max_episode_steps) == (("render",), 2, 3)
    env = make_env(rendered, 1)
    env.reset([0], [EpisodeSpec(0, 0, 1)])
    result = env.step([0], np.zeros((1, 1, 2), np.float32))
    assert result.rewards[0, 0] < -1, "the environment's own reward"
    seen = empty_observation(spec, 1)
    env.observe([0], seen)
    assert (seen.images == 77).all()
    env.close()
    some = GymnasiumConfig(id="Point-v0", state=("goal",), image="camera/top, render", instruction="go to nine")
    assert env_spec(some).views == ("camera/top", "render")
    assert (env_spec(some).proprio_dim, env_spec(some).instructions) == (2, ("go to nine",))
    assert env_spec(GymnasiumConfig(id="Point-v0", state=())).proprio_dim == 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"id": "Nowhere-v3"}, "gymnasium cannot make it"),
        ({"id": "no_such_module:Thing-v0"}, "install its package"),
        ({"id": "Crowd-v0", "options": {"sped": 2}}, r"env.id=Crowd-v0 with .*sped"),
        ({"id": "Point-v0", "options": {"sped": 2}}, "sped"),
        ({"id": "Point-v0", "image": "camera/side"}, "env.image=camera/side: .* it has camera/top"),
        ({"id": "Point-v0", "state": ("knees",)}, "env.state=knees: .* it has goal, joints"),
        ({"id": "CartPole-v1"}, r"Discrete\(2\): policies here act in a Box"),
    ],
)
def test_what_cannot_be_trained_on_is_said(keys: dict, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        env_spec(GymnasiumConfig(**keys))


def test_its_keys_come_from_a_config() -> None:
    config = load_config(
        None, ["env=gymnasium", "env.id=Point-v0", "env.options.speed=2.0", "env.options={form: dict}"]
    )
    assert config.env == GymnasiumConfig(id="Point-v0", options={"speed": 2.0, "form": "dict"})


@pytest.mark.filterwarnings("error", "ignore:.*infinity.*", "ignore:.*symmetric.*")
@pytest.mark.parametrize("arguments", [{}, {"proprio": False, "tasks": ("push",)}, {"start_states": "benchmark"}])
def test_a_simulator_passes_the_checker_of_gymnasium(arguments: dict) -> None:
    register()
    env = gymnasium.make("vla_rl/Tabletop-v0", render_mode="rgb_array", **arguments)
    check_env(env.unwrapped)
    env.reset(seed=3, options={"task": 0, "init_state": 4})
    for _ in range(3):
        seen, *_ = env.step(env.action_space.sample())
    assert env.observation_space.contains(seen)
    env.close()


@pytest.mark.libero
@pytest.mark.filterwarnings("error:::gymnasium", "ignore:.*infinity.*", "ignore:.*symmetric.*")
def test_libero_passes_the_checker_of_gymnasium_alone_and_as_a_vector() -> None:
    register()
    small = {"image_size": 32, "tasks": (0,), "settle_steps": 0}
    env = gymnasium.make("vla_rl/LiberoSpatial-v0", render_mode="rgb_array", **small)
    check_env(env.unwrapped, skip_render_check=True)  # it would make one more for each kind of rendering
    env.close()
    vector = gymnasium.make_vec("vla_rl/LiberoSpatial-v0", num_envs=2, **small)
    first, info = vector.reset(seed=[3, 3])
    assert vector.observation_space.contains(first)
    assert all((values[0] == values[1]).all() for values in first.values()), "one seed, one placement"
    seen, rewards, terminated, truncated, info = vector.step(vector.action_space.sample())
    assert vector.observation_space.contains(seen)
    assert rewards.tolist() == [0.0, 0.0]
    assert not (terminated | truncated | info["success"]).any()
    vector.close()


@pytest.mark.filterwarnings("error:::gymnasium", "ignore:.*infinity.*", "ignore:.*symmetric.*")
def test_meta_world_passes_the_checker_of_gymnasium() -> None:
    register()
    env = gymnasium.make("vla_rl/MetaWorld-v0", render_mode="rgb_array", image_size=32, rendering="plain")
    check_env(env.unwrapped, skip_render_check=True)  # it would make one more for each kind of rendering
    env.close()


@pytest.mark.exhaustive
@pytest.mark.maniskill
def test_maniskill_passes_the_checker_of_gymnasium() -> None:
    register()
    env = gymnasium.make("vla_rl/ManiSkill-v0", render_mode="rgb_array", tasks=("PushCube-v1",))
    check_env(env.unwrapped)
    env.close()


def test_a_vector_equals_single_environments_and_starts_episodes_by_itself() -> None:
    register()
    vector = gymnasium.make_vec("vla_rl/Tabletop-v0", num_envs=3, max_episode_steps=4, tasks=("reach", "push"))
    assert type(vector).__name__ == "SimulatorVectorGym"
    seen, info = vector.reset(seed=5)
    assert vector.observation_space.contains(seen)
    assert info["task"].tolist() == [0, 1, 2]
    again, _ = vector.reset(seed=5)
    assert (again["front"] == seen["front"]).all()
    ended = []
    for _ in range(6):
        actions = np.zeros((3, 7), np.float32)
        seen, rewards, terminated, truncated, info = vector.step(actions)
        ended.append((terminated | truncated).all())
        assert rewards.shape == info["success"].shape == (3,)
    assert ended == [False, False, False, True, False, False], "the step after the end starts the next episode"
    assert info["task"].tolist() == [3, 4, 5]
    assert info["instruction"][0] == "move to the yellow block"
    vector.close()
    assert {name.partition("-")[0] for name in IDS} >= {"LiberoSpatial", "Libero10", "Tabletop", "ManiSkill"}


def test_unknown_arguments_are_said() -> None:
    register()
    with pytest.raises(
        EnvError, match=r"tabletop cannot be made with .*unexpected keyword argument 'colour'"
    ) as caught:
        gymnasium.make("vla_rl/Tabletop-v0", colour=3)
    assert isinstance(caught.value, TypeError), "by which other libraries know an argument that is not taken"
    with pytest.raises(EnvError, match=r"image_size: ") as caught:
        gymnasium.make("vla_rl/Tabletop-v0", image_size="big")
    assert not isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("imports", "prefix"),
    [
        ("import vla_rl, gymnasium", ""),
        ("import gymnasium, vla_rl", ""),
        ("import gymnasium", "vla_rl:"),
        ("import importlib.util, vla_rl; importlib.util.find_spec('gymnasium'); import gymnasium", ""),
        ("import envs.tabletop.env; import gymnasium", ""),
    ],
)
def test_the_ids_are_known_in_a_fresh_process(imports: str, prefix: str, tmp_path: Path) -> None:
    code = (
        f"import sys; {imports}; env = gymnasium.make('{prefix}vla_rl/Tabletop-v0', proprio=False);"
        "print(sorted(env.reset(seed=0)[0]), 'torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "['front'] False", done.stderr
