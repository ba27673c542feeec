"""Random weights with which a small π0 learns from thousands of samples instead of millions.

The library draws all weights with a deviation of 0.02, which suits wide layers. After 60 updates on 16 rows with one
constant action, the flow-matching loss was 0.85 with these, and 0.24 with deviations by fan-in.
"""

import torch
from torch import nn

from vla_rl.policies.base.smooth_embeddings import grid_embeddings
from vla_rl.policies.pi0.model import Pi0


@torch.no_grad()
def initialize(policy: Pi0) -> None:
    """Replace the library's random weights, drawing from the global random state. The velocity begins as 0."""
    for layer in policy.model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    nn.init.zeros_(policy.model.action_out_proj.weight)
    language, vision = policy.model.model.vlm.language_model, policy.model.model.vlm.vision_tower
    width = language.embed_tokens.weight.shape[1]
    nn.init.normal_(language.embed_tokens.weight, std=width**-0.5)  # Gemma multiplies them by sqrt(width)
    places = vision.embeddings.position_embedding.weight
    places.copy_(grid_embeddings(round(len(places) ** 0.5), places.shape[1]))
