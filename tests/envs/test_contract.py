"""Every simulator keeps the contract of ``VectorEnv``; what breaks it is found."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs import make_env
from envs.base import EnvInstance, Outcome, SequentialEnv, VectorEnv
from envs.base.contract import ContractError, check_simulator
from envs.base.shaping import shaped
from envs.gymnasium.config import GymnasiumConfig
from envs.libero.config import LiberoConfig
from envs.maniskill.config import ManiSkillConfig
from envs.metaworld.config import MetaWorldConfig
from envs.tabletop.config import TabletopConfig
from envs.workload.config import WorkloadConfig
from tests import ROOT
from vla_rl.config.loading import load_config
from vla_rl.core.actions import ActionDim, ActionSpace
from vla_rl.core.records import EnvSpec, EpisodeSpec, Observation, StepResult

CONFIGS = {
    "tabletop": TabletopConfig(max_episode_steps=7),
    "tabletop without state": TabletopConfig(max_episode_steps=6, proprio=False),
    "metaworld": MetaWorldConfig(image_size=32, rendering="plain", max_episode_steps=4),
    "workload": WorkloadConfig(max_episode_steps=7),
    "gymnasium": GymnasiumConfig(id="vla_rl/Tabletop-v0", max_episode_steps=7),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_simulator_keeps_the_contract(name: str) -> None:
    check_simulator(make_env(CONFIGS[name], 2))


def test_shaping_keeps_the_contract() -> None:
    check_simulator(shaped(make_env(CONFIGS["tabletop"], 2), 0.5))


@pytest.mark.libero
def test_libero_keeps_the_contract() -> None:
    config = LiberoConfig(tasks=(0,), image_size=32, settle_steps=0, max_episode_steps=4, assets="placeholder")
    check_simulator(make_env(config, 2))


@pytest.mark.exhaustive  # a scene takes half a minute
@pytest.mark.maniskill
def test_maniskill_keeps_the_contract() -> None:
    check_simulator(make_env(ManiSkillConfig(tasks=("PushCube-v1",), max_episode_steps=4), 2))


def test_the_environment_of_the_tutorial_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/tutorials/own_environment.md").read_text()
    (code,) = re.findall(r"^```python\n# file: reach_square.py\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "contract_square.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    config = load_config(None, ["env=contract_square:ReachSquare", "env.max_episode_steps=7", "policy.chunk_size=7"])
    check_simulator(make_env(config.env, 2))


class Sound(SequentialEnv[EnvInstance]):
    """Does nothing, by the rules."""

    def __init__(self) -> None:
        actions = ActionSpace((ActionDim("dx"), ActionDim("dy")))
        super().__init__(EnvSpec("sound", ("top",), 8, 1, actions, 7, ("wait",), init_states=2), 2)

    def _start(self, env_id: int, episode: EpisodeSpec, previous: EnvInstance | None) -> EnvInstance:
        return EnvInstance(episode)

    def _advance(self, instance: EnvInstance, action: np.ndarray) -> Outcome:
        return Outcome(0.5)

    def _images(self, instance: EnvInstance) -> np.ndarray:
        return np.full((1, 8, 8, 3), instance.steps, np.uint8)

    def _proprio(self, instance: EnvInstance) -> np.ndarray:
        return np.zeros(1)


def changed(**fields: Any) -> Any:
    def step(self: Any, env_ids: Any, actions: np.ndarray) -> StepResult:
        result = Sound.step(self, env_ids, actions)
        values = {name: value(result, self) for name, value in fields.items()}
        return dataclasses.replace(result, **values)

    return {"step": step}


def late_rewards(result: StepResult, env: Any) -> np.ndarray:
    return np.full_like(result.rewards, 0.5)


def observed(change: Any) -> Any:
    def observe(self: Any, env_ids: Any, out: Observation) -> None:
        Sound.observe(self, env_ids, out)
        change(self, out)

    return {"observe": observe}


def no_elapsed(env: Any, out: Observation) -> None:
    out.elapsed[0] = 0.0


def wrong_task(env: Any, out: Observation) -> None:
    out.task[0] = 3


def all_rows(env: Any, out: Observation) -> None:
    out.images[:] = 1


def no_images(self: Any, env_ids: Any, out: Observation) -> None:
    images = out.images.copy()
    Sound.observe(self, env_ids, out)
    out.images[:] = images


def takes_all(self: Any, env_ids: Any, actions: np.ndarray) -> StepResult:
    self.instance(env_ids[0]).running = True
    return Sound.step(self, env_ids, actions)


def closes_once(self: Any) -> None:
    if getattr(self, "closed", False):
        raise RuntimeError("closed twice")
    self.closed = True


BROKEN = {
    "elapsed is steps": observed(no_elapsed),
    "writes the task": observed(wrong_task),
    "no rows but those": observed(all_rows),
    "writes whole images": {"observe": no_images},
    "finite proprio": {"_proprio": lambda self, instance: np.full(1, np.nan)},
    "rewards are 0 after": changed(rewards=late_rewards),
    "rewards are float32": changed(rewards=lambda result, env: result.rewards.astype(np.float64)),
    "num_steps int32": changed(num_steps=lambda result, env: result.num_steps.astype(np.int64)),
    "between 1 and K": changed(num_steps=lambda result, env: result.num_steps * 0),
    "success comes with terminated": changed(success=lambda result, env: np.ones(1, bool)),
    "and never with terminated": changed(
        terminated=lambda result, env: np.ones(1, bool), truncated=lambda result, env: np.ones(1, bool)
    ),
    "truncated at max_episode_steps": changed(truncated=lambda result, env: np.zeros(1, bool)),
    "max_episode_steps, only there": {"_advance": lambda self, instance, action: Outcome(0.0, truncated=True)},
    "frames\\(\\) has one for each of 7 steps": {"frames": lambda self, env_id: []},
    "refuses step": {"step": takes_all},
}


def test_what_breaks_the_contract_is_found() -> None:
    check_simulator(Sound())
    for rule, change in BROKEN.items():
        broken: VectorEnv = type("Broken", (Sound,), change)()
        with pytest.raises(ContractError, match=rule):
            check_simulator(broken)
    with pytest.raises(RuntimeError, match="closed twice"):
        check_simulator(type("Broken", (Sound,), {"close": closes_once})())
