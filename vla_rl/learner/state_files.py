"""Reading and writing the files of a learner's state: data, and never code.

A pickle file can run any code where it is loaded, and a run folder may come from somebody else. These files are
therefore read with torch's restricted unpickler: tensors and plain values. (The policy's own state needs no pickle at
all, see ``whole_state``.)
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from vla_rl.core.errors import UserError
from vla_rl.core.postponed import are_postponed, write


def save_data(state: Any, path: Path) -> None:
    """``torch.save``, now or later (``postponed``)."""
    kept = on_host(state) if are_postponed() else state
    write(path, partial(torch.save, kept, path))


def on_host(state: Any) -> Any:
    """A copy of a nested state whose tensors are all new and on the host."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: on_host(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)) and type(state) in (list, tuple):
        return type(state)(on_host(value) for value in state)
    return state


def load_data(path: Path, map_location: Any = None) -> Any:
    """What ``torch.save`` wrote. Raises UserError if the file is missing, damaged, or holds more than data."""
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the checkpoint is incomplete; resume another one: RUN@ITERATION") from None
    except Exception as error:  # torch raises many kinds for a damaged file
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise UserError(
            f"{path} is damaged, or holds more than data ({reason}); it was not loaded. Resume another checkpoint: "
            "RUN@ITERATION"
        ) from error
