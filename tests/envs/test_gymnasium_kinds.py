"""Tiny environments of gymnasium, each of another kind: taken rightly, or refused with the remedy."""

from __future__ import annotations

import functools
import json
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from envs import env_spec, make_env
from envs.base import EnvError, empty_observation
from envs.gymnasium.config import GymnasiumConfig
from tests import ROOT
from vla_rl.commands.metadata import with_ranges_of
from vla_rl.config.loading import load_config
from vla_rl.core.errors import RecoverableError
from vla_rl.core.records import EpisodeSpec
from vla_rl.observability.console import TrainingView

INF = float("inf")
HWC = spaces.Box(0, 255, (20, 24, 3), np.uint8)
PICTURE = np.full((20, 24, 3), 100, np.uint8)
VECTOR = spaces.Box(-1, 1, (2,), np.float32)


class Tiny(gymnasium.Env):
    """Shows one observation, whatever happens, and says in its info what it is told to."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, space: Any, seen: Any, infos: Any = None, ends_at: int = 0, render_mode: Any = None) -> None:
        self.observation_space, self.seen, self.render_mode = space, seen, render_mode
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self.infos = infos or (lambda steps: {"success": steps == 3})
        self.ends_at, self.steps, self.closed = ends_at, 0, 0

    def _seen(self) -> Any:
        return self.seen(self) if callable(self.seen) else self.seen

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict]:
        self.steps += 1
        return self._seen(), 0.5, self.steps == self.ends_at, False, self.infos(self.steps)

    def render(self) -> np.ndarray:
        return np.full((30, 30, 3), 77, np.uint8)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def registry() -> Iterator[Any]:
    """Registers under an id, until the test is over."""
    names = []

    def add(entry: Any, steps: int | None = 5, **keys: Any) -> str:
        names.append(f"Kind{len(names)}-v0")
        gymnasium.register(names[-1], entry_point=entry, max_episode_steps=steps, **keys)
        return names[-1]

    yield add
    for name in names:
        del gymnasium.registry[name]


def config_of(add: Any, space: Any, seen: Any, *, steps: int = 5, keys: Any = None, **own: Any) -> GymnasiumConfig:
    name = add(lambda render_mode=None: Tiny(space, seen, render_mode=render_mode, **own), steps)
    return GymnasiumConfig(id=name, image_size=16, **(keys or {}))


def looked(config: GymnasiumConfig) -> tuple[np.ndarray, np.ndarray, Any]:
    """Images [V, H, W, 3], state [P], spec."""
    env = make_env(config, 1)
    assert env.spec == env_spec(config), "the driver and the workers find the same"
    env.reset([0], [EpisodeSpec(0, 0, 1)])
    seen = empty_observation(env.spec, 1)
    env.observe([0], seen)
    env.close()
    return seen.images[0], seen.proprio[0], env.spec


def box(low: float, high: float, shape: tuple[int, ...], dtype: Any) -> spaces.Box:
    return spaces.Box(low, high, shape, dtype)


FIRST = np.stack([np.full((20, 24), value, np.uint8) for value in (100, 50, 10)])
IMAGES: dict[str, tuple[spaces.Space, Any, list[int]]] = {
    "uint8 [H, W, C]": (HWC, PICTURE, [100, 100, 100]),
    "uint8 [C, H, W]": (box(0, 255, (3, 20, 24), np.uint8), FIRST, [100, 50, 10]),
    "uint8 [H, W]": (box(0, 255, (20, 24), np.uint8), PICTURE[..., 0], [100, 100, 100]),
    "one channel": (box(0, 255, (20, 24, 1), np.uint8), PICTURE[..., :1], [100, 100, 100]),
    "one channel first": (box(0, 255, (1, 20, 24), np.uint8), FIRST[:1], [100, 100, 100]),
    "four channels": (box(0, 255, (20, 24, 4), np.uint8), np.full((20, 24, 4), 9, np.uint8), [9, 9, 9]),
    "floats 0..1": (box(0, 1, (20, 24, 3), np.float32), np.full((20, 24, 3), 0.4, np.float32), [102, 102, 102]),
    "floats -1..1": (box(-1, 1, (3, 20, 24), np.float64), np.full((3, 20, 24), -0.2), [102, 102, 102]),
    "floats 0..255": (box(0, 255, (20, 24, 3), np.float32), np.full((20, 24, 3), 99.6, np.float32), [100] * 3),
    "wider integers": (box(0, 65535, (20, 24, 3), np.uint16), np.full((20, 24, 3), 25700, np.uint16), [100] * 3),
    "int64 0..255": (box(0, 255, (20, 24, 3), np.int64), np.full((20, 24, 3), 7, np.int64), [7, 7, 7]),
    "a mask of 0 and 1": (box(0, 1, (20, 24), np.uint8), np.ones((20, 24), np.uint8), [255] * 3),
    "a tensor": (HWC, torch.full((20, 24, 3), 90, dtype=torch.uint8), [90, 90, 90]),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_images_of_all_kinds_become_views(registry: Any, kind: str) -> None:
    space, seen, pixel = IMAGES[kind]
    images, state, spec = looked(config_of(registry, space, seen))
    assert (images == pixel).all()
    assert images.shape == (1, 16, 16, 3)
    assert (state.size, spec.views) == (0, ("observation",)), "no number of an image is a state"
    assert ("observation: its fourth channel is dropped" in spec.notes) == (kind == "four channels")


UNUSABLE: dict[str, tuple[spaces.Box, str]] = {
    "floats without bounds": (box(-INF, INF, (64, 64, 3), np.float32), "no bounds that say what is black and white"),
    "integers without bounds": (box(-(2**31), 2**31 - 1, (20, 24, 3), np.int32), "no bounds"),
    "two channels": (box(0, 255, (20, 24, 2), np.uint8), "neither 1, 3 nor 4 channels"),
    "five channels": (box(0, 255, (5, 20, 24), np.uint8), "neither 1, 3 nor 4 channels"),
    "a stack": (box(0, 255, (4, 20, 24, 3), np.uint8), "a stack of frames"),
    "other bounds for each pixel": (
        spaces.Box(np.zeros((20, 24), np.float32), np.arange(1, 481, dtype=np.float32).reshape(20, 24)),
        "other bounds for each pixel",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_unusable_images_are_said_and_never_replaced_in_silence(registry: Any, kind: str) -> None:
    space, why = UNUSABLE[kind]
    seen = {"picture": np.zeros(space.shape, space.dtype), "arm": np.zeros(2, np.float32)}
    alone = spaces.Dict({"picture": space, "arm": VECTOR})
    with pytest.raises(EnvError, match=rf"none of its images can be used \(picture.*{why}.*env.image=render"):
        env_spec(config_of(registry, alone, seen))
    with pytest.raises(EnvError, match=rf"env\.image=picture: .*{why}.*it has none.*`render`"):
        env_spec(config_of(registry, alone, seen, keys={"image": "picture"}))
    images, state, _ = looked(config_of(registry, alone, seen, keys={"image": "render"}))
    assert (images == 77).all()
    assert state.shape == (2,)
    both = spaces.Dict({"picture": space, "arm": VECTOR, "front": HWC})
    *_, spec = looked(config_of(registry, both, seen | {"front": PICTURE}))
    assert spec.views == ("front",)
    assert spec.proprio_dim == 2
    assert any(note.startswith("left out: picture (") and why in note for note in spec.notes)


def test_states_of_all_kinds_become_numbers_with_ranges(registry: Any) -> None:
    space = spaces.Dict(
        {
            "a_float": box(-2, 3, (2,), np.float64),
            "b_int": box(0, 9, (2,), np.int32),
            "c_scalar": box(-1, 1, (), np.float32),
            "d_matrix": box(-1, 1, (2, 2), np.float32),
            "e_flags": spaces.MultiBinary(2),
            "f_choice": spaces.Discrete(3, start=5),
            "g_text": spaces.Text(8),
            "h_many": box(0, 1, (3000,), np.float32),
            "i_list": spaces.Sequence(VECTOR),
            "nested": spaces.Tuple((VECTOR, HWC)),
        }
    )
    seen = {
        "a_float": np.array([0.5, 2.5]),
        "b_int": np.array([3, 4], np.int32),
        "c_scalar": np.float32(0.25),
        "d_matrix": np.array([[1, 0], [0, -1]], np.float32),
        "e_flags": np.array([1, 0], np.int8),
        "f_choice": np.int64(6),
        "g_text": "hello",
        "h_many": np.zeros(3000, np.float32),
        "i_list": (np.zeros(2, np.float32),),
        "nested": (np.array([0.1, 0.2], np.float32), PICTURE),
    }
    images, state, spec = looked(config_of(registry, space, seen))
    assert spec.views == ("nested/1",)
    assert (images == 100).all()
    assert state == pytest.approx([0.5, 2.5, 3, 4, 0.25, 1, 0, 0, -1, 1, 0, 0, 1, 0, 0.1, 0.2])
    expected = [(-2, 3)] * 2 + [(0, 9)] * 2 + [(-1, 1)] * 5 + [(0, 1)] * 5 + [(-1, 1)] * 2
    assert spec.proprio_range == tuple(expected), "as declared"
    (left_out,) = (note for note in spec.notes if note.startswith("left out"))
    assert all(name in left_out for name in ("g_text", "h_many", "i_list"))
    assert "e_flags" not in left_out
    with pytest.raises(EnvError, match=r"env\.state=g_text: Text.* is no vector; it has a_float, b_int"):
        env_spec(config_of(registry, space, seen, keys={"state": ("g_text",)}))


def test_ranges_that_are_not_declared_are_measured(registry: Any) -> None:
    space = spaces.Dict(
        {"image": HWC, "at": box(-INF, INF, (2,), np.float64), "huge": box(-3e38, 3e38, (1,), np.float32)}
    )

    def seen(env: Tiny) -> Any:
        return {"image": PICTURE, "at": np.array([env.steps * 10.0, 40.0]), "huge": np.zeros(1, np.float32)}

    config = config_of(registry, space, seen)
    *_, spec = looked(config)
    assert spec.proprio_range == ((-25.0, 75.0), (39.0, 41.0), (-1.0, 1.0)), "0..50, twice as wide"
    assert any("ranges: of 3 numbers of the state as seen in 25 steps of random actions" in note for note in spec.notes)


def test_names_may_have_slashes_and_commas(registry: Any) -> None:
    space = spaces.Dict({"cam/front": HWC, "cam,side": HWC, "arm/at": VECTOR})
    seen = {"cam/front": PICTURE, "cam,side": PICTURE // 2, "arm/at": np.array([0.1, 0.2], np.float32)}
    images, state, spec = looked(config_of(registry, space, seen))
    assert set(spec.views) == {"cam/front", "cam,side"}
    assert state == pytest.approx([0.1, 0.2])
    for image in ("cam,side", ("cam,side",)):
        images, _, spec = looked(config_of(registry, space, seen, keys={"image": image}))
        assert (spec.views, int(images[0, 0, 0, 0])) == (("cam,side",), 50)
    images, *_ = looked(config_of(registry, space, seen, keys={"image": ("render", "cam,side", "cam/front")}))
    assert images[:, 0, 0, 0].tolist() == [77, 50, 100]
    read = load_config(None, ["env=gymnasium", 'env.image=["cam,side", render]', "env.id=x:Y-v0"]).env
    assert read.image == ("cam,side", "render")
    doubled = spaces.Dict({"a/b": HWC, "a": spaces.Dict({"b": HWC})})
    with pytest.raises(EnvError, match=r"share names \(a/b\)"):
        env_spec(config_of(registry, doubled, {"a/b": PICTURE, "a": {"b": PICTURE}}))


WRONG: dict[str, tuple[Any, str]] = {
    "another shape": ({"image": PICTURE[:9], "at": np.zeros(2)}, r"image has the shape \(9, 24, 3\)"),
    "a missing part": ({"image": PICTURE}, "no at, which its observation_space declares"),
    "no finite number": ({"image": PICTURE, "at": np.array([np.nan, 0])}, "its state has numbers that are not finite"),
    "beyond float32": ({"image": PICTURE, "at": np.array([1e300, 0])}, "its state has numbers that are not finite"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_observations_that_are_not_as_declared_are_refused(registry: Any, kind: str) -> None:
    seen, why = WRONG[kind]
    space = spaces.Dict({"image": HWC, "at": box(-INF, INF, (2,), np.float64)})
    with pytest.raises(EnvError, match=rf"env\.id=Kind0-v0: .*{why}"):
        env_spec(config_of(registry, space, seen))


def test_pixels_beyond_the_declared_bounds_are_refused(registry: Any) -> None:
    space = box(0, 1, (20, 24, 3), np.float32)
    with pytest.raises(EnvError, match=r"observation has values outside of 0\.\.1"):
        env_spec(config_of(registry, space, np.full((20, 24, 3), 200, np.float32)))
    images, *_ = looked(config_of(registry, space, np.full((20, 24, 3), 1.0001, np.float32)))
    assert (images == 255).all()


def played(config: GymnasiumConfig) -> tuple[int, bool, bool, Any]:
    """Steps, success, terminated, spec."""
    env = make_env(config, 1)
    env.reset([0], [EpisodeSpec(0, 0, 1)])
    result = env.step([0], np.zeros((1, 400, 2), np.float32))
    env.close()
    return int(result.num_steps[0]), bool(result.success[0]), bool(result.terminated[0]), env.spec


TRUE = {
    "bool": True,
    "numpy": np.bool_(True),
    "one": 1,
    "1.0": 1.0,
    "array of one": np.array([True]),
    "0-d": np.array(1),
    "tensor": torch.tensor([1]),
}


@pytest.mark.parametrize("kind", TRUE)
def test_success_is_read_from_truth_values(registry: Any, kind: str) -> None:
    config = config_of(registry, HWC, PICTURE, infos=lambda steps: {"success": TRUE[kind] if steps == 3 else 0})
    assert played(config)[:3] == (3, True, True)


@pytest.mark.parametrize(
    "value", ["False", 0.3, float("nan"), np.array([False, False]), np.array([]), None, {"a": True}], ids=str
)
def test_other_values_of_success_are_refused(registry: Any, value: Any) -> None:
    config = config_of(registry, HWC, PICTURE, infos=lambda steps: {"is_success": value})
    for ask in (env_spec, played):
        with pytest.raises(EnvError, match=r"env\.success=is_success: an info says .*needs true, false, 1 or 0"):
            ask(config)


def test_an_end_of_which_nothing_says_what_it_is(registry: Any) -> None:
    config = config_of(registry, HWC, PICTURE, infos=lambda steps: {}, ends_at=3)
    for ask in (env_spec, played):
        with pytest.raises(EnvError, match="nothing says when its task is solved"):
            ask(config)
    assert played(config_of(registry, HWC, PICTURE, infos=lambda steps: {}))[:3] == (5, False, False)


def test_success_has_a_key_of_its_own(registry: Any) -> None:
    def late(steps: int) -> dict:
        return {"solved": True} if steps == 4 else {}

    def nested(steps: int) -> dict:
        return {"episode": {"done/well": steps == 3}, "other": 1}

    config = config_of(registry, HWC, PICTURE, infos=late, keys={"success": "solved"})
    assert played(config)[:2] == (4, True), "what is absent is not yet true"
    config = config_of(registry, HWC, PICTURE, infos=nested, keys={"success": "episode/done/well"})
    steps, success, _, spec = played(config)
    assert (steps, success) == (3, True)
    assert "success: episode/done/well in an info" in spec.notes
    config = config_of(registry, HWC, PICTURE, infos=nested, keys={"success": "gone"})
    steps, success, terminated, spec = played(config)
    assert (steps, success, terminated) == (5, False, False)
    assert any("gone in an info, not seen in 25 steps" in note and "other" in note for note in spec.notes)
    with pytest.raises(
        EnvError, match=r"infos have episode, episode/done/well, other; set env.success .*terminated.*rew"
    ):
        env_spec(config_of(registry, HWC, PICTURE, infos=nested))


@pytest.mark.parametrize(
    ("rule", "ends_at", "expected"),
    [
        ("terminated", 3, (3, True, True)),
        ("reward", 3, (3, True, True)),
        ("terminated", 0, (5, False, False)),
        ("reward", 0, (5, False, False)),
    ],
)
def test_an_end_may_be_success(registry: Any, rule: str, ends_at: int, expected: Any) -> None:
    config = config_of(registry, HWC, PICTURE, infos=lambda s: {}, ends_at=ends_at, keys={"success": rule})
    assert played(config)[:3] == expected


@pytest.mark.parametrize("limit", [None, 3, 40])
def test_the_time_limit_is_applied(registry: Any, limit: int | None) -> None:
    own = {"infos": lambda steps: {"success": False}}
    steps, _, _, spec = played(config_of(registry, HWC, PICTURE, keys={"max_episode_steps": limit}, **own))
    assert steps == spec.max_episode_steps == (limit or 5)
    assert not any("time limit" in note for note in spec.notes)


def test_an_earlier_truncation_of_its_own_is_said(registry: Any) -> None:
    name = registry(
        lambda render_mode=None: gymnasium.wrappers.TimeLimit(Tiny(HWC, PICTURE, lambda s: {"success": False}), 7), 200
    )
    steps, *_, spec = played(GymnasiumConfig(id=name, image_size=16))
    assert (steps, spec.max_episode_steps) == (7, 200)
    assert "time limit: an episode was truncated after 7 of 200 steps" in spec.notes


class Line(VectorEnv):
    """Counts steps; ends at 4, and starts the next episode in the same step."""

    def __init__(
        self, num_envs: int, max_episode_steps: int = 4, mode: Any = AutoresetMode.SAME_STEP, **keys: Any
    ) -> None:
        self.num_envs, self.render_mode, self.key = num_envs, "rgb_array", keys.get("key", "final_obs")
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.limit, self.by_row = max_episode_steps, keys.get("by_row", True)
        self.single_observation_space = spaces.Dict({"at": box(0, 99, (1,), np.float32), "image": HWC})
        self.single_action_space = spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.steps = np.zeros(num_envs, np.int64)

    def _seen(self) -> dict:
        images = np.stack([np.full((20, 24, 3), steps * 10, np.uint8) for steps in self.steps])
        return {"at": self.steps[:, None].astype(np.float32), "image": images}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[dict, dict]:
        self.steps[:] = 0
        return self._seen(), {}

    def step(self, actions: np.ndarray) -> tuple[dict, np.ndarray, np.ndarray, np.ndarray, dict]:
        self.steps += 1
        late, seen = self.steps >= self.limit, self._seen()
        info: dict[str, Any] = {"success": np.zeros(self.num_envs, bool), "_success": np.ones(self.num_envs, bool)}
        if late.any():
            last = [{name: values[i] for name, values in seen.items()} for i in range(self.num_envs)]
            batched = {name: values.copy() for name, values in seen.items()}
            info |= {self.key: np.array(last, object) if self.by_row else batched, f"_{self.key}": late}
            info |= {"note": "of all", "limits": [self.limit]}  # not in the form of vectors
            info |= {"final_info": {"success": late, "_success": late}, "_final_info": late}
            self.steps[late] = 0
        return self._seen(), np.zeros(self.num_envs), np.zeros(self.num_envs, bool), late, info

    def render(self) -> tuple[np.ndarray, ...]:
        return tuple(self._seen()["image"])


@pytest.mark.parametrize("by_row", [True, False], ids=["objects", "batched"])
@pytest.mark.parametrize("key", ["final_obs", "final_observation"])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, "SameStep", None])
@pytest.mark.filterwarnings("ignore:.*AutoresetMode")
def test_the_last_observation_of_a_vector_is_that_of_the_ended_episode(
    registry: Any, key: str, mode: Any, by_row: bool
) -> None:
    name = registry(None, 4, vector_entry_point=lambda **keys: Line(key=key, mode=mode, by_row=by_row, **keys))
    for limit in (4, 9):
        config = GymnasiumConfig(id=name, image_size=16, max_episode_steps=limit)
        env = make_env(config, 1)
        env.reset([0], [EpisodeSpec(0, 0, 1)])
        result, seen = env.step([0], np.zeros((1, 20, 2), np.float32)), empty_observation(env.spec, 1)
        env.observe([0], seen)
        assert int(result.num_steps[0]) == limit, "the vector is told the limit"
        assert result.success[0], "which the last info of the episode says"
        assert (seen.proprio[0, 0], seen.images[0, 0, 0, 0, 0]) == (limit, 10 * limit)
        env.close()
    with pytest.raises(EnvError, match=r"render\(\) draws the next episode .* name an image"):
        env_spec(GymnasiumConfig(id=name, image_size=16, image="render"))


class Failing(Tiny):
    made: list[Failing] = []  # noqa: RUF012

    def __init__(self, where: str, after: int, render_mode: Any = None) -> None:
        super().__init__(HWC, PICTURE, render_mode=render_mode)
        self.where, self.left = where, after
        self.made.append(self)

    def _count(self, where: str) -> None:
        self.left -= where == self.where
        if self.left < 0:
            raise RuntimeError("motor not homed")

    def reset(self, **keys: Any) -> Any:
        self._count("reset")
        return super().reset(**keys)

    def step(self, action: np.ndarray) -> Any:
        self._count("step")
        return super().step(action)


@pytest.mark.parametrize(("where", "in_the_probe"), [("reset", 5), ("step", 25)])
def test_what_fails_is_closed_and_named(registry: Any, where: str, in_the_probe: int) -> None:
    Failing.made.clear()
    message = rf"env\.id=Kind\d-v0: {where}\(\) has failed, RuntimeError: motor not homed"
    name = registry(lambda render_mode=None: Failing(where, 0))
    with pytest.raises(EnvError, match=message):
        env_spec(GymnasiumConfig(id=name, image_size=16))
    assert [made.closed for made in Failing.made] == [1]
    name = registry(lambda render_mode=None: Failing(where, in_the_probe))
    env = make_env(GymnasiumConfig(id=name, image_size=16), 1)
    act = functools.partial(env.reset, [0], [EpisodeSpec(0, 0, 1)])
    if where == "step":
        act()
        act = functools.partial(env.step, [0], np.zeros((1, 1, 2), np.float32))
    with pytest.raises(EnvError, match=message) as caught:
        act()
    assert isinstance(caught.value, RecoverableError), "a worker goes on with a new simulator"
    assert [made.closed for made in Failing.made] == [1, 1]
    env.reset([0], [EpisodeSpec(1, 0, 1)])  # in a new environment
    env.close()
    assert [made.closed for made in Failing.made] == [1, 1, 1]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (
            {"reset": lambda self, seed=None, options=None: PICTURE},
            r"reset\(\) has failed, TypeError: it gives ndarray",
        ),
        ({"step": lambda self, action: (PICTURE, 0.0, False, {})}, r"step\(\) has failed"),
        ({"step": lambda self, action: (PICTURE, 0.0, False, False, None)}, "the info None"),
        ({"step": lambda self, action: (PICTURE, np.zeros(2), False, False, {})}, "gives the reward"),
        ({"step": lambda self, action: (PICTURE, None, False, False, {})}, "gives the reward None"),
    ],
)
def test_another_interface_is_refused(registry: Any, wrong: dict, why: str) -> None:
    kind = type("Wrong", (Tiny,), wrong)
    name = registry(lambda render_mode=None: kind(HWC, PICTURE))
    with pytest.raises(EnvError, match=rf"env\.id=Kind0-v0: .*{why}"):
        env_spec(GymnasiumConfig(id=name, image_size=16))


def test_an_environment_that_cannot_draw_needs_an_image(registry: Any) -> None:
    def mute(seen: Any, space: Any) -> GymnasiumConfig:
        return GymnasiumConfig(id=registry(lambda: Tiny(space, seen)), image_size=16)

    images, *_ = looked(mute(PICTURE, HWC))
    assert (images == 100).all()
    name = registry(lambda: type("Blind", (Tiny,), {"render": lambda self: None})(VECTOR, np.zeros(2, np.float32)))
    with pytest.raises(EnvError, match=r"render\(\) gives object \(\), not uint8 .*set env\.image"):
        env_spec(GymnasiumConfig(id=name))
    with pytest.raises(EnvError, match="unexpected keyword argument 'render_mode'"):
        env_spec(GymnasiumConfig(id=name, image="render"))


def test_actions_without_useful_limits_are_refused(registry: Any) -> None:
    class Huge(Tiny):
        def __init__(self) -> None:
            super().__init__(HWC, PICTURE)
            self.action_space = spaces.Box(-3e38, 3e38, (2,), np.float32)

    with pytest.raises(EnvError, match=r"set env\.action_limits"):
        env_spec(GymnasiumConfig(id=registry(lambda render_mode=None: Huge())))


def test_the_ranges_of_a_run_stay(tmp_path: Path, registry: Any) -> None:
    spec = env_spec(
        config_of(registry, spaces.Dict({"image": HWC, "at": VECTOR}), {"image": PICTURE, "at": np.zeros(2)})
    )
    assert with_ranges_of(tmp_path, spec) == spec, "a run that has none"
    (tmp_path / "metadata.json").write_text(json.dumps({"proprio_range": [[0, 5], [-3, 3]]}))
    assert with_ranges_of(tmp_path, spec).proprio_range == ((0, 5), (-3, 3))
    (tmp_path / "metadata.json").write_text(json.dumps({"proprio_range": [[0, 5]]}))
    assert with_ranges_of(tmp_path, spec) == spec, "of another state"


OWN = """
    import gymnasium, numpy as np
    from gymnasium import spaces
    class Reach(gymnasium.Env):
        observation_space, action_space = spaces.Box(0, 255, (20, 20, 3), np.uint8), spaces.Box(-1, 1, (2,), np.float32)
        def __init__(self, render_mode=None): pass
        def reset(self, seed=None, options=None): return np.zeros((20, 20, 3), np.uint8), {}
        def step(self, action): return np.zeros((20, 20, 3), np.uint8), 0.0, False, False, {"success": False}
    gymnasium.register("Reach-v0", entry_point=Reach, max_episode_steps=4)
