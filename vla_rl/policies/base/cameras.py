"""A small convolutional encoder of images, for policies and critics with weights of their own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_GRID = 6  # of the last convolution's output, whatever the size of the images


class Cameras(nn.Module):
    """Four convolutions for each camera, and a layer; cameras share no weights."""

    def __init__(self, views: int, channels: int, width: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(_camera(channels, width) for _ in range(views))

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [N, V, H, W, 3] -> [N, V * width]. Raises ValueError for other images."""
        if images.ndim != 5 or images.shape[1] != len(self.each) or images.dtype != torch.uint8:
            found = f"{images.dtype} {list(images.shape)}"
            raise ValueError(f"images: expected uint8 [N, {len(self.each)}, H, W, 3], found {found}")
        pixels = images.permute(1, 0, 4, 2, 3).to(next(self.parameters()).dtype) / 127.5 - 1.0  # [V, N, 3, H, W]
        return torch.cat([camera(x) for camera, x in zip(self.each, pixels, strict=True)], dim=1)


class _Grid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, _GRID).flatten(1)


def _camera(channels: int, width: int) -> nn.Sequential:
    """[n, 3, H, W] -> [n, width]."""
    layers: list[nn.Module] = []
    for inputs in (3, channels, channels, channels):
        layers += [nn.Conv2d(inputs, channels, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, _Grid(), nn.Linear(channels * _GRID**2, width), nn.LayerNorm(width), nn.Tanh())
