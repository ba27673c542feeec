"""Configuration of Meta-World."""

from difflib import get_close_matches
from typing import Literal

from pydantic import Field, field_validator

from envs.base.config import SimulatorConfig
from envs.metaworld.tasks import INSTRUCTIONS, MT10
from vla_rl.core.schema import Pixels, Positive


class MetaWorldConfig(SimulatorConfig):
    """Meta-World's tasks of a Sawyer arm in MuJoCo (docs/metaworld.md)."""

    name: Literal["metaworld"] = "metaworld"
    tasks: tuple[str, ...] = Field(
        (), description="Names of tasks, such as reach-v3; empty means the ten of MT10 (docs/metaworld.md)."
    )
    camera: Literal["corner4", "corner", "corner2", "corner3", "topview"] = Field(
        "corner4", description="Meta-World's camera, its images turned upright. LeRobot's corner2 is corner4."
    )
    image_size: Pixels = Field(128, description="Rendered height and width, in pixels.")
    rendering: Literal["full", "plain"] = Field(
        "full",
        description="plain: without shadows, mirrors and anti-aliasing, which in software take nearly all of the time.",
    )
    proprio: bool = Field(
        True,
        description="Add end-effector position and gripper opening (4 numbers); not given: as policy.checkpoint reads.",
    )
    max_episode_steps: Positive = Field(500, le=500, description="Time limit; 500 is Meta-World's.")

    @property
    def chosen(self) -> tuple[str, ...]:
        """The names of all tasks; the task of an ``EpisodeSpec`` indexes them."""
        return self.tasks or MT10

    @field_validator("tasks")
    @classmethod
    def _known_and_told_apart(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        told: dict[str, str] = {}
        for name in tasks:
            if name not in INSTRUCTIONS:
                near = get_close_matches(name, INSTRUCTIONS, 1)
                raise ValueError(
                    f"no task {name}: " + (f"did you mean {near[0]}?" if near else "see docs/metaworld.md")
                )
            if INSTRUCTIONS[name] in told:
                raise ValueError(f"{told[INSTRUCTIONS[name]]} and {name} have the same instruction: leave out one")
            told[INSTRUCTIONS[name]] = name
        return tasks
