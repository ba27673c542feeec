"""Files of tensors in a checkpoint: safetensors, which are data and never code, whoever wrote them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vla_rl.core.errors import UserError
from vla_rl.core.postponed import write


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write ``path``, now or later (``postponed``), with what the tensors hold now."""
    kept = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    write(path, partial(write_tensors, kept, path))


def load_tensors(path: Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """What ``save_tensors`` wrote. Raises as ``reading``."""
    with reading(path):
        return load_file(path, device=str(device))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises UserError if the block finds that ``path``, of tensors, is missing or damaged."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the checkpoint is incomplete; resume another one: RUN@ITERATION") from None
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is damaged ({error}); it was not loaded. Resume another checkpoint: RUN@ITERATION"
        ) from error


def moments_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state of each parameter, named by the parameter's number and what it is."""
    state = optimizer.state_dict()["state"]
    return {f"{number}.{name}": value for number, values in state.items() for name, value in values.items()}


def set_moments(optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]) -> None:
    """Continue from ``moments_of`` an optimizer of the same parameters."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in moments.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write ``path`` at once, without a copy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
