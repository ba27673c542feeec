"""The one schema of a run: every key, its type, its default and its limits.

Values come from a YAML file and ``key=value`` overrides (see ``config_loading``); nothing changes them afterwards.
Each group of keys is one class below; an algorithm's keys stand in its own file (``algos``). Heavy libraries are not
imported here: reading a config is instant.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from envs.base.config import SimulatorConfig
from vla_rl.core.schema import Positive


class ManiSkillConfig(SimulatorConfig):
    """ManiSkill 3 tasks in SAPIEN (docs/maniskill.md)."""

    name: Literal["maniskill"] = "maniskill"
    tasks: tuple[
        Literal[
            "PushCube-v1",
            "PickCube-v1",
            "StackCube-v1",
            "PutCarrotOnPlateInScene-v1",
            "PutSpoonOnTableClothInScene-v1",
            "StackGreenCubeOnYellowCubeBakedTexInScene-v1",
            "PutEggplantInBasketScene-v1",
        ],
        ...,
    ] = Field(("PushCube-v1",), min_length=1, description="The last four need ManiSkill's downloaded assets.")
    backend: Literal["auto", "physx_cpu", "physx_cuda"] = Field(
        "auto", description="auto: physx_cuda where there is a CUDA GPU and the tasks allow it, else physx_cpu."
    )
    image_size: Positive = Field(128, description="Height and width of the third-person view, in pixels.")
    shader: Literal["minimal", "default"] = Field(
        "minimal", description="SAPIEN's shader pack: minimal is ManiSkill's for observations, default is finer."
    )
    show_goal: bool = Field(
        True,
        description="Draw goal markers (PickCube's sphere) that ManiSkill hides from cameras and tells as numbers.",
    )
    proprio: bool = Field(True, description="Add end-effector position, axis-angle and finger joints (8 numbers).")
    max_episode_steps: Positive | None = Field(None, description="Time limit; null takes the longest of the tasks'.")

    @property
    def batchable(self) -> bool:
        """Whether physx_cuda can simulate these tasks: one scene for all slots, reset slot by slot."""
        return len(self.tasks) == 1 and self.tasks[0] in ("PushCube-v1", "PickCube-v1", "StackCube-v1")

    @property
    def wants_gpu(self) -> bool:
        """Whether the simulator runs on a CUDA GPU where there is one."""
        return self.backend == "physx_cuda" or (self.backend == "auto" and self.batchable)

    @model_validator(mode="after")
    def _gpu_simulates_one_task(self) -> Self:
        if self.backend == "physx_cuda" and not self.batchable:
            raise ValueError(
                f"backend=physx_cuda simulates one of PushCube-v1, PickCube-v1, StackCube-v1 for all slots, not "
                f"tasks={list(self.tasks)}: name one of them, or set backend=physx_cpu"
            )
        return self