"""


@pytest.mark.parametrize("place", ["beside the script", "in the working folder"])
def test_a_module_of_the_user_is_found_in_every_process(tmp_path: Path, place: str) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/kinds_of_mine.py").write_text(textwrap.dedent(OWN))
    script = tmp_path / ("own/script.py" if place == "beside the script" else "script.py")
    script.write_text(
        "import pickle, sys\nfrom envs import env_spec\nfrom vla_rl import load_config\n"
        "config = load_config(None, ['env=gymnasium', 'env.id=kinds_of_mine:Reach-v0'])\n"
        "env_spec(config.env)\nsys.stdout.buffer.write(pickle.dumps(config))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    here = tmp_path if place == "beside the script" else tmp_path / "own"
    first = subprocess.run([sys.executable, script], capture_output=True, cwd=here, env=environment, check=False)
    assert isinstance(first.stdout, bytes)
    assert first.returncode == 0, first.stderr.decode()
    code = (
        "import pickle, sys; config = pickle.loads(sys.stdin.buffer.read()); from envs import make_env;"
        "print(make_env(config.env, 1).spec.views)"
    )
    second = subprocess.run(
        [sys.executable, "-c", code], input=first.stdout, capture_output=True, cwd="/", env=environment, check=False
    )
    assert second.stdout.decode().strip() == "('observation',)", second.stderr.decode()


def test_its_config_is_pickled_like_any_other() -> None:
    config = GymnasiumConfig(id="a:B-v0", options={"x": [1]}, image=("one", "two"))
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_training_begins_with_the_notes(registry: Any, capsys: pytest.CaptureFixture[str]) -> None:
    space = spaces.Dict({"front": HWC, "words": spaces.Text(8)})
    spec = env_spec(config_of(registry, space, {"front": PICTURE, "words": "go"}))
    with TrainingView("a run", spec, 1, 0):
        said = capsys.readouterr()
    lines = (said.out + said.err).splitlines()
    expected = [
        "a run",
        "task 0: Kind0",
        "images: front; state: none",
        "left out: words (Text(1, 8, charset=",
        "success:",
    ]
    assert [line.strip()[: len(start)] for line, start in zip(lines, expected, strict=False)] == expected
