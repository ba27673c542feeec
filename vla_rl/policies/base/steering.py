"""A small network that chooses the noise from which a frozen flow policy denoises (DSRL, arXiv:2506.15799).

    features, proprioception ──▶ 2 layers ──▶ mean in ±bound ┐
                                    learned deviation ───────┴▶ noise [D], the same for all H actions

Its weights are a file of their own in a policy's checkpoint, whose other files stay what they were.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vla_rl.policies.base.checkpoint_folder import Tensors, check_shapes, undamaged
from vla_rl.policies.base.flow_config import STEERING_FILE, SteerConfig

_PREFIX = "steering."  # before the names of its weights, in a policy


class Steering(nn.Module):
    """A normal distribution over noise in each state. Its means begin at 0."""

    bound: Tensor

    def __init__(self, inputs: int, numbers: int, config: SteerConfig) -> None:
        """``inputs``: numbers of a state; ``numbers``: D."""
        super().__init__()
        width = config.width
        self.layers = nn.Sequential(
            *(nn.LayerNorm(inputs), nn.Linear(inputs, width), nn.LayerNorm(width), nn.GELU()),
            *(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()),
        )
        self.mean = nn.Linear(width, numbers)
        nn.init.zeros_(self.mean.weight)
        nn.init.zeros_(self.mean.bias)
        self.log_std = nn.Parameter(torch.full((numbers,), math.log(config.initial_std)))
        self.register_buffer("bound", torch.tensor(config.bound))

    def forward(self, state: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """[N, inputs] -> means and deviations, float32 [N, 1, D]."""
        found = self.mean(self.layers(state.to(self.mean.weight.dtype))).float()
        mean = (self.bound.float() * found.tanh())[:, None]
        return mean, (temperature * self.log_std.float().exp()).expand_as(mean)


def steered_files(file: str, weights: Mapping[str, Tensor]) -> dict[str, Tensors]:
    """Contents of a checkpoint's ``file``, and of that of the steering network, if the ``weights`` have one."""
    own = {name.removeprefix(_PREFIX): w for name, w in weights.items() if name.startswith(_PREFIX)}
    files = {file: Tensors({name: w for name, w in weights.items() if not name.startswith(_PREFIX)})}
    return files | ({STEERING_FILE: Tensors(own)} if own else {})


def without_steering(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: w for name, w in weights.items() if not name.startswith(_PREFIX)}


def read_steering(folder: Path, steering: Steering | None) -> dict[str, Tensor]:
    """Weights of a policy's network, by their names in the policy; none if it has none, or the checkpoint does not.

    Raises CheckpointError if they have other sizes.
    """
    path = folder / STEERING_FILE
    if steering is None or not path.is_file():
        return {}
    check_shapes(path, steering.state_dict(), fits="policy.steer")
    with undamaged(path):
        return {_PREFIX + name: w for name, w in load_file(path).items()}
