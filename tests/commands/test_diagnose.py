"""`vla-rl diagnose` on clones that act well, in simulators and policies with one wrong convention each."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import Field

from envs import make_env
from envs.base import EnvError, empty_observation
from envs.base.demonstrations import collect
from envs.base.image_conventions import IMAGE_CONVENTIONS
from envs.base.wrapper import EnvWrapper
from envs.tabletop.config import TabletopConfig
from envs.tabletop.env import TabletopVectorEnv, env_spec
from tests import ROOT
from tests.policies.openvla_twins import openvla
from vla_rl.commands import diagnose
from vla_rl.commands.cli import main
from vla_rl.commands.conventions import PRESENT, Trial, fitted
from vla_rl.commands.demonstrations import demonstration_episode
from vla_rl.core.actions import ActionDim, ActionSpace, Gripper
from vla_rl.core.records import EnvSpec, Observation, StepResult
from vla_rl.policies.base.policy import Decisions, PolicyInput
from vla_rl.policies.build import alternatives
from vla_rl.policies.openvla_oft import build
from vla_rl.policies.openvla_oft.config import OpenVLAOFTConfig

HERE = "tests.commands.test_diagnose"


class Otherwise(EnvWrapper):
    """A tabletop that shows, names or takes something otherwise than the clones were trained on."""

    class Config(TabletopConfig):
        distractors: int = 0
        shown: str = "as it is"
        wanted: tuple[tuple[int, float, float], ...] = ()  # dimension, and what its numbers are times and plus
        range: tuple[float, float] = (0.0, 1.0)  # of the gripper
        cameras: int = 1  # the last one is the one that is known
        underscores: bool = False  # in instructions

    def __init__(self, config: Config, num_envs: int) -> None:
        super().__init__(make_env(plain(config), num_envs))
        self.config, self.spec = config, self.env_spec(config)
        self.scale, self.shift = np.ones(7, np.float32), np.zeros(7, np.float32)
        for i, scale, shift in config.wanted:
            self.scale[i], self.shift[i] = scale, shift

    @staticmethod
    def env_spec(config: Config) -> EnvSpec:
        spec, (low, high) = env_spec(plain(config)), config.range
        gripper = ActionDim("gripper", low, high, gripper=Gripper(open=high, closed=low))
        return replace(
            spec,
            actions=ActionSpace((*spec.actions.dims[:6], gripper)),
            views=("other", "front")[-config.cameras :],
            instructions=tuple(text.replace(" ", "_" if config.underscores else " ") for text in spec.instructions),
        )

    def observe(self, env_ids: Sequence[int], out: Observation) -> None:
        front = Observation(out.images[:, -1:], out.proprio, out.task, out.elapsed)
        self._env.observe(env_ids, front)
        front.images[env_ids] = IMAGE_CONVENTIONS[self.config.shown](front.images[env_ids].copy())

    def expert_action(self, env_id: int) -> np.ndarray:
        return self._env.expert_action(env_id) * self.scale + self.shift

    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> StepResult:
        return self._env.step(env_ids, ((actions - self.shift) / self.scale).astype(np.float32))


def plain(config: TabletopConfig) -> TabletopConfig:
    return TabletopConfig(**{name: getattr(config, name) for name in TabletopConfig.model_fields.keys() - {"name"}})


class Clone:
    """A clone that looks at the first of several cameras, or answers a step too late, or has two sets of statistics."""

    class Config(OpenVLAOFTConfig):
        late: bool = Field(False, description="Answer a step too late.")

    check_policy = staticmethod(lambda config, spec: None)
    alternatives = staticmethod(lambda config, spec: [{"unnorm_key": name} for name in ("bridge", "tabletop")])

    @staticmethod
    def build_policy(config: Config, spec: EnvSpec, seed: int, device: str, dtype: torch.dtype) -> Any:
        policy = build.build_policy(config, replace(spec, views=spec.views[:1]), seed, device, dtype)
        act, decode = policy.act, policy.decode
        scale = np.float32([0.3, 0.3, 0.3, 1, 1, 1, 1] if config.unnorm_key == "bridge" else [1.0] * 7)

        def see(seen: PolicyInput, *rest: Any) -> Decisions:
            return act(replace(seen, images=seen.images[:, :1]), *rest)

        def answer(record: dict[str, np.ndarray]) -> np.ndarray:
            found = decode(record) * scale
            return np.concatenate([found[:, :1], found[:, :-1]], axis=1) if config.late else found

        policy.act, policy.decode = see, answer
        return policy


@pytest.fixture
def few_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(diagnose, "_FRAMES", 32)  # half of them, in half of the time


def diagnosed(output: Path, *arguments: str) -> dict[str, Any]:
    """What the command writes, with its exit status."""
    status = main(["diagnose", *arguments, "--json", str(output / "found.json")])
    return json.loads((output / "found.json").read_text()) | {"status": status}


REACH = "checkpoints/tabletop_reach", "tabletop"
PUSH = "checkpoints/tabletop_push", "tabletop_push"
PICK_PLACE = "checkpoints/tabletop_pick_place", "tabletop_pick_place"
ENV, POLICY = f"env.name={HERE}:Otherwise", f"policy.name={HERE}:Clone"
PLANTED: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "images upside down": (PUSH, [ENV, "env.tasks=[push]", "env.shown=upside down"]),
    "images mirrored left to right": (PICK_PLACE, [ENV, "env.tasks=[pick_place]", "env.shown=mirrored left to right"]),
    "images blue and red swapped": (REACH, [ENV, "env.shown=blue and red swapped"]),
    "cameras in the other order": (REACH, [ENV, "env.cameras=2", POLICY]),
    "gripper turned around": (PICK_PLACE, [ENV, "env.tasks=[pick_place]", "env.wanted=[[6,-1,1]]"]),
    "gripper from 0 to 1": (PICK_PLACE, [ENV, "env.tasks=[pick_place]", "env.wanted=[[6,2,-1]]", "env.range=[-1,1]"]),
    "other sign of dx": (REACH, [ENV, "env.wanted=[[0,-1,0]]"]),
    "instructions with spaces for underscores": (REACH, [ENV, "env.underscores=true"]),
    "other scale of dx, dy": (("", "tabletop"), []),  # the fixture ``half``
    'policy.unnorm_key="tabletop"': (REACH, [POLICY, "policy.unnorm_key=bridge"]),
}


@pytest.fixture
def half(tmp_path: Path) -> str:
    """A clone whose statistics have half the scale."""
    shutil.copytree(ROOT / REACH[0], tmp_path / "half")
    statistics = json.loads((tmp_path / "half/statistics.json").read_text())
    for quantile in ("q01", "q99"):
        statistics["action"][quantile] = [x / 2 for x in statistics["action"][quantile]]
    (tmp_path / "half/statistics.json").write_text(json.dumps(statistics))
    return str(tmp_path / "half")


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_convention_is_named(name: str, tmp_path: Path, half: str, few_frames: None) -> None:
    (checkpoint, config), wrong = PLANTED[name]
    found = diagnosed(tmp_path, checkpoint or half, config, *wrong, "--episodes", "0")
    assert (found["status"], found["wrong"], found["successes"]) == (1, name, {})
    assert found["text"].startswith(f"{name} (error ")
    assert found["trials"][0]["remedy"] in found["text"]


@pytest.mark.slow
def test_late_actions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need all frames: only where actions change does it show."""
    monkeypatch.chdir(ROOT)
    found = diagnosed(tmp_path, *PICK_PLACE, POLICY, "policy.late=true", "--episodes", "0")
    assert (found["status"], found["wrong"]) == (1, "actions one step earlier")


