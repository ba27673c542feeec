"""Configuration of ManiSkill 3."""

from typing import Literal, Self

from pydantic import Field, model_validator

from envs.base.config import SimulatorConfig
from vla_rl.core.schema import Pixels, Positive


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
    backend: Literal["physx_cpu", "physx_cuda"] = Field(
        "physx_cpu",
        description="physx_cuda simulates on a CUDA GPU, one cube task for all environments. It has not run yet.",
    )
    image_size: Pixels = Field(128, description="Height and width of the third-person view, in pixels.")
    shader: Literal["minimal", "default"] = Field(
        "minimal", description="SAPIEN's shader pack: minimal is what ManiSkill observes with, default is finer."
    )
    show_goal: bool = Field(
        True,
        description="Draw goal markers (PickCube's sphere), which ManiSkill hides from cameras and gives as numbers.",
    )
    proprio: bool = Field(
        True,
        description="Add end-effector position, axis-angle and finger joints (8 numbers); not given: as "
        "policy.checkpoint reads.",
    )
    max_episode_steps: Positive | None = Field(None, description="Time limit; null takes the longest of the tasks'.")

    @property
    def batchable(self) -> bool:
        """Whether physx_cuda can simulate these tasks: one scene for all environments, each reset by itself."""
        return len(self.tasks) == 1 and self.tasks[0] in ("PushCube-v1", "PickCube-v1", "StackCube-v1")

    @model_validator(mode="after")
    def _gpu_simulates_one_task(self) -> Self:
        if self.backend == "physx_cuda" and not self.batchable:
            raise ValueError(
                f"backend=physx_cuda simulates one of PushCube-v1, PickCube-v1, StackCube-v1 for all environments, not "
                f"tasks={list(self.tasks)}: name one of them, or set backend=physx_cpu"
            )
        return self
