"""The one schema of a run: every key, its type, its default and its limits.

Values come from a YAML file and ``key=value`` overrides (see ``config_loading``); nothing changes them afterwards.
Each group of keys is one class below; an algorithm's keys stand in its own file (``algos``). Heavy libraries are not
imported here: reading a config is instant.
"""

from __future__ import annotations

from pydantic import Field

from vla_rl.core.schema import Group

# --- env: the simulator ---------------------------------------------------------------------------------------------


class SimulatorConfig(Group):
    """What all simulators share."""

    shaping: float = Field(
        0.0, ge=0.0, description="Reward for all of the way to the goal, paid as it is made; success pays 1 besides."
    )
