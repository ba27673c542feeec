"""Random weights with which a small policy learns from thousands of samples instead of millions.

The libraries' defaults suit large networks and huge data sets. In a small network they leave the placeholders, whose
embeddings are all zero, almost indistinguishable, and give neither patch positions nor action bins an order. This file
changes starting values only; the network is the same.

Measured on demonstrations of libero_spatial task 0 (160 episodes, placeholder assets, 96 pixels): after 180 updates of
16 rows at a learning rate of 1e-3, the held-out loss of the three translations was 4.68 with the libraries' defaults,
4.01 with these values, 4.09 without the order of patches, 4.10 to 4.18 without that of bins or without the gain.
"""

from collections.abc import Sequence

import torch
from torch import nn

from vla_rl.policies.base.smooth_embeddings import embed, grid_embeddings, waves
from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds
from vla_rl.policies.openvla_oft.architecture import NUM_BINS, Architecture
from vla_rl.policies.openvla_oft.blank import blank_policy, draw_weights
from vla_rl.policies.openvla_oft.kinds import policy_class
from vla_rl.policies.openvla_oft.model import OpenVLAOFT
from vla_rl.policies.openvla_oft.prompt import PromptTokenizer, build_tiny_tokenizer
from vla_rl.policies.openvla_oft.sizes import openvla_sizes
from vla_rl.policies.openvla_oft.trunk import OpenVLA

_ATTENTION_GAIN = 1.5  # for queries and keys: heads differ more, so that rotary positions distinguish the placeholders
_BIN_WAVES = 24  # in the encoding of an action bin
_SMALL = 100_000_000  # weights


@torch.no_grad()
def initialize(policy: OpenVLA) -> None:
    """Replace some of the library's random weights, drawing from the global random state."""
    for part in (policy.projector, policy.proprio_projector):
        for layer in part.children() if part is not None else ():
            assert isinstance(layer, nn.Linear)
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)
    _initialize_dino(policy)
    _order_patches(policy)
    if isinstance(policy, OpenVLAOFT):
        _order_bins(policy)
    for name, weight in policy.language_model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight.mul_(_ATTENTION_GAIN)


def _initialize_dino(policy: OpenVLA) -> None:
    """Scale by fan-in, as SigLIP's own initialization does."""
    for layer in policy.dino.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    patches = policy.dino.embeddings.patch_embeddings.projection.weight
    nn.init.normal_(patches, std=patches[0].numel() ** -0.5)


def _order_patches(policy: OpenVLA) -> None:
    """Make position embeddings smooth functions of the position: what is learned at one patch helps its neighbours."""
    arch = policy.architecture
    side = arch.image_size // arch.patch_size
    policy.dino.embeddings.position_embeddings[0, 1:] = grid_embeddings(side, arch.dino.width)
    policy.siglip.embeddings.position_embedding.weight.copy_(grid_embeddings(side, arch.siglip.width))


def _order_bins(policy: OpenVLAOFT) -> None:
    """Make rows of the action head smooth functions of the action: neighbouring bins start with similar logits."""
    head = policy.lm_head
    rows = embed(waves(torch.linspace(-1, 1, NUM_BINS), _BIN_WAVES), head.in_features)
    head.weight[head.first : head.last] = (rows / rows.norm(dim=1).mean()).flip(0)  # ids descend with the action


def make_policy(
    architecture: Architecture,
    instructions: Sequence[str],  # one for each task number; ``set_instructions`` may change them later
    codec: ActionCodec,
    proprio: Bounds | None = None,  # needed if ``architecture.proprio_dim`` is not 0
    *,
    vocabulary: Sequence[str] = (),  # further texts whose words to include, so that other tasks can be trained later
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> OpenVLA:
    """A policy with random weights, drawn by ``seed``, whose vocabulary has the words of its instructions.

    A small one is drawn on the CPU in float32, so that it is the same everywhere; a large one where it will be. On the
    device "meta" its weights have no values at all. Raises ValueError if statistics and architecture disagree or the
    words do not fit the vocabulary.
    """
    words = build_tiny_tokenizer([*instructions, *vocabulary], architecture.text_vocab_size)
    tokenizer, device = PromptTokenizer(words, architecture), torch.device(device)
    if device.type == "meta" or openvla_sizes(architecture).parameters > _SMALL:
        policy = blank_policy(architecture, codec, tokenizer, proprio)
        if device.type == "meta":
            policy.to(dtype)
        else:
            draw_weights(policy, device, dtype, seed)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            policy = policy_class(architecture)(architecture, codec, tokenizer, proprio)
            initialize(policy)
        policy.to(device, dtype)
    policy.set_instructions(instructions)
    return policy
