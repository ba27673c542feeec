"""Configuration keys that all simulators have."""

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from vla_rl.core.schema import ConfigGroup, PositiveFloat


class RealTimeConfig(ConfigGroup):
    """The pace of a robot, which a simulator keeps by sleeping (``envs.base.real_time``)."""

    control_hz: PositiveFloat = Field(20.0, description="Control steps a second.")
    inference_s: float = Field(0.2, ge=0.0, description="How long the robot stands still before each chunk.")
    reset_s: float = Field(10.0, ge=0.0, description="How long somebody takes to set the scene up for an episode.")
    speed: PositiveFloat = Field(
        1.0, description="How much faster than the robot's the clock runs; a learner that keeps up then keeps up at 1."
    )

    def robot_seconds(self, *, steps: int = 0, chunks: int = 0, episodes: int = 0) -> float:
        """Of one robot's time, for so many control steps in so many chunks and episodes."""
        return steps / self.control_hz + chunks * self.inference_s + episodes * self.reset_s


class SimulatorConfig(ConfigGroup):
    """Base of the simulators' configurations. Each adds ``name``, the name of its folder below ``envs``."""

    averaged_suites: ClassVar[tuple[str, ...]] = ()  # of which publications give the average; empty: of all

    shaping: float = Field(
        0.0, ge=0.0, description="Reward for the whole way to the goal, paid along the way; success pays 1 in addition."
    )
    real_time: RealTimeConfig | None = Field(
        None, description="Sleep, so that training episodes take as long as on a robot; `{}`: its usual pace."
    )

    @classmethod
    def suites(cls) -> dict[str, dict[str, Any]]:
        """Groups of tasks with one result each, by name: the keys that select them, with all of their tasks.

        A simulator without such groups is one by itself.
        """
        return {str(cls.model_fields["name"].default): {}}

    @classmethod
    def suite_keys(cls, name: str) -> dict[str, dict[str, Any]]:
        """The suites that a name means, as ``suites`` has them: itself, none, or where patterns are understood several.

        Raises EnvError if a package that the name needs is missing.
        """
        return {name: keys} if (keys := cls.suites().get(name)) is not None else {}


class DemosConfig(ConfigGroup):
    """What demonstrations mean, where their files do not say so (docs/demonstrations.md)."""

    gripper: tuple[float, float] | None = Field(
        None,
        description="The numbers of an open and of a closed gripper in the data; null: as the files say, else as the "
        "simulator's data sets have them.",
    )
    rotated: bool | None = Field(
        None,
        description="Whether images are rotated by 180 degrees, as robosuite renders them; null: as HDF5 files say, "
        "and not in LeRobot's data sets.",
    )
    cameras: dict[str, str] = Field({}, description="Cameras in the data by the simulator's views; others go by name.")
    check: bool = Field(
        True, description="`vla-rl sft` compares given demonstrations with the simulator, and refuses contradictions."
    )

    @model_validator(mode="after")
    def _gripper_moves(self) -> Self:
        if self.gripper is not None and self.gripper[0] == self.gripper[1]:
            raise ValueError(f"gripper={list(self.gripper)}: open and closed are the same number")
        return self
