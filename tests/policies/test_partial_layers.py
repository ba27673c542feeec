"""Layers that compute some of their rows, against those that compute all."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.policies.policy_helpers import inputs, make, nano
from vla_rl.policies.base.blocks import checkpoint_activations
from vla_rl.policies.openvla_oft.config import LoraConfig
from vla_rl.policies.openvla_oft.lora import add_adapters
from vla_rl.policies.openvla_oft.partial_layers import FirstLayer, LastLayer


def _all_of_it(
    self: FirstLayer | LastLayer, hidden: Tensor, *args: Any, read: Tensor | None = None, **others: Any
) -> Tensor:
    out = LlamaDecoderLayer.forward(self, hidden, *args, **others)
    read = read if isinstance(self, LastLayer) else None
    return out if read is None else out.take_along_dim(read.unsqueeze(-1), dim=1)


@pytest.mark.parametrize("kind", ["full", "recomputed", "lora"])
@pytest.mark.parametrize("decoding", ["parallel", "autoregressive"])
def test_acting_and_learning_are_the_same(monkeypatch: pytest.MonkeyPatch, decoding: str, kind: str) -> None:
    """Three prompts, of different lengths. With parallel decoding, log-probabilities and values are equal to the bit;
    with the other, few rows are read at a time, for which matrix products add up in another order."""
    arch = dataclasses.replace(nano(), decoding=decoding)
    policy, seen = make(arch), inputs(arch)
    if kind == "lora":
        add_adapters(policy, LoraConfig(rank=4), seed=0)
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    if kind == "recomputed":
        checkpoint_activations(policy)
    draws = {"uniforms": torch.rand(3, arch.chunk_size, arch.action_dim, generator=torch.Generator().manual_seed(0))}
    found = []
    for is_partial in (True, False):
        for layer in (FirstLayer, LastLayer):
            monkeypatch.setattr(layer, "forward", layer.forward if is_partial else _all_of_it)
        chosen = policy.eval().act(seen, draws, torch.tensor([True, False, False]), 0.5)
        rated = policy.train()(seen, {"tokens": chosen.record["tokens"]}, 0.5, False)
        (rated.logprobs.sum() + rated.values.sum()).backward()
        gradients = torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None])
        policy.zero_grad()
        found.append((chosen, rated, gradients))
    (chosen, rated, gradients), (chosen_of_all, rated_of_all, gradients_of_all) = found
    assert torch.equal(chosen.record["tokens"], chosen_of_all.record["tokens"])
    error = 0.0 if decoding == "parallel" else 1e-5
    for one, other in ((chosen, chosen_of_all), (rated, rated_of_all)):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=error, atol=error)
        torch.testing.assert_close(one.values, other.values, rtol=error, atol=error)
    assert (gradients - gradients_of_all).norm() < 1e-5 * gradients_of_all.norm()
