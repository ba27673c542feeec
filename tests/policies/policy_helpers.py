"""Small policies and inputs that the policy tests share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from vla_rl.policies.base.policy import Policy, PolicyInput, PolicyOutput
from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds
from vla_rl.policies.openvla_oft.architecture import Architecture, LanguageModel, VisionTower, tiny
from vla_rl.policies.openvla_oft.initialize import make_policy
from vla_rl.policies.openvla_oft.model import OpenVLAOFT

INSTRUCTIONS = (
    "pick up the bowl",
    "open the top drawer of the wooden cabinet and put the wine bottle in it",
    "push it",
)
CODEC = ActionCodec(Bounds((-1.0,) * 7, (1.0,) * 7, (True,) * 6 + (False,)))
PROPRIO = Bounds((-0.5,) * 8, (0.5,) * 8, (True,) * 8)


def nano(
    *, views: int = 1, proprio_dim: int = 8, chunk_size: int = 2, center_crop: bool = False, film: bool = False
) -> Architecture:
    """Smaller than tiny: milliseconds per forward pass."""
    return dataclasses.replace(
        tiny(views=views, proprio_dim=proprio_dim, chunk_size=chunk_size),
        image_size=24,
        patch_size=12,
        center_crop=center_crop,
        film=film,
        dino=VisionTower(width=32, layers=3, heads=2, intermediate=64),
        siglip=VisionTower(width=48, layers=2, heads=2, intermediate=80),
        projector_hidden=64,
        llm=LanguageModel(
            width=64, layers=3, heads=4, intermediate=96, rms_norm_eps=1e-6, rope_theta=1e4, initializer_range=0.1
        ),
        value_hidden=(32, 16),
    )


def few_blocks(architecture: Architecture) -> Architecture:
    """The same widths and tokens with three blocks each: all shapes of the large policy, in a fraction of the time."""
    parts = {name: dataclasses.replace(getattr(architecture, name), layers=3) for name in ("dino", "siglip", "llm")}
    return dataclasses.replace(architecture, **parts)


def make(architecture: Architecture, instructions: tuple[str, ...] = INSTRUCTIONS, seed: int = 0) -> OpenVLAOFT:
    proprio = PROPRIO if architecture.proprio_dim else None
    return make_policy(architecture, instructions, CODEC, proprio, vocabulary=INSTRUCTIONS, seed=seed).eval()


def inputs(architecture: Architecture, rows: int = 3, seed: int = 0) -> PolicyInput:
    """Random images, proprioception and elapsed time; task i in row i, counted through the three instructions."""
    generator = torch.Generator().manual_seed(seed)
    size = architecture.image_size
    images = torch.randint(0, 256, (rows, architecture.views, size, size, 3), dtype=torch.uint8, generator=generator)
    proprio = torch.rand(rows, architecture.proprio_dim, generator=generator) - 0.5
    return PolicyInput(images, proprio, torch.arange(rows) % len(INSTRUCTIONS), torch.linspace(0, 1, rows))


def logits(policy: OpenVLAOFT, seen: PolicyInput, temperature: float = 1.0) -> torch.Tensor:
    """float32 [N, K, A, 256]."""
    return policy.distribution(seen, temperature)[0]


def rate(policy: torch.nn.Module, seen: PolicyInput, temperature: float = 1.0, **options: bool) -> PolicyOutput:
    """The output for chunks of middle bins; ``policy`` may be a learner's engine, which gathers what ZeRO-3 divides."""
    arch = getattr(policy, "module", policy).architecture
    tokens = torch.full((len(seen.task), arch.chunk_size, arch.action_dim), 128, dtype=torch.uint8)
    return policy(seen, {"tokens": tokens}, temperature, **options)


def check_elapsed_time(policy: Policy, seen: PolicyInput, draws: Mapping[str, Tensor], *, is_read: bool) -> None:
    """The same observations later in the episode: other values, if the value head reads the time, and nothing else."""
    torch.nn.init.ones_(policy.value_head.time)  # type: ignore[union-attr]
    later = dataclasses.replace(seen, elapsed=seen.elapsed + 0.5)
    sampled = torch.zeros(len(seen.task), dtype=torch.bool)
    acted = [policy.act(x, draws, sampled, 1.0) for x in (seen, later)]
    assert all(torch.equal(numbers, acted[1].record[name]) for name, numbers in acted[0].record.items())
    rated = [policy(x, acted[0].record, 1.0) for x in (seen, later)]
    for early, late in (acted, rated):
        assert torch.equal(early.logprobs, late.logprobs)
        differences = (early.values - late.values).abs()
        assert differences.min() > 1e-5 if is_read else differences.max() == 0
