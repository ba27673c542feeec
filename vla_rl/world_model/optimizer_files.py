"""The moments of an AdamW optimizer in a file that holds tensors only."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def save_moments(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Write the state of each parameter, by its number."""
    moments = optimizer.state_dict()["state"]
    save_file({f"{i}.{k}": v for i, s in moments.items() for k, v in s.items()}, path)


def load_moments(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Continue from ``save_moments``, with the same parameters."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in load_file(path).items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
