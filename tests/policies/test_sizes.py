"""vla_rl.policies.openvla_oft.sizes: its arithmetic against policies that are built, run and counted."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.policies.memory_tools import on_fake_cpu, peak_bytes_each, saved_bytes_each, shapes_only
from tests.policies.policy_helpers import few_blocks, inputs, make, nano, rate
from vla_rl.policies.base.blocks import checkpoint_activations
from vla_rl.policies.base.sizes import PolicySizes
from vla_rl.policies.openvla_oft.architecture import Architecture, openvla_7b
from vla_rl.policies.openvla_oft.config import LoraConfig
from vla_rl.policies.openvla_oft.lora import add_adapters
from vla_rl.policies.openvla_oft.model import OpenVLAOFT
from vla_rl.policies.openvla_oft.sizes import openvla_sizes

LORAS = [None, LoraConfig(), LoraConfig(rank=8, targets=("language_model",))]
GIB = 2**30


def sizes_of(policy: OpenVLAOFT, lora: LoraConfig | None, checkpointing: bool = False) -> PolicySizes:
    return openvla_sizes(
        policy.architecture,
        lora,
        element_size=policy.lm_head.weight.element_size(),
        activation_checkpointing=checkpointing,
        prompt_tokens=policy.text_ids.shape[1],
    )


@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize(
    "arch",
    [nano(views=2), few_blocks(openvla_7b(views=2, proprio_dim=8)), nano(views=2, film=True)],
    ids=["nano", "wide", "film"],
)
def test_weights_are_counted(arch: Architecture, lora: LoraConfig | None) -> None:
    policy, sizes = shapes_only(arch, lora, torch.float32), openvla_sizes(arch, lora)
    assert sizes.parameters == sum(weight.numel() for weight in policy.parameters())
    assert sizes.trained == sum(weight.numel() for weight in policy.trained_parameters().values())


def test_the_published_policy_has_its_weights() -> None:
    policy = shapes_only(openvla_7b(), None, torch.bfloat16)
    assert openvla_sizes(openvla_7b()).parameters == sum(weight.numel() for weight in policy.parameters())


def test_modulating_the_towers_of_7b_takes_438_million_weights() -> None:
    modulated, plain = (openvla_sizes(openvla_7b(film=film)).parameters for film in (True, False))
    assert modulated - plain == 2 * (4096 + 1) * (23 * 1024 + 26 * 1152) == 438_411_776


@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize(("dtype", "film"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_saved_activations_of_a_small_policy(lora: LoraConfig | None, dtype: torch.dtype, film: bool) -> None:
    policy = make(nano(views=2, film=film))
    if lora is not None:
        add_adapters(policy, lora, 0)
    policy.train().to(dtype)
    assert sizes_of(policy, lora).saved_each == pytest.approx(saved_bytes_each(policy), rel=0.1)
    checkpoint_activations(policy)
    assert sizes_of(policy, lora, True).saved_each == pytest.approx(saved_bytes_each(policy), rel=0.15)


def test_activations_at_the_widths_of_7b() -> None:
    lora = LoraConfig()
    policy = shapes_only(few_blocks(openvla_7b(views=2, proprio_dim=8)), lora, torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_fake_cpu(policy)
        plain = sizes_of(policy, lora)
        assert plain.saved_each == pytest.approx(saved_bytes_each(policy), rel=0.03)
        assert plain.train_each == pytest.approx(peak_bytes_each(policy, backward=True), rel=0.05)
        assert plain.infer_each == pytest.approx(peak_bytes_each(policy, backward=False), rel=0.1)
        checkpoint_activations(policy)
        checkpointed = sizes_of(policy, lora, True)
        assert checkpointed.saved_each == pytest.approx(saved_bytes_each(policy), rel=0.03)
        assert checkpointed.train_each == pytest.approx(peak_bytes_each(policy, backward=True), rel=0.15)


def test_checkpointing_at_7b_leaves_a_sixteenth() -> None:
    lora = LoraConfig()
    plain, checkpointed = (
        openvla_sizes(openvla_7b(), lora, activation_checkpointing=on, prompt_tokens=19) for on in (False, True)
    )
    assert plain.saved_each / GIB == pytest.approx(2.08, rel=0.05)
    assert checkpointed.saved_each / GIB == pytest.approx(0.12, rel=0.05)
    assert checkpointed.train_each < 0.12 * plain.train_each


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=8)])
def test_gradients_are_the_same_bits(lora: LoraConfig | None) -> None:
    """Float32 on a CPU: what is computed twice comes out alike."""
    found = []
    for checkpointed in (False, True):
        policy = make(nano()).train()
        if lora is not None:
            add_adapters(policy, lora, 0)
            for name, weight in policy.trained_parameters().items():
                if "lora_B" in name:
                    torch.nn.init.constant_(weight, 0.01)  # otherwise A has no gradient
        if checkpointed:
            checkpoint_activations(policy)
        output = rate(policy, inputs(policy.architecture), detach_value=False)
        (output.logprobs.sum() + output.values.sum()).backward()
        found.append({name: weight.grad for name, weight in policy.trained_parameters().items()})
    plain, again = found
    assert sum(bool(gradient.any()) for gradient in plain.values() if gradient is not None) > 20
    for name, gradient in plain.items():
        assert (gradient is None) == (again[name] is None)
        assert gradient is None or torch.equal(gradient, again[name]), name
