"""Reading and writing the files of a learner's state: data, and never code.

A pickle file can run any code where it is loaded, and a run folder may come from somebody else. These files are
therefore read with torch's restricted unpickler: tensors, plain values, and three of DeepSpeed's plain classes.
"""

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from vla_rl.core.errors import UserError
from vla_rl.core.postponed import are_postponed, write


def data_only_checkpoint_engine() -> Any:
    """What DeepSpeed reads and writes its checkpoints with, here without code in them."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class DataOnlyCheckpointEngine(TorchCheckpointEngine):
        def save(self, state_dict: Any, path: str) -> None:
            save_data(state_dict, Path(path))

        def load(self, path: str, map_location: Any = None) -> Any:
            return load_data(Path(path), map_location)

    return DataOnlyCheckpointEngine()


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
        with torch.serialization.safe_globals(_plain_classes()):
            return torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the checkpoint is incomplete; resume another one: RUN@ITERATION") from None
    except Exception as error:  # torch raises many kinds for a damaged file
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise UserError(
            f"{path} is damaged, or holds more than data ({reason}); it was not loaded. Resume another checkpoint: "
            "RUN@ITERATION"
        ) from error


@cache
def _plain_classes() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, ZeroStageEnum, fragment_address]
