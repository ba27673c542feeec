"""Configuration keys that all simulators have."""

from typing import Any, ClassVar

from pydantic import Field

from vla_rl.core.schema import ConfigGroup


class SimulatorConfig(ConfigGroup):
    """Base of the simulators' configurations. Each adds ``name``, the name of its folder below ``envs``."""

    averaged_suites: ClassVar[tuple[str, ...]] = ()  # of which publications give the average; empty: of all

    shaping: float = Field(
        0.0, ge=0.0, description="Reward for the whole way to the goal, paid along the way; success pays 1 in addition."
    )

    @classmethod
    def suites(cls) -> dict[str, dict[str, Any]]:
        """Groups of tasks with one result each, by name: the keys that select them, with all of their tasks.

        A simulator without such groups is one by itself.
        """
        return {str(cls.model_fields["name"].default): {}}
