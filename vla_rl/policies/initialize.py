"""Random weights that learn from thousands of samples rather than millions.

The libraries' defaults are made for large pre-trained networks. In a small one that starts from nothing they leave
the placeholders, whose embeddings are all zero, almost indistinguishable, and let positions and bins be unordered
sets. What follows changes starting values only; the network is the same, and trained weights overwrite all of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vla_rl.policies.architecture import NUM_BINS
from vla_rl.policies.openvla_oft import OpenVLAOFT

_ATTENTION_GAIN = 2.0  # of queries and keys of the language model: heads differ, so rotary positions tell tokens apart
_GRID_WAVES = 4  # waves per axis in the code of a patch's place
_BIN_WAVES = 24  # waves in the code of an action bin


@torch.no_grad()
def initialize(policy: OpenVLAOFT) -> None:
    """Overwrite the library's random weights, using the global random state."""
    for layer in _linear_layers(policy):
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    _initialize_dino(policy)
    _order_patches(policy)
    _order_bins(policy)
    for name, weight in policy.language_model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight.mul_(_ATTENTION_GAIN)


def _linear_layers(policy: OpenVLAOFT) -> list[nn.Linear]:
    """Layers between the transformers, and those of the language model."""
    parts: list[nn.Module | None] = [policy.projector, policy.proprio_projector, policy.language_model]
    return [layer for part in parts if part is not None for layer in part.modules() if isinstance(layer, nn.Linear)]


def _initialize_dino(policy: OpenVLAOFT) -> None:
    """As SigLIP initializes itself."""
    for layer in policy.dino.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    patches = policy.dino.embeddings.patch_embeddings.projection
    nn.init.normal_(patches.weight, std=patches.weight[0].numel() ** -0.5)


def _order_patches(policy: OpenVLAOFT) -> None:
    """Position embeddings become smooth functions of the place: what is learned at one carries over to the next."""
    arch = policy.architecture
    side = arch.image_size // arch.patch_size
    line = torch.linspace(-1, 1, side)
    rows, columns = torch.meshgrid(line, line, indexing="ij")
    code = torch.cat([_waves(axis.flatten(), _GRID_WAVES) for axis in (rows, columns)], dim=1)
    for embedding in (
        policy.dino.embeddings.position_embeddings[0, 1:],
        policy.siglip.embeddings.position_embedding.weight,
    ):
        embedding.copy_(_embed(code - code.mean(0), embedding.shape[1]))


def _order_bins(policy: OpenVLAOFT) -> None:
    """Rows of the action head become smooth functions of the action: neighbouring bins start with similar logits."""
    head = policy.lm_head
    rows = _embed(_waves(torch.linspace(-1, 1, NUM_BINS), _BIN_WAVES), head.in_features)
    rows *= rows.norm(dim=1).mean().reciprocal()
    head.weight[head.first : head.last] = rows.flip(0)


def _waves(place: Tensor, count: int) -> Tensor:
    """[n] -> [n, 2 count]: sines and cosines with 1/4, 2/4, ... periods in [-1, 1], the fast ones weaker."""
    order = torch.arange(1, count + 1)
    phase = math.pi / 2 * place.unsqueeze(1) * order
    return torch.cat([phase.sin() / order, phase.cos() / order], dim=1)


def _embed(code: Tensor, width: int) -> Tensor:
    """[n, features] -> [n, width] by a random map that keeps angles where width allows; standard deviation 1."""
    directions = torch.linalg.qr(torch.randn(max(width, code.shape[1]), code.shape[1])).Q[:width]
    embedded = code @ directions.T
    return embedded / embedded.std()
