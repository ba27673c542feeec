"""Files of ``torch.save``, read without running what they contain."""

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_rl.core.errors import UserError

_REJECTIONS = (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError)


def read_pickled(file: Path) -> dict[str, Tensor]:
    """Tensors by name, on the host; those of a mapping within the file as OUTER.INNER.

    Files in today's format are mapped into memory: what is not used is not read. Raises UserError for a file that is
    damaged, that holds no tensors by name, or that holds anything but data.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except _REJECTIONS as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"{file}: torch.load(weights_only=True), which runs no code of a file, rejects it ({reason[0]}); copy it "
            "again if it is damaged, else save its tensors alone: torch.save(module.state_dict(), FILE)"
        ) from error
    found = dict(_tensors(content)) if isinstance(content, Mapping) else {}
    if not found:
        raise UserError(f"{file}: expected tensors by name (a state_dict), found {type(content).__name__} without any")
    return found


def _tensors(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in content.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value.detach()
        elif isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{name}.")
