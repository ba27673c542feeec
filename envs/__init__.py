"""Simulators behind one interface (``envs.base.VectorEnv``), one folder each.

To add one, write its folder and add its config to ``EnvConfig``. ``envs/<name>/config.py`` holds the config, whose
``name`` is the folder's; ``envs/<name>/env.py`` defines ``make_env`` and ``env_spec`` with the arguments used below. It
may have a function ``preload`` that imports what its first environment will need (``vla_rl.cluster.fork_server``).
Other packages bring theirs as classes with the same two names (``vla_rl.core.plugins``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from envs.gymnasium.config import GymnasiumConfig
from envs.libero.config import LiberoConfig
from envs.maniskill.config import ManiSkillConfig
from envs.metaworld.config import MetaWorldConfig
from envs.tabletop.config import TabletopConfig
from envs.workload.config import WorkloadConfig
from vla_rl.core.plugins import plugin_of

if TYPE_CHECKING:
    from envs.base import VectorEnv
    from vla_rl.core.records import EnvSpec

__all__ = ["EnvConfig", "env_spec", "make_env"]

EnvConfig = Annotated[
    LiberoConfig | TabletopConfig | ManiSkillConfig | MetaWorldConfig | WorkloadConfig | GymnasiumConfig,
    Field(discriminator="name"),
]


def make_env(config: EnvConfig, num_envs: int) -> VectorEnv:
    """``num_envs`` environments of the simulator that ``config`` describes.

    Raises EnvError if it cannot be set up, ValueError if ``num_envs`` is not positive.
    """
    return _simulator(config).make_env(config, num_envs)


def env_spec(config: EnvConfig) -> EnvSpec:
    """The ``spec`` of ``make_env(config, ...)``, without building a scene. Raises EnvError as ``make_env`` does."""
    return _simulator(config).env_spec(config)


def _simulator(config: EnvConfig) -> Any:
    """The module or class of the configured simulator, imported only now: simulators are heavy."""
    return plugin_of(config) or import_module(f"envs.{config.name}.env")
