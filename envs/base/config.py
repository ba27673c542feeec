"""Configuration keys that all simulators have."""

from pydantic import Field

from vla_rl.core.schema import ConfigGroup


class SimulatorConfig(ConfigGroup):
    """Base of the simulators' configurations. Each adds ``name``, the name of its folder below ``envs``."""

    shaping: float = Field(
        0.0, ge=0.0, description="Reward for the whole way to the goal, paid along the way; success pays 1 in addition."
    )
