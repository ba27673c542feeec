"""Random weights learn: a small policy finds a block in the image, and its starting values are what they claim."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch.nn.functional import cosine_similarity

from tests.policies.policy_helpers import CODEC, PROPRIO, inputs, logits, make, nano
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.openvla_oft.architecture import Architecture, VisionTower
from vla_rl.policies.openvla_oft.model import OpenVLAOFT


def spread_over_placeholders(policy: OpenVLAOFT) -> float:
    """Standard deviation, over the placeholders, of features whose own standard deviation is 1."""
    seen = inputs(policy.architecture, 1)
    with torch.no_grad():
        hidden = policy.decoding.states(policy.language_model, policy._prefix(seen, 1.0), None)
    return float(hidden[0, 1:].std(0).mean())


def test_placeholders_start_distinguishable() -> None:
    arch = nano()
    policy = make(arch)
    assert spread_over_placeholders(policy) > 0.05
    small = dataclasses.replace(arch, llm=dataclasses.replace(arch.llm, initializer_range=0.02))
    stock = OpenVLAOFT(small, CODEC, policy.tokenizer, PROPRIO).eval()
    stock.set_instructions(policy.instructions)
    assert spread_over_placeholders(stock) < 0.01, "the library's weights have become good enough: drop initialize()"


def test_neighbouring_bins_and_patches_start_alike() -> None:
    policy = make(nano())
    bins = policy.lm_head.weight[policy.lm_head.first : policy.lm_head.last].flip(0)
    assert cosine_similarity(bins[:-1], bins[1:]).min() > 0.9
    assert cosine_similarity(bins[:-128], bins[128:]).max() < 0.5
    places = policy.siglip.embeddings.position_embedding.weight
    assert places.std().item() > 0.5


def block_scenes(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [rows, 1, 48, 48, 3] with a red block, and its place as actions [rows, 1, 7]: x, y, then zeros."""
    rng = np.random.default_rng(seed)
    images = np.full((rows, 1, 48, 48, 3), 120, np.uint8)
    actions = np.zeros((rows, 1, 7))
    for row in range(rows):
        x, y = rng.integers(0, 40, 2)
        images[row, 0, y : y + 8, x : x + 8] = (210, 40, 40)
        actions[row, 0, :2] = np.array([x, y]) / 20 - 0.975
    return torch.from_numpy(images), torch.from_numpy(CODEC.encode(actions))


def small_arch() -> Architecture:
    tower = VisionTower(width=48, layers=3, heads=2, intermediate=192)
    return dataclasses.replace(
        nano(proprio_dim=0, chunk_size=1), image_size=48, patch_size=8, dino=tower, siglip=tower, projector_hidden=128
    )


def test_a_policy_learns_where_a_block_is() -> None:
    policy = make(small_arch(), seed=1).train()  # in so few updates, two seeds of five do not find it
    optimizer = torch.optim.AdamW(policy.trunk_parameters(), lr=3e-3)
    images, tokens = block_scenes(3_000, seed=0)
    rest = torch.zeros(24, 0), torch.zeros(24, dtype=torch.long), torch.zeros(24)
    for update in range(125):
        rows = slice(24 * update, 24 * update + 24)
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (update + 1) / 10) * (1 - update / 130)
        loss = -policy(PolicyInput(images[rows], *rest), {"tokens": tokens[rows]}, 1.0).logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    unseen, truth = block_scenes(200, seed=1)
    with torch.no_grad():
        seen = PolicyInput(unseen, torch.zeros(200, 0), torch.zeros(200).long(), torch.zeros(200))
        found = logits(policy, seen)
    error = np.abs(CODEC.decode(found.argmax(-1).numpy()) - CODEC.decode(truth.numpy()))[:, 0, :2].mean() * 20
    assert error < 4, f"mean error {error:.1f} pixels; a constant guess is off by 10"
