"""Autoregressive decoding: transformers' ``generate`` chooses the same tokens, and one causal pass rates them alike."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.policies.memory_tools import LiveBytes, on_fake_cpu, saved_bytes_each, shapes_only
from tests.policies.openvla_reference import (
    OPENVLA_CODE,
    VOCAB,
    ReferenceOpenVLA,
    llama_tokenizer,
    twin,
    write_folder,
)
from tests.policies.policy_helpers import CODEC, INSTRUCTIONS, few_blocks, inputs, make, nano
from vla_rl.policies.base.blocks import checkpoint_activations
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.openvla_oft.architecture import Architecture, openvla_7b
from vla_rl.policies.openvla_oft.checkpoint import load_policy, save_policy
from vla_rl.policies.openvla_oft.config import LoraConfig
from vla_rl.policies.openvla_oft.hf_folder import open_published
from vla_rl.policies.openvla_oft.hf_reader import load_published
from vla_rl.policies.openvla_oft.lora import add_adapters
from vla_rl.policies.openvla_oft.model import OpenVLAOFT
from vla_rl.policies.openvla_oft.sizes import openvla_sizes

CLOSE = 5e-5


def arch(chunk_size: int = 2, views: int = 1, proprio_dim: int = 8) -> Architecture:
    some = nano(chunk_size=chunk_size, views=views, proprio_dim=proprio_dim)
    return dataclasses.replace(some, decoding="autoregressive")


def uniforms(policy: OpenVLAOFT, rows: int, seed: int = 0) -> Tensor:
    shape = rows, policy.architecture.chunk_size, policy.architecture.action_dim
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def act(
    policy: OpenVLAOFT, seen: PolicyInput, temperature: float = 0.8, seed: int = 0, greedy: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    rows = len(seen.task)
    draws = {"uniforms": uniforms(policy, rows, seed)}
    chosen = policy.act(seen, draws, torch.full((rows,), greedy), temperature)
    return chosen.record["tokens"], chosen.logprobs, chosen.values


# --- the published model ---


@pytest.fixture(scope="module")
def reference() -> ReferenceOpenVLA:
    return twin()


@pytest.fixture(scope="module")
def folder(reference: ReferenceOpenVLA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("hub") / "openvla-7b", reference, shards=3, code=OPENVLA_CODE)


@pytest.mark.parametrize("chunk_size", [1, 2])
@torch.no_grad()
def test_the_policy_is_openvla_and_chooses_what_generate_does(
    reference: ReferenceOpenVLA, folder: Path, chunk_size: int
) -> None:
    """Three prompts of different lengths in one batch, against one row at a time without padding."""
    plain = {"center_crop": False, "jpeg": False}
    policy = load_published(open_published(folder), views=1, chunk_size=chunk_size, variant=plain).eval()
    policy.set_instructions(INSTRUCTIONS)
    images = torch.randint(0, 256, (3, 1, 56, 56, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    seen = PolicyInput(images, torch.zeros(3, 0), torch.arange(3), torch.zeros(3))
    patches = reference.patches(images[:, 0], policy.architecture.dino_mean, policy.architecture.dino_std)
    greedy, _, _ = act(policy, seen, 1.0, greedy=True)
    sampled, _, _ = act(policy, seen, 1.0)
    found, _ = policy.distribution(seen, 1.0, sampled)
    tokenizer = llama_tokenizer()
    for row, instruction in enumerate(INSTRUCTIONS):
        prompt = tokenizer.encode(f"In: What action should the robot take to {instruction.lower()}?\nOut: ").ids
        ids = reference.generate(patches[row], prompt, 7 * chunk_size)
        assert [VOCAB - 1 - number for number in ids] == greedy[row].flatten().tolist()
        recorded = (VOCAB - 1 - sampled[row].flatten().long()).tolist()
        expected = reference.autoregressive_logits(patches[row], prompt, recorded)
        assert expected.std() > 0.3
        assert (found[row].flatten(0, 1) - expected).abs().max() < CLOSE
    assert len({tuple(row) for row in greedy.flatten(1).tolist()}) > 1


# --- sampling and learning ---


@pytest.mark.parametrize("chunk_size", [1, 3])
@pytest.mark.parametrize("temperature", [0.6, 1.6])
def test_logprobs_of_act_equal_recomputed_ones(chunk_size: int, temperature: float) -> None:
    """With a cache and one token at a time, or without one and all at once; prompts differ in length."""
    policy = make(arch(chunk_size, views=2))
    seen = inputs(policy.architecture, 6)
    tokens, logprobs, values = act(policy, seen, temperature)
    assert tokens.shape == logprobs.shape == (6, chunk_size, 7)
    assert tokens.dtype == torch.uint8
    output = policy.train()(seen, {"tokens": tokens}, temperature)
    torch.testing.assert_close(output.logprobs, logprobs, atol=CLOSE, rtol=0)
    torch.testing.assert_close(output.values, values, atol=CLOSE, rtol=0)
    logits, _ = policy.distribution(seen, temperature, tokens)
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(output.entropy, expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_sampling_without_a_cache_chooses_the_same() -> None:
    """Number after number, each from a forward pass over everything before it."""
    policy = make(arch())
    seen, draws = inputs(policy.architecture, 3), uniforms(make(arch()), 3).flatten(1)
    tokens, _, _ = act(policy, seen)
    by_hand = torch.full_like(tokens, 255).flatten(1)
    for number in range(14):
        logits, _ = policy.distribution(seen, 0.8, by_hand.view_as(tokens))
        cumulative = logits.flatten(1, 2)[:, number].softmax(-1).double().cumsum(-1)
        by_hand[:, number] = (cumulative <= draws[:, number, None]).sum(-1).to(torch.uint8)
    assert torch.equal(by_hand.view_as(tokens), tokens)
    assert not torch.equal(act(policy, seen, seed=1)[0], tokens)


@torch.no_grad()
def test_a_number_depends_on_those_before_it_alone() -> None:
    policy = make(arch())
    seen = inputs(policy.architecture, 2)
    tokens, _, values = act(policy, seen)
    logits, state = policy.distribution(seen, 1.0, tokens)
    changed = tokens.clone()
    changed[:, 0, 4] = 255 - changed[:, 0, 4]
    other, same = policy.distribution(seen, 1.0, changed)
    difference = (logits - other).abs().amax(-1).flatten(1)
    assert difference[:, :5].max() < 1e-6
    assert difference[:, 5:].min() > 1e-5
    torch.testing.assert_close(state, same, atol=1e-6, rtol=0)
    expected = policy.value_head(torch.cat([state, 2 * seen.proprio], 1), seen.elapsed)  # bounds are -0.5 and 0.5
    torch.testing.assert_close(values, expected, atol=CLOSE, rtol=0)
    with pytest.raises(ValueError, match=r"autoregressive decoding: .* depends on the tokens"):
        policy.distribution(seen, 1.0)


@torch.no_grad()
def test_padding_does_not_change_a_row() -> None:
    policy, alone = make(arch()), make(arch())
    seen = inputs(policy.architecture, 3)
    tokens, logprobs, values = act(policy, seen)
    assert len(set(policy.prompt_length.tolist())) == 3
    draws = uniforms(policy, 3)
    for row in range(3):
        alone.set_instructions([INSTRUCTIONS[row]])
        one = PolicyInput(*(getattr(seen, f.name)[row : row + 1] for f in dataclasses.fields(seen)))
        one = dataclasses.replace(one, task=torch.zeros(1).long())
        chosen = alone.act(one, {"uniforms": draws[row : row + 1]}, torch.tensor([False]), 0.8)
        assert torch.equal(chosen.record["tokens"][0], tokens[row])
        torch.testing.assert_close(chosen.logprobs[0], logprobs[row], atol=CLOSE, rtol=0)
        torch.testing.assert_close(chosen.values[0], values[row], atol=CLOSE, rtol=0)


@torch.no_grad()
def test_greedy_rows_among_sampled_ones() -> None:
    policy = make(arch())
    seen = inputs(policy.architecture, 4)
    greedy, mixed = act(policy, seen, greedy=True)[0], torch.tensor([True, False, True, False])
    chosen = policy.act(seen, {"uniforms": uniforms(policy, 4)}, mixed, 0.8)
    assert torch.equal(chosen.record["tokens"][mixed], greedy[mixed])
    assert torch.equal(chosen.record["tokens"][~mixed], act(policy, seen)[0][~mixed])
    logits, _ = policy.distribution(seen, 0.8, greedy)
    assert torch.equal(logits.argmax(-1), greedy.long())


# --- training ---


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=8)])
def test_activation_checkpointing_and_adapters(lora: LoraConfig | None) -> None:
    gradients = []
    for checkpointed in (False, True):
        policy = make(arch())
        if lora is not None:
            add_adapters(policy, lora, 0)
            for name, weight in policy.trained_parameters().items():
                if "lora_B" in name:
                    torch.nn.init.constant_(weight, 0.01)
        seen = inputs(policy.architecture)
        tokens, logprobs, _ = act(policy, seen)
        if checkpointed:
            checkpoint_activations(policy)
        output = policy.train()(seen, {"tokens": tokens}, 0.8, detach_value=False)
        torch.testing.assert_close(output.logprobs, logprobs, atol=CLOSE, rtol=0)
        (output.logprobs.sum() + output.values.sum()).backward()
        gradients.append({name: weight.grad for name, weight in policy.trained_parameters().items()})
    plain, again = gradients
    assert sum(bool(gradient.any()) for gradient in plain.values() if gradient is not None) > 20
    assert all(gradient is not None for name, gradient in plain.items())
    assert [name for name in plain if not torch.equal(plain[name], again[name])] == []
    with pytest.raises(RuntimeError, match="call eval"):
        act(policy, seen)
    act(policy.eval(), seen)


def test_cloning_lowers_its_loss() -> None:
    policy = make(arch(chunk_size=1)).train()
    seen, rng = inputs(policy.architecture, 4), np.random.default_rng(0)
    actions = CODEC.decode(rng.integers(0, 254, (4, 1, 7), dtype=np.uint8))
    mask = torch.ones(4, 1, dtype=torch.bool)
    optimizer = torch.optim.AdamW(policy.trunk_parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        loss = policy.imitation_loss(seen, actions, mask, rng, smoothing=0)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]
    logprobs = policy(seen, policy_record(policy, actions), 1.0).logprobs
    assert float(-logprobs.detach().mean()) < losses[-1] + 0.2


def policy_record(policy: OpenVLAOFT, actions: np.ndarray) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in policy.encode(actions, np.random.default_rng(0)).items()}


def test_a_checkpoint_remembers_the_decoding(tmp_path: Path) -> None:
    policy = make(arch())
    save_policy(policy, tmp_path / "policy", {})
    loaded = load_policy(tmp_path / "policy").eval()
    assert loaded.architecture == policy.architecture
    loaded.set_instructions(INSTRUCTIONS)
    seen = inputs(policy.architecture)
    assert all(torch.equal(*pair) for pair in zip(act(policy, seen), act(loaded, seen), strict=True))
    parallel = load_policy(tmp_path / "policy", variant={"decoding": "parallel"}).eval()
    parallel.set_instructions(INSTRUCTIONS)
    assert not torch.equal(act(parallel, seen)[1], act(policy, seen)[1])


def test_memory_is_counted() -> None:
    """At the widths of 7B: what a learner saves, and the keys and values that are held while a chunk is decoded."""
    architecture = dataclasses.replace(few_blocks(openvla_7b(chunk_size=1)), decoding="autoregressive")
    lora = LoraConfig()
    policy = shapes_only(architecture, lora, torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_fake_cpu(policy)
        prompt = policy.text_ids.shape[1]
        sizes = openvla_sizes(architecture, lora, element_size=2, prompt_tokens=prompt)
        assert sizes.saved_each == pytest.approx(saved_bytes_each(policy), rel=0.03)
        peaks = []
        for rows in (64, 128):  # with fewer, other phases have the peak
            with LiveBytes() as live:
                act(policy, inputs(architecture, rows))
            peaks.append(live.peaks["cpu"])
        assert sizes.infer_each == pytest.approx((peaks[1] - peaks[0]) / 64, rel=0.1)
    without = openvla_sizes(dataclasses.replace(architecture, decoding="parallel"), lora, prompt_tokens=prompt)
    assert sizes.infer_each > 1.05 * without.infer_each
