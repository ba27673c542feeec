"""`vla-rl diagnose` on clones that act well, in simulators and policies with one wrong convention each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from envs import make_env
from envs.base.image_conventions import IMAGE_CONVENTIONS
from envs.base.wrapper import EnvWrapper
from envs.tabletop.config import TabletopConfig
from envs.tabletop.env import env_spec
from tests import ROOT
from vla_rl.commands.cli import main
from vla_rl.commands.conventions import fitted
from vla_rl.core.actions import ActionDim, ActionSpace, Gripper
from vla_rl.core.records import EnvSpec, Observation, StepResult
from vla_rl.policies.base.policy import Decisions, PolicyInput
from vla_rl.policies.openvla_oft import build
from vla_rl.policies.openvla_oft.config import OpenVLAOFTConfig

HERE = "tests.commands.test_diagnose"


class Otherwise(EnvWrapper):
    """A tabletop that shows, names or takes something otherwise than the clones were trained on."""

    class Config(TabletopConfig):
        shown: str = "as it is"
        wanted: tuple[tuple[int, float, float], ...] = ()  # dimension, and what its numbers are times and plus
        range: tuple[float, float] = (0.0, 1.0)  # of the gripper
        blind: bool = False  # another camera before the one that is known
        written: str = "{}"

    def __init__(self, config: Config, num_envs: int) -> None:
        super().__init__(make_env(plain(config), num_envs))
        self.config, self.spec = config, self.env_spec(config)
        self.scale, self.shift = np.ones(7, np.float32), np.zeros(7, np.float32)
        for i, scale, shift in config.wanted:
            self.scale[i], self.shift[i] = scale, shift

    @staticmethod
    def env_spec(config: Config) -> EnvSpec:
        spec = env_spec(plain(config))
        low, high = config.range
        gripper = ActionDim("gripper", low, high, gripper=Gripper(open=high, closed=low))
        return replace(
            spec,
            actions=ActionSpace((*spec.actions.dims[:6], gripper)),
            views=("other", "front") if config.blind else ("front",),
            instructions=tuple(config.written.format(text).replace(" ", config.written[2:3] or " ") for text in spec.instructions),
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
    """A clone that looks at one camera of several, or answers one step too late, or has statistics under two names."""

    class Config(OpenVLAOFTConfig):
        late: bool = False
        camera: int = 0

    check_policy = staticmethod(lambda config, spec: None)
    alternatives = staticmethod(lambda config, spec: [{"unnorm_key": name} for name in ("bridge", "tabletop")])

    @staticmethod
    def build_policy(config: Config, spec: EnvSpec, seed: int, device: str, dtype: torch.dtype) -> Any:
        policy = build.build_policy(config, replace(spec, views=spec.views[:1]), seed, device, dtype)
        act, decode, camera = policy.act, policy.decode, config.camera
        scale = np.float32([0.3, 0.3, 0.3, 1, 1, 1, 1] if config.unnorm_key == "bridge" else [1.0] * 7)

        def see(seen: PolicyInput, *rest: Any) -> Decisions:
            return act(replace(seen, images=seen.images[:, camera : camera + 1]), *rest)

        def answer(record: dict[str, np.ndarray]) -> np.ndarray:
            found = decode(record) * scale
            return np.concatenate([found[:, :1], found[:, :-1]], axis=1) if config.late else found

        policy.act, policy.decode = see, answer
        return policy
