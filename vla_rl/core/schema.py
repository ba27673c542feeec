"""Building blocks of the configuration schema; the keys are next to the part that they configure."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Pixels = Annotated[int, Field(ge=1, le=4096)]
Threads = Annotated[int, Field(ge=1, le=4096)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]

# Field(json_schema_extra=INPUT_PATH): a file or folder that is read, or several. A relative one is searched next to
# the config file that names it, in the working folder, and among what comes with vla_rl.
INPUT_PATH: dict[str, JsonValue] = {"format": "path"}


class ConfigGroup(BaseModel):
    """Base of all groups of configuration keys: frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
