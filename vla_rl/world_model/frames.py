"""What all frame models have in common: from what the frame after a chunk is predicted, and by what they are judged.

frame now, the episode's first frame, the real frame with the nearest proprioception ─┐
proprioception now, and as it is predicted ───────────────────────────────────────────┴──▶ frame after the chunk
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_CHANGE = 0.04  # of the range of a color: a pixel that differs by more has changed


@dataclass(frozen=True, slots=True)
class FrameInputs:
    """n chunks, of which the frames afterwards are wanted."""

    current: Tensor  # uint8 [n, V, H, W, 3], before the chunk
    first: Tensor  # uint8 [n, V, H, W, 3], the episode's first frame
    nearest: Tensor  # uint8 [n, V, H, W, 3], the real frame whose proprioception is nearest to ``next_proprio``
    proprio: Tensor  # [n, P], standardized, before the chunk
    next_proprio: Tensor  # [n, P], standardized, after it; predicted
    nearest_proprio: Tensor  # [n, P], standardized, of ``nearest``

    def sources(self) -> list[Tensor]:
        """The three frames, float [n V, 3, H, W] in 0..1 each."""
        return [planes(frame) for frame in (self.current, self.first, self.nearest)]

    def motion(self) -> Tensor:
        """[n, 3 P]: where the robot is, its way to where it will be, and from there to where ``nearest`` shows it."""
        ways = self.next_proprio - self.proprio, self.nearest_proprio - self.next_proprio
        return torch.cat([self.proprio, *ways], dim=-1)


class FrameModel(nn.Module, ABC):
    """Predicts frames of any size."""

    @abstractmethod
    def forward(self, inputs: FrameInputs) -> Tensor:
        """Frames afterwards, [n, V, H, W, 3] in 0..1; the same ones for the same inputs."""

    @abstractmethod
    def loss(self, inputs: FrameInputs, after: Tensor, generator: torch.Generator) -> Tensor:
        """What is minimized.

        Args:
            inputs: n chunks.
            after: uint8 [n, V, H, W, 3], the real frames.
            generator: on the host, for what a model draws.
        """


def balanced(error: Tensor, changed: Tensor) -> Tensor:
    """The mean over pixels that change plus the mean over those that do not; without that, copying is nearly perfect.

    Both arguments have the shape [n, V, H, W].
    """
    parts = [(error * mask).sum() / mask.sum().clamp(min=1) for mask in (changed, ~changed)]
    return parts[0] + parts[1]


def changed_pixels(before: Tensor, after: Tensor) -> Tensor:
    """bool [...], of uint8 [..., 3]: whether a pixel looks different."""
    return (before.float() - after.float()).abs().amax(-1) > 255 * _CHANGE


def planes(frames: Tensor) -> Tensor:
    """uint8 [n, V, H, W, 3] -> float [n V, 3, H, W] in 0..1."""
    return frames.flatten(0, 1).permute(0, 3, 1, 2).float() / 255


def pixels(planes: Tensor, views: int) -> Tensor:
    """[n V, 3, H, W] -> [n, V, H, W, 3]."""
    return planes.unflatten(0, (-1, views)).permute(0, 1, 3, 4, 2)
