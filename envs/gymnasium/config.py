"""Configuration of environments of gymnasium."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue

from envs.base.config import SimulatorConfig
from vla_rl.core.plugins import ImportingConfig
from vla_rl.core.schema import NonNegative, Pixels, Positive

_OneOrMore = str | tuple[str, ...]


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class GymnasiumConfig(ImportingConfig, SimulatorConfig):
    """An environment of gymnasium with images and Box actions, from any package (docs/gymnasium.md)."""

    name: Literal["gymnasium"] = "gymnasium"
    id: str = Field(
        "vla_rl/Tabletop-v0",
        description="The environment's id, as gymnasium.make takes it; MODULE:ID imports a module first, which "
        "registers it.",
    )
    options: dict[str, JsonValue] = Field({}, description="Further arguments of gymnasium.make, by name.")
    image: Annotated[tuple[str, ...], BeforeValidator(_listed, json_schema_input_type=_OneOrMore)] | None = Field(
        None,
        min_length=1,
        description="Key of the image in the observation, several in a list or with commas between, or `render` for "
        "what render() draws; a/b for b within a. null: all images in the observation, or else `render`.",
    )
    state: tuple[str, ...] | None = Field(
        None,
        description="Keys of the numbers that the policy sees; null: all vectors, flags and choices in the "
        "observation; []: none.",
    )
    instruction: str | None = Field(None, description="What the policy is told to do; null: made from the id.")
    success: str | None = Field(
        None,
        description="Key of the step's info that tells success, a/b for b within a; `terminated`: every end that is no "
        "truncation; `reward`: such an end with a positive reward. null: is_success or success.",
    )
    reward: Literal["success", "env"] = Field(
        "success", description="success: 1 when the task is solved, as everywhere here. env: the environment's rewards."
    )
    ends_on_success: bool = Field(
        True,
        description="Success ends the episode, also where the environment goes on. false: success is what the last "
        "step says.",
    )
    action_limits: tuple[tuple[float, float], ...] | None = Field(
        None,
        description="Low and high end of each number of an action: one pair for all, or one for each; null: those of "
        "the action space.",
    )
    grippers: dict[NonNegative, Literal["opens", "closes"]] = Field(
        {},
        description="Which numbers of an action are grippers, counted from 0, and whether a larger number opens or "
        "closes them.",
    )
    image_size: Pixels = Field(64, description="Height and width to which images are resized, in pixels.")
    max_episode_steps: Positive | None = Field(
        None, description="Time limit, also above that of the id's registration; null: that one."
    )
    start_states: Positive = Field(1000, description="Resets with seeds of their own that evaluations start from.")
