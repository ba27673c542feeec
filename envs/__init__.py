"""Simulators behind one protocol (``envs.base.vector_env``). Each is imported only when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from envs.libero.config import LiberoConfig
from envs.maniskill.config import ManiSkillConfig
from envs.tabletop.config import TabletopConfig
from envs.workload.config import WorkloadConfig

if TYPE_CHECKING:
    from envs.base import VectorEnv
    from vla_rl.core.records import EnvSpec

__all__ = ["env_spec", "make_env"]


def make_env(config: EnvConfig, num_slots: int) -> VectorEnv:
    """The simulator that ``config`` describes, with ``num_slots`` slots.

    Raises EnvError where it cannot be set up, ValueError where ``num_slots`` is not positive.
    """
    if isinstance(config, LiberoConfig):
        if config.implementation == "untouched":
            from envs.libero.reference_env import UntouchedLiberoVectorEnv

            return UntouchedLiberoVectorEnv(config, num_slots)
        from envs.libero.env import LiberoVectorEnv

        return LiberoVectorEnv(config, num_slots)
    if isinstance(config, TabletopConfig):
        from envs.tabletop.env import TabletopVectorEnv

        return TabletopVectorEnv(config, num_slots)
    if isinstance(config, ManiSkillConfig):
        from envs.maniskill.env import ManiSkillVectorEnv

        return ManiSkillVectorEnv(config, num_slots)
    from envs.workload.env import WorkloadVectorEnv

    return WorkloadVectorEnv(config, num_slots)


def env_spec(config: EnvConfig) -> EnvSpec:
    """What ``make_env(config, ...).spec`` would be, without building any scene. Raises EnvError as it would."""
    if isinstance(config, LiberoConfig):
        env = make_env(config, 1)
        env.close()
        return env.spec
    if isinstance(config, TabletopConfig):
        from envs.tabletop.env import tabletop_spec

        return tabletop_spec(config)
    if isinstance(config, ManiSkillConfig):
        from envs.maniskill.bootstrap import check_maniskill
        from envs.maniskill.tasks import maniskill_spec

        check_maniskill(config)
        return maniskill_spec(config)
    from envs.workload.env import workload_spec

    return workload_spec(config)


EnvConfig = Annotated[LiberoConfig | TabletopConfig | ManiSkillConfig | WorkloadConfig, Field(discriminator="name")]
