"""The frame after a chunk, put together per pixel from frames that exist.

    frame now ──────────────┬───────────────┐
       └── moved by a flow ─┤               │
    episode's first frame ──┤ choice of one │──► + residual ──► frame after the chunk
    nearest real frame ─────┘ per pixel     │
    proprioception now and afterwards, moves┘

Most of a frame stays as it is. What the arm uncovers was seen in the episode's first frame. The arm itself is in the
frame of another episode whose proprioception is nearest to the predicted one. What the arm carries or pushes moves,
hence the flow. Choosing among moved copies of frames is after arXiv:1605.07157.

The loss is the mean absolute difference, balanced between pixels that change and those that do not.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_rl.world_model.frames import FrameInputs, FrameModel, balanced, changed_pixels, pixels

_SOURCES = 4  # current, first, nearest, moved
_CURRENT = 0
_COPY_BIAS = 2.0  # the choice before training
_MOST_MOTION = 0.5  # of the image's half width, in the grid's units


class ComposedFrames(FrameModel):
    """See the module. ``width``: channels at half resolution."""

    def __init__(self, views: int, proprio: int, width: int) -> None:
        super().__init__()
        self.view = nn.Parameter(torch.zeros(views, 4 * width))
        self.state = nn.Sequential(nn.Linear(3 * proprio, 4 * width), nn.GELU(), nn.Linear(4 * width, 4 * width))
        self.down = nn.ModuleList(
            [
                nn.Conv2d(9, width, 5, 2, 2),
                nn.Conv2d(width, 2 * width, 3, 2, 1),
                nn.Conv2d(2 * width, 2 * width, 3, 2, 1),
            ]
        )
        self.film = nn.ModuleList([nn.Linear(4 * width, 2 * c) for c in (width, 2 * width, 2 * width)])
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, 1, 1)
        self.up = nn.ModuleList([nn.Conv2d(4 * width, 2 * width, 3, 1, 1), nn.Conv2d(3 * width, width, 3, 1, 1)])
        self.out = nn.Conv2d(width + 9, _SOURCES + 2 + 3, 3, 1, 1)
        nn.init.zeros_(self.out.weight)
        assert self.out.bias is not None
        with torch.no_grad():
            self.out.bias.zero_()
            self.out.bias[_CURRENT] = _COPY_BIAS

    def forward(self, inputs: FrameInputs) -> Tensor:
        """See ``FrameModel``."""
        sources = inputs.sources()
        context = (self.state(inputs.motion()).unsqueeze(1) + self.view).flatten(0, 1)
        seen = torch.cat(sources, dim=1)
        x, skips = seen - 0.5, []
        for conv, film in zip(self.down, self.film, strict=True):
            scale, shift = film(context)[..., None, None].chunk(2, dim=1)
            x = F.gelu(conv(x) * (1 + scale) + shift)
            skips.append(x)
        x = F.gelu(self.middle(x)) + x
        x = F.gelu(self.up[0](torch.cat([_resized(x, skips[1]), skips[1]], dim=1)))
        x = F.gelu(self.up[1](torch.cat([_resized(x, skips[0]), skips[0]], dim=1)))
        x = self.out(torch.cat([_resized(x, seen), seen], dim=1))
        choice, flow, residual = x.split([_SOURCES, 2, 3], dim=1)
        sources.append(_moved(sources[_CURRENT], _MOST_MOTION * torch.tanh(flow)))
        weights = choice.softmax(dim=1).unsqueeze(2)
        frame = (weights * torch.stack(sources, dim=1)).sum(dim=1) + residual.tanh()
        return pixels(frame.clamp(0.0, 1.0), inputs.current.shape[1])

    def loss(self, inputs: FrameInputs, after: Tensor, generator: torch.Generator) -> Tensor:
        """See ``FrameModel``."""
        error = (self(inputs) - after.float() / 255).abs().mean(-1)
        return balanced(error, changed_pixels(inputs.current, after))


def _resized(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, size=like.shape[-2:], mode="nearest")


def _moved(frame: Tensor, flow: Tensor) -> Tensor:
    """Each pixel taken from where ``flow`` [m, 2, H, W] points; from -1 to 1 is the whole image."""
    m, _, height, width = frame.shape
    identity = torch.eye(2, 3, device=frame.device, dtype=frame.dtype).expand(m, 2, 3)
    grid = F.affine_grid(identity, [m, 3, height, width], align_corners=False)
    return F.grid_sample(frame, grid + flow.permute(0, 2, 3, 1), padding_mode="border", align_corners=False)
