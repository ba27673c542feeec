"""The frame after a chunk, denoised step by step by a transformer over patches.

    noise, frame now, first frame, nearest real frame ──patches──▶ [ blocks ] ──▶ patches of the frame afterwards
    share of noise, proprioception now and afterwards ─────────────────┘ shift and scale every layer

Training mixes the real frame x with noise e to x_t = t x + (1 - t) e, t in 0..1, and the network predicts x from that
(flow matching, arXiv:2210.02747). To predict the frame rather than the noise lets a transformer work on raw patches
(arXiv:2511.13720). The loss is (x̂ - x)², balanced between pixels that change and those that do not. Flow matching's
weight 1 / (1 - t)² is left out: it lets the last steps count most, which have little to do but copy. Layers are
conditioned by shifts, scales and gates that start at zero (arXiv:2212.09748), so before training the frame now is
copied.

A prediction starts from the same noise in every row: it depends on the inputs alone, and branches from one state differ
by their chunks only.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_rl.world_model.frames import FrameInputs, FrameModel, balanced, changed_pixels, pixels, planes

_FRAMES = 4  # the noisy one, current, first, nearest
_HEAD = 32  # width of an attention head
_NOISE_SEED = 0


class DiffusionFrames(FrameModel):
    """See the module.

    Args:
        views, proprio: numbers of cameras and of values of proprioception.
        width: of the tokens; a multiple of 32.
        depth: blocks.
        patch: side of a patch, in pixels. Frames are padded to a multiple of it.
        steps: network evaluations of one prediction.
    """

    def __init__(self, views: int, proprio: int, width: int, depth: int, patch: int, steps: int) -> None:
        super().__init__()
        self._patch, self._steps = patch, steps
        self.view = nn.Parameter(torch.zeros(views, 1, width))
        self.embed = nn.Linear(3 * _FRAMES * patch**2, width)
        self.noise = nn.Linear(width, width)
        self.motion = nn.Sequential(nn.Linear(3 * proprio, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([_Block(width) for _ in range(depth)])
        self.last = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, 3 * patch**2)
        for layer in (self.last, self.out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, inputs: FrameInputs) -> Tensor:
        """See ``FrameModel``."""
        sources = inputs.sources()
        generator = torch.Generator().manual_seed(_NOISE_SEED)
        x = torch.randn(sources[0].shape[1:], generator=generator).to(sources[0].device).expand_as(sources[0])
        for step in range(self._steps):
            t = step / self._steps
            predicted = self._denoise(x, x.new_full((len(inputs.current),), t), sources, inputs)
            x = x + (predicted - x) / (self._steps - step)
        return pixels(((x + 1) / 2).clamp(0.0, 1.0), inputs.current.shape[1])

    def loss(self, inputs: FrameInputs, after: Tensor, generator: torch.Generator) -> Tensor:
        """See ``FrameModel``."""
        real, views = 2 * planes(after) - 1, after.shape[1]
        t = torch.rand(len(after), generator=generator).to(real.device)
        mix = t.repeat_interleave(views)[:, None, None, None]
        noisy = mix * real + (1 - mix) * torch.randn(real.shape, generator=generator).to(real.device)
        error = (self._denoise(noisy, t, inputs.sources(), inputs) - real).square()
        return balanced(pixels(error, views).mean(-1), changed_pixels(inputs.current, after))

    def _denoise(self, noisy: Tensor, t: Tensor, sources: list[Tensor], inputs: FrameInputs) -> Tensor:
        """The clean frames [n V, 3, H, W] in -1..1 that ``noisy`` at the times ``t`` [n] is expected to come from."""
        views, (height, width) = inputs.current.shape[1], noisy.shape[-2:]
        seen = [2 * frame - 1 for frame in sources]
        patches, grid = _patches(torch.cat([noisy, *seen], dim=1), self._patch)
        tokens = self.embed(patches) + _positions(*grid, self.embed.out_features).to(patches)
        tokens = (tokens.unflatten(0, (-1, views)) + self.view).flatten(1, 2)  # [n, V L, width]
        context = F.silu(self.noise(_waves(1000 * t, self.embed.out_features)) + self.motion(inputs.motion()))
        for block in self.blocks:
            tokens = block(tokens, context)
        change = self.out(_modulated(tokens, *self.last(context).chunk(2, dim=-1)))
        change = _joined(change.unflatten(1, (views, -1)).flatten(0, 1), grid, self._patch)
        return seen[0] + change[..., :height, :width]


class _Block(nn.Module):
    """Attention and a perceptron, both shifted, scaled and gated by a context."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.context = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.context.weight)
        nn.init.zeros_(self.context.bias)

    def forward(self, tokens: Tensor, context: Tensor) -> Tensor:
        """Tokens [n, L, width], context [n, width]."""
        shift, scale, gate, *second = self.context(context).chunk(6, dim=-1)
        qkv = self.attention(_modulated(tokens, shift, scale)).unflatten(-1, (3, -1, _HEAD))
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind())
        tokens = tokens + gate.unsqueeze(1) * self.project(mixed.transpose(1, 2).flatten(2))
        shift, scale, gate = second
        return tokens + gate.unsqueeze(1) * self.perceptron(_modulated(tokens, shift, scale))


def _modulated(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    normed = F.layer_norm(tokens, tokens.shape[-1:])
    return normed * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def _patches(frames: Tensor, side: int) -> tuple[Tensor, tuple[int, int]]:
    """[m, C, H, W] -> [m, L, C side²], and how many there are in a column and in a row."""
    height, width = frames.shape[-2:]
    padded = F.pad(frames, (0, -width % side, 0, -height % side), mode="replicate")
    grid = padded.shape[-2] // side, padded.shape[-1] // side
    return F.unfold(padded, side, stride=side).transpose(1, 2), grid


def _joined(patches: Tensor, grid: tuple[int, int], side: int) -> Tensor:
    """The reverse of ``_patches``, with its padding."""
    return F.fold(patches.transpose(1, 2), (grid[0] * side, grid[1] * side), side, stride=side)


def _positions(rows: int, columns: int, width: int) -> Tensor:
    """[rows columns, width]: waves of the row and of the column."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.cat([_waves(axis.flatten().float(), width // 2) for axis in (row, column)], dim=-1)


def _waves(x: Tensor, width: int) -> Tensor:
    """[n] -> [n, width]: sines and cosines of wavelengths from 2 pi on, as usual in transformers."""
    frequencies = torch.exp(-math.log(1e4) * torch.arange(width // 2, device=x.device) / (width // 2))
    angles = x[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
