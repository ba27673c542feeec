"""Policies with random weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vla_rl.policies.action_codec import ActionCodec, Bounds
from vla_rl.policies.architecture import Architecture
from vla_rl.policies.initialize import initialize
from vla_rl.policies.openvla_oft import OpenVLAOFT
from vla_rl.policies.prompt import PromptTokenizer, build_tiny_tokenizer


def make_policy(
    architecture: Architecture,
    instructions: Sequence[str],
    codec: ActionCodec,
    proprio: Bounds | None = None,
    *,
    vocabulary: Sequence[str] = (),
    seed: int = 0,
) -> OpenVLAOFT:
    """A policy with random weights, settled by ``seed``, that knows the words of its instructions.

    Args:
        architecture: its sizes.
        instructions: what task numbers mean at first; ``set_instructions`` may change it later.
        codec: statistics of the actions.
        proprio: statistics of proprioception, needed where ``architecture.proprio_dim`` is not 0.
        vocabulary: further texts whose words the policy shall know, so that it can be trained on other tasks later.

    Raises ValueError where statistics and architecture disagree or the words do not fit the vocabulary.
    """
    words = build_tiny_tokenizer([*instructions, *vocabulary], architecture.text_vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = OpenVLAOFT(architecture, codec, PromptTokenizer(words, architecture), proprio)
        initialize(policy)
    policy.set_instructions(instructions)
    return policy
