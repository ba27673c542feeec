"""A convolutional network and a Gaussian over action chunks around its output.

each camera ─► 4 convolutions ─► layer, norm ┐
proprioception, task ────────────────────────┴► 2 layers ─► mean of the chunk, value
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.gaussian import GaussianPolicy
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.gaussian.config import ConvGaussianConfig

_TASK_WIDTH = 16
_GRID = 6  # of the last convolution's output, whatever the size of the images


class ConvGaussian(GaussianPolicy):
    """See ``GaussianPolicy``. Cameras have weights of their own."""

    Config = ConvGaussianConfig
    config: ConvGaussianConfig

    def __init__(self, config: ConvGaussianConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec, width=config.width)
        self.cameras = nn.ModuleList(_camera(config.channels, config.width) for _ in spec.views)
        self.tasks = nn.Embedding(len(spec.instructions), _TASK_WIDTH)
        inputs = config.width * len(spec.views) + _TASK_WIDTH + spec.proprio_dim
        self.join = nn.Sequential(
            nn.Linear(inputs, config.width), nn.GELU(), nn.Linear(config.width, config.width), nn.GELU()
        )

    def features(self, seen: PolicyInput) -> Tensor:
        if seen.images.ndim != 5 or seen.images.shape[1] != len(self.cameras) or seen.images.dtype != torch.uint8:
            found = f"{seen.images.dtype} {list(seen.images.shape)}"
            raise ValueError(f"images: expected uint8 [N, {len(self.cameras)}, H, W, 3], found {found}")
        dtype = self.action_head.weight.dtype
        pixels = seen.images.permute(1, 0, 4, 2, 3).to(dtype) / 127.5 - 1.0  # [V, N, 3, H, W]
        parts = [camera(x) for camera, x in zip(self.cameras, pixels, strict=True)]
        parts += [self.tasks(seen.task.long()), seen.proprio.to(dtype)]
        features: Tensor = self.join(torch.cat(parts, dim=1))
        return features


class _Grid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, _GRID).flatten(1)


def _camera(channels: int, width: int) -> nn.Sequential:
    """[n, 3, H, W] -> [n, width]."""
    layers: list[nn.Module] = []
    for inputs in (3, channels, channels, channels):
        layers += [nn.Conv2d(inputs, channels, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, _Grid(), nn.Linear(channels * _GRID**2, width), nn.LayerNorm(width), nn.Tanh())
