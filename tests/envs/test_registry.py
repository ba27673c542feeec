"""Configurations become simulators, and only the one asked for is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from envs import EnvConfig, env_spec, make_env
from envs.libero.config import LiberoConfig
from envs.maniskill.config import ManiSkillConfig
from envs.tabletop.config import TabletopConfig
from envs.workload.config import WorkloadConfig


@pytest.mark.parametrize("config", [TabletopConfig(), TabletopConfig(tasks=("push", "reach")), WorkloadConfig()])
def test_the_spec_is_that_of_the_environment(config: EnvConfig) -> None:
    env = make_env(config, 3)
    assert env.num_envs == 3
    assert env.spec == env_spec(config)
    assert env.spec.name == config.name
    env.close()


@pytest.mark.libero
def test_libero_is_registered() -> None:
    config = LiberoConfig(image_size=64, settle_steps=0)
    env = make_env(config, 1)
    try:
        assert type(env).__name__ == "LiberoVectorEnv"
        assert env.spec == env_spec(config)
    finally:
        env.close()


@pytest.mark.maniskill
def test_maniskill_is_registered() -> None:
    config = ManiSkillConfig(tasks=("PickCube-v1",), backend="physx_cpu")
    env = make_env(config, 2)  # builds no scene before an episode starts
    assert type(env).__name__ == "ManiSkillVectorEnv"
    assert env.spec == env_spec(config)
    assert env.spec.name == config.name
    env.close()


@pytest.mark.parametrize("config", [TabletopConfig(), WorkloadConfig()])
def test_no_environments_are_refused(config: EnvConfig) -> None:
    with pytest.raises(ValueError, match="num_envs=0"):
        make_env(config, 0)


def test_importing_the_registry_imports_no_simulator() -> None:
    code = (
        "import sys; from envs import env_spec; from envs.workload.config import WorkloadConfig;"
        "env_spec(WorkloadConfig());"
        "heavy = {'envs.tabletop.env', 'libero', 'mani_skill', 'sapien', 'robosuite', 'mujoco', 'torch', 'ray'};"
        "heavy |= {'metaworld', 'gymnasium.envs.mujoco'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
