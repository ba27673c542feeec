"""A small encoder of images, for policies and critics with weights of their own.

Patches are embedded, and merged two by two in both directions, as by a Swin transformer (arXiv:2103.14030) without
attention. All of it are products of large matrices, which suit processors better than convolutions of few channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_rl.policies.base.patches import PATCH, STRIDE


class Cameras(nn.Module):
    """One encoder for each camera; they share no weights."""

    def __init__(self, views: int, size: int, channels: int, width: int) -> None:
        """``size`` of the square images, a multiple of ``STRIDE``; ``channels`` of a patch."""
        super().__init__()
        self._size = size
        self.each = nn.ModuleList(_Camera(size, channels, width) for _ in range(views))

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [N, V, H, W, 3] -> [N, V * width]. Raises ValueError for other images."""
        size = self._size
        if images.shape[1:] != (len(self.each), size, size, 3) or images.dtype != torch.uint8:
            found = f"{images.dtype} {list(images.shape)}"
            raise ValueError(f"images: expected uint8 [N, {len(self.each)}, {size}, {size}, 3], found {found}")
        return torch.cat([camera(view) for camera, view in zip(self.each, images.unbind(1), strict=True)], dim=1)


class _Camera(nn.Module):
    def __init__(self, size: int, channels: int, width: int) -> None:
        super().__init__()
        self.cells = size // STRIDE  # merged patches in a row
        self.embed = nn.Linear(3 * PATCH**2, channels)
        self.merge = nn.Linear(4 * channels, 2 * channels)
        self.read = nn.Sequential(nn.Linear(2 * channels * self.cells**2, width), nn.LayerNorm(width), nn.Tanh())

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [N, H, W, 3] -> [N, width]."""
        pixels = images.to(self.embed.weight.dtype) / 127.5 - 1.0
        patches = F.gelu(self.embed(_blocks(pixels, PATCH)))
        merged = F.gelu(self.merge(_blocks(patches, 2)))
        features: Tensor = self.read(merged.flatten(1))
        return features


def _blocks(x: Tensor, side: int) -> Tensor:
    """[N, H, W, C] -> [N, H / side, W / side, side * side * C]."""
    n, height, width, _ = x.shape
    parts = x.reshape(n, height // side, side, width // side, side, -1)
    return parts.transpose(2, 3).flatten(3)
