"""Configuration of the tabletop."""

from typing import Any, Literal

from pydantic import Field

from envs.base.config import SimulatorConfig
from vla_rl.core.schema import NonNegative, Pixels, Positive


class TabletopConfig(SimulatorConfig):
    """A fast 2-D tabletop in numpy, for tests and many-seed experiments."""

    name: Literal["tabletop"] = "tabletop"
    tasks: tuple[Literal["reach", "push", "pick_place"], ...] = Field(("reach",), min_length=1)
    distractors: NonNegative = Field(1, le=4, description="Objects in addition to the target.")
    image_size: Pixels = 64
    proprio: bool = True
    max_episode_steps: Positive = 64
    latency_ms: float = Field(0.0, ge=0.0, description="Simulated cost of one control step, slept.")

    @classmethod
    def suites(cls) -> dict[str, dict[str, Any]]:
        return {family: {"tasks": (family,)} for family in ("reach", "push", "pick_place")}
