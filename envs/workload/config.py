"""The one schema of a run: every key, its type, its default and its limits.

Values come from a YAML file and ``key=value`` overrides (see ``config_loading``); nothing changes them afterwards.
Each group of keys is one class below; an algorithm's keys stand in its own file (``algos``). Heavy libraries are not
imported here: reading a config is instant.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from envs.base.config import SimulatorConfig
from vla_rl.core.schema import Fraction, Positive


class WorkloadConfig(SimulatorConfig):
    """Timed no-op episodes: known costs, for tests and benchmarks of the runtime itself."""

    name: Literal["workload"] = "workload"
    image_size: Positive = 16
    max_episode_steps: Positive = 32
    step_ms: float = Field(0.0, ge=0.0, description="Time one control step takes, slept.")
    render_ms: float = Field(0.0, ge=0.0, description="Time one observation takes, slept.")
    step_call_ms: float = Field(
        0.0, ge=0.0, description="Time that stepping takes beside, once for all slots together."
    )
    render_call_ms: float = Field(0.0, ge=0.0, description="Time that observing takes beside, once for all together.")
    reset_ms: float = Field(0.0, ge=0.0, description="Time one reset takes, slept.")
    on_devices: bool = Field(False, description="Computes on devices, one process on each, instead of on cores.")
    length_spread: Fraction = Field(0.0, description="Episodes last max_episode_steps * (1 - u * spread), u in [0, 1).")
