"""Configuration of the workload simulator."""

from typing import Literal

from pydantic import Field

from envs.base.config import SimulatorConfig
from vla_rl.core.schema import Fraction, Pixels, Positive


class WorkloadConfig(SimulatorConfig):
    """Timed no-op episodes: known costs, for tests and benchmarks of the runtime itself."""

    name: Literal["workload"] = "workload"
    image_size: Pixels = 16
    max_episode_steps: Positive = 32
    step_ms: float = Field(0.0, ge=0.0, description="Time of one control step, slept.")
    render_ms: float = Field(0.0, ge=0.0, description="Time of one observation, slept.")
    step_call_ms: float = Field(0.0, ge=0.0, description="Additional time of each call to step, for all environments.")
    render_call_ms: float = Field(0.0, ge=0.0, description="Additional time of each call to observe, for all of them.")
    reset_ms: float = Field(0.0, ge=0.0, description="Time of one reset, slept.")
    on_devices: bool = Field(False, description="Runs on devices, one process on each, instead of on cores.")
    length_spread: Fraction = Field(0.0, description="Episodes last max_episode_steps * (1 - u * spread), u in [0, 1).")
