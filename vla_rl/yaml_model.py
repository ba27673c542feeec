"""YAML files that stand beside the run's configuration: profiles and studies."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from vla_rl.errors import UserError

Model = TypeVar("Model", bound=BaseModel)


def load_model(path: Path, kind: type[Model], what: str) -> Model:
    """The file as a ``kind``. Raises UserError with all of its mistakes; ``what`` says what it should be."""
    try:
        return kind.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as {what}: {error}") from error
    except ValidationError as error:
        problems = "".join(f"\n  {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise UserError(f"{path} is not {what}:{problems}") from None
