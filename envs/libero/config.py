"""Configuration of LIBERO."""

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from envs.base.config import SimulatorConfig
from vla_rl.core.schema import NonNegative, Pixels, Positive, PositiveFloat

LIBERO_TASKS = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}


class LiberoConfig(SimulatorConfig):
    """LIBERO tasks in robosuite (MuJoCo)."""

    averaged_suites: ClassVar[tuple[str, ...]] = ("libero_spatial", "libero_object", "libero_goal", "libero_10")

    name: Literal["libero"] = "libero"
    suite: str = Field(
        "libero_spatial",
        description="libero_spatial, libero_object, libero_goal, libero_10 or libero_90; liberoplus/SUITE, "
        "liberoplus/SUITE/PERTURBATION or liberopro/SUITE; or a folder of BDDL files (docs/libero_suites.md).",
    )
    tasks: tuple[NonNegative, ...] = Field((0,), description="Task numbers within the suite; empty means all.")
    implementation: Literal["fast", "reference"] = Field(
        "fast", description="reference: hf-libero's own environment, whose states and pixels the fast one equals."
    )
    image_size: Pixels = Field(256, description="Rendered height and width, in pixels.")
    wrist_camera: bool = Field(False, description="Add the eye-in-hand view; not given: as policy.checkpoint reads.")
    proprio: bool = Field(
        True,
        description="Add end-effector position, axis-angle and gripper joints (8 numbers); not given: as "
        "policy.checkpoint reads.",
    )
    max_episode_steps: Positive | None = Field(None, description="Time limit; null takes the suite's protocol.")
    antialiasing: bool = Field(True, description="LIBERO's pixels; off, software rendering takes half the time.")
    settle_steps: NonNegative = Field(10, description="No-op steps after a reset, while objects come to rest.")
    settled: Literal["here", "reference"] = Field(
        "here",
        description="Where objects of benchmark initial states come to rest. here: as this MuJoCo has it. reference: "
        "as MuJoCo 3.3.0 has it, in any version (docs/libero_numbers.md).",
    )
    model_cache_gib: PositiveFloat = Field(
        2.0, description="Memory for models per worker, about 0.15 GiB a task; the least recently used are dropped."
    )
    joint_noise: float = Field(
        0.0,
        ge=0.0,
        le=0.2,
        description="Standard deviation (rad) of the arm's joints at the start of sampled placements. LIBERO's reset "
        "has 0, but its benchmark's initial states were made with 0.02.",
    )
    assets: Literal["auto", "placeholder"] = Field(
        "auto", description="auto: LIBERO_ASSETS, the package's, the hub's cache, a download, else placeholder assets."
    )

    @classmethod
    def suites(cls) -> dict[str, dict[str, Any]]:
        return {suite: {"suite": suite, "tasks": ()} for suite in LIBERO_TASKS}

    @classmethod
    def suite_keys(cls, name: str) -> dict[str, dict[str, Any]]:
        if name in LIBERO_TASKS or not ("/" in name or Path(name).is_dir()):
            return super().suite_keys(name)
        from envs.libero.protocol.suites import matching_suites

        return {suite: {"suite": suite, "tasks": ()} for suite in matching_suites(name)}

    @field_validator("suite")
    @classmethod
    def _suite_has_a_form(cls, suite: str) -> str:
        if suite in LIBERO_TASKS:
            return suite
        if Path(suite).expanduser().is_dir():
            return str(Path(suite).expanduser().absolute())  # processes have working folders of their own
        if "/" not in suite:
            raise ValueError(f"use {', '.join(LIBERO_TASKS)}, PACKAGE/SUITE, or a folder of BDDL files")
        return suite

    @model_validator(mode="after")
    def _reference_is_of_libero(self) -> Self:
        if self.implementation == "reference" and self.suite not in LIBERO_TASKS:
            raise ValueError(f"suite={self.suite} needs implementation=fast: the reference applies no perturbation")
        return self

    @model_validator(mode="after")
    def _reference_has_no_potential(self) -> Self:
        if self.implementation == "reference" and self.shaping:
            raise ValueError(f"shaping={self.shaping} needs implementation=fast: set that, or shaping=0")
        return self