@pytest.mark.slow
def test_episodes_are_played_with_both_settings(
    tmp_path: Path, few_frames: None, capsys: pytest.CaptureFixture[str]
) -> None:
    found = diagnosed(tmp_path, *REACH, ENV, "env.shown=rotated by 180 degrees", "--episodes", "8")
    right = "images rotated by 180 degrees"
    assert found["wrong"] == right
    assert found["successes"]["as it is"] < found["successes"][right]
    assert f"{right}: {found['successes'][right]} of 8 episodes succeed" in capsys.readouterr().out


@pytest.mark.slow
def test_a_few_demonstrations_that_are_misread(tmp_path: Path, few_frames: None) -> None:
    env = make_env(TabletopConfig(distractors=0), 1)
    collect(env, [demonstration_episode(i, 4, 0) for i in range(3)], tmp_path / "demos.hdf5")
    data = ["--demos", str(tmp_path / "demos.hdf5"), "demos.rotated=false", "--episodes", "0"]
    assert diagnosed(tmp_path, *REACH, *data)["wrong"] == "images rotated by 180 degrees"


def test_a_simulator_without_an_expert_needs_demonstrations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_expert(*_: Any) -> None:
        raise EnvError("tabletop has no scripted expert")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(TabletopVectorEnv, "expert_action", no_expert)
    assert main(["diagnose", *REACH]) == 2
    assert "no scripted expert; or give demonstrations with --demos DATA" in capsys.readouterr().err


RIGHT = {
    "reach": REACH,
    "pick_place": PICK_PLACE,
    "pi0": ("checkpoints/tabletop_reach_pi0", "tabletop", "policy=pi0", "policy.chunk_size=8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_policy_is_accused_of_nothing(name: str, tmp_path: Path, few_frames: None) -> None:
    found = diagnosed(tmp_path, *RIGHT[name], "--episodes", "0")
    assert (found["status"], found["wrong"]) == (0, None)
    assert found["text"].startswith("No convention is wrong")
    assert len(found["trials"]) > 10


def numbers(related: float) -> tuple[np.ndarray, np.ndarray, ActionSpace]:
    """Demonstrated numbers, and predictions as spread as they are, that are so correlated with them."""
    rng = np.random.default_rng(0)
    demonstrated, noise = rng.normal(size=(2, 500, 3))
    space = ActionSpace((*map(ActionDim, ("dx", "dy")), ActionDim("gripper", 0.0, 1.0, gripper=Gripper(1.0, 0.0))))
    return related * demonstrated + (1 - related**2) ** 0.5 * noise, demonstrated, space


def test_a_sign_and_a_scale_are_fitted() -> None:
    predicted, demonstrated, space = numbers(0.9)
    sign, scale = fitted(predicted * [-1, 0.5, -1] + [0, 0.2, 0], demonstrated, space)
    assert (sign.name, scale.name) == ("other sign of dx", "other scale of dy")
    assert scale.actions(np.float32([0.3, 0.2, 0.7])) == pytest.approx([0.3, 0, 0.7], abs=0.1)
    assert scale.actions(np.float32([0.3, 0.7, 0.7])) == pytest.approx([0.3, 1, 0.7], abs=0.1)
    assert sign.actions(np.float32([0.3, 0.2, 0.7])) == pytest.approx([-0.3, 0.2, 0.7])


def test_an_inexact_policy_has_no_other_scale() -> None:
    """A least-squares line would be flat, because of the policy's errors."""
    for related in (0.5, 0.75, 0.95):
        assert list(fitted(*numbers(related))) == []


def judged(best: float, least: float, own: float, baseline: float) -> tuple[str | None, str]:
    other = Trial("images upside down", "turn them", error=best, smaller=(least, 0.5))
    wrong, text = diagnose.verdict(sorted([other, PRESENT._replace(error=own)], key=lambda t: t.error), baseline)
    return wrong and wrong.name, text


def test_only_what_is_clearly_better_is_called_wrong() -> None:
    assert judged(0.3, 0.1, 0.5, 0.8)[0] == "images upside down"
    for best, least, own in ((0.46, 0.01, 0.5), (0.3, -0.01, 0.5), (0.6, -0.2, 0.5)):
        name, text = judged(best, least, own, 0.8)
        assert name is None
        assert text.startswith("No convention is wrong")
    name, text = judged(0.75, 0.1, 1.2, 0.8)
    assert name is None
    assert "near that of always predicting the mean action, 0.80" in text


def test_a_published_checkpoint_may_mean_the_statistics_of_another_data_set(tmp_path: Path) -> None:
    config = OpenVLAOFTConfig(checkpoint=str(openvla(tmp_path / "twin")), unnorm_key="libero_spatial")
    spec = replace(env_spec(TabletopConfig(proprio=False)), image_size=56)
    others = alternatives(config, spec)
    assert [keys for keys in others if "unnorm_key" in keys] == [{"unnorm_key": "bridge_orig"}]
    assert {"center_crop": False} in others  # published ones crop


def test_the_documented_simulator_shows_its_images_rotated() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/diagnose.md").read_text(), re.DOTALL)
    module: dict[str, Any] = {}
    exec(code, module)
    config = module["RotatedTabletop"].Config()
    env, upright = module["RotatedTabletop"](config, 2), make_env(config, 2)
    shown = []
    for one in (env, upright):
        one.reset([1], [demonstration_episode(0, 4, 0)])
        shown.append(empty_observation(one.spec, 2))
        one.observe([1], shown[-1])
    assert (shown[0].images[1] == shown[1].images[1, :, ::-1, ::-1]).all()
    assert shown[0].images[1].std() > 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["checkpoints/tabletop_reach"], "give the config"),
        (["checkpoints/tabletop_reach", "env.distractors=1"], "give the config"),
        (["checkpoints/nothing", "tabletop"], "checkpoints/nothing"),
        ([*REACH, "--demos", "nothing.hdf5"], "nothing.hdf5"),
        ([*REACH, "env.name=workload"], "does not fit"),
    ],
)
def test_bad_input_gets_one_error(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["diagnose", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert said in output.err
