"""OpenVLAOFT against slow constructions by hand, and the properties that sampling and learning rely on."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Dinov2WithRegistersModel, SiglipVisionModel

from tests.policies.policy_helpers import (
    CODEC,
    INSTRUCTIONS,
    PROPRIO,
    check_elapsed_time,
    inputs,
    logits,
    make,
    nano,
    rate,
)
from vla_rl.policies.base.constants import constant
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.openvla_oft.architecture import NUM_BINS, openvla_7b, tiny
from vla_rl.policies.openvla_oft.images import prepare_images
from vla_rl.policies.openvla_oft.model import OpenVLAOFT
from vla_rl.policies.openvla_oft.prompt import PromptTokenizer, build_tiny_tokenizer
from vla_rl.policies.openvla_oft.tokens import sample_tokens, token_entropy


def embeddings_by_hand(policy: OpenVLAOFT, images: Tensor, proprio: Tensor, task: int) -> Tensor:
    """[1, S, width] of one observation, laid out token by token without any padding."""
    arch, llama = policy.architecture, policy.language_model
    prompt = policy.tokenizer.encode(policy.instructions[task])
    rows = [llama.embed_tokens(torch.tensor(prompt[0]))]
    for view in images:
        dino_pixels, siglip_pixels = prepare_images(view[None], arch)
        dino = policy.dino(dino_pixels).last_hidden_state[0, 1 + arch.dino_registers :]
        siglip = policy.siglip(siglip_pixels).last_hidden_state[0]
        rows += list(policy.projector(torch.cat([dino, siglip], dim=-1)))
    if policy.proprio_projector is not None:
        rows.append(policy.proprio_projector((proprio / 0.5).clamp(-1, 1)))
    rows += [llama.embed_tokens(torch.tensor(token)) for token in prompt[1:]]
    rows += [torch.zeros(arch.llm.width)] * arch.action_tokens
    if arch.stop_token:
        rows.append(llama.embed_tokens(torch.tensor(arch.eos_id)))
    return torch.stack(rows)[None]


def run_llama(policy: OpenVLAOFT, embeddings: Tensor, mask: Tensor | None) -> Tensor:
    return policy.language_model(inputs_embeds=embeddings, attention_mask=mask, use_cache=False).last_hidden_state


@pytest.mark.parametrize(("views", "proprio_dim", "stop_token"), [(1, 0, True), (1, 8, False), (2, 8, True)])
@torch.no_grad()
def test_logits_and_value_equal_a_slow_construction(views: int, proprio_dim: int, stop_token: bool) -> None:
    arch = dataclasses.replace(nano(views=views, proprio_dim=proprio_dim), stop_token=stop_token)
    policy = make(arch)
    seen = inputs(arch)
    found, values = logits(policy, seen, 1.6), rate(policy, seen).values
    for row in range(3):
        embeddings = embeddings_by_hand(policy, seen.images[row], seen.proprio[row], int(seen.task[row]))
        length = embeddings.shape[1]
        hidden = run_llama(policy, embeddings, torch.ones(1, 1, length, length, dtype=torch.bool))[0]
        prompt_length = len(policy.tokenizer.encode(INSTRUCTIONS[row]))
        first = arch.vision_tokens + prompt_length - 1
        assert length == first + 1 + arch.action_tokens + stop_token
        for i in range(arch.action_tokens):
            full = policy.lm_head.weight @ hidden[first + i]
            ids = torch.arange(arch.vocab_size - 1, arch.vocab_size - 1 - NUM_BINS, -1)  # bin 0 is the last id
            expected = full[ids] / 1.6
            actual = found[row, i // arch.action_dim, i % arch.action_dim]
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        state = torch.cat([hidden[first], 2 * seen.proprio[row]])  # its bounds are -0.5 and 0.5
        torch.testing.assert_close(values[row], policy.value_head(state, seen.elapsed[row]), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_attention_is_bidirectional_and_the_causal_mask_is_not_applied() -> None:
    policy = make(nano())
    seen = inputs(policy.architecture, rows=1)
    prefix = policy._prefix(seen, 1.0)
    before = policy.decoding.states(policy.language_model, prefix, None)
    policy.language_model.embed_tokens.weight[policy.architecture.eos_id] += 1.0
    after = policy.decoding.states(policy.language_model, prefix, None)
    assert (before[0, 0] - after[0, 0]).abs().max() > 1e-4, "the prompt must see what follows it"
    # the stock mask would give other numbers: this is what a forgotten 4-D mask looks like
    embeddings = embeddings_by_hand(policy, seen.images[0], seen.proprio[0], 0)
    causal = run_llama(policy, embeddings, None)
    length = embeddings.shape[1]
    seeing_all = run_llama(policy, embeddings, torch.ones(1, 1, length, length, dtype=torch.bool))
    assert (causal - seeing_all).abs().max() > 1e-2


@torch.no_grad()
def test_padding_does_not_change_results() -> None:
    arch = nano()
    seen = inputs(arch)
    together = make(arch)
    batched, values = logits(together, seen), rate(together, seen).values
    assert len(set(together.prompt_length.tolist())) == 3, "the instructions must differ in length"
    for row in range(3):
        alone = make(arch)
        alone.set_instructions([INSTRUCTIONS[row]])
        one = dataclasses.replace(take(seen, row), task=torch.zeros(1).long())
        torch.testing.assert_close(logits(alone, one)[0], batched[row], atol=1e-5, rtol=0)
        torch.testing.assert_close(rate(alone, one).values[0], values[row], atol=1e-5, rtol=0)


@torch.no_grad()
def test_features_come_from_the_second_to_last_block_without_norm() -> None:
    """Against complete stock towers with the last block, the norms and the pooling head in place."""
    policy = make(nano())
    arch = policy.architecture
    stock: list[nn.Module] = []
    for tower, layers in ((policy.dino, 3), (policy.siglip, 2)):
        config = type(tower.config)(**{**tower.config.to_dict(), "num_hidden_layers": layers})
        kind: Any = Dinov2WithRegistersModel if tower is policy.dino else SiglipVisionModel
        full = kind(config).eval()
        missing, unexpected = full.load_state_dict(tower.state_dict(), strict=False)
        assert not unexpected
        assert all(any(part in name for part in ("norm", f".{layers - 1}.", "mask_token")) for name in missing)
        stock.append(full)
    pixels = prepare_images(inputs(arch, rows=1).images[:, 0], arch)
    for ours, full, image in zip((policy.dino, policy.siglip), stock, pixels, strict=True):
        expected = full(image, output_hidden_states=True).hidden_states[-2]
        torch.testing.assert_close(ours(image).last_hidden_state, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_every_input_reaches_the_action_distribution() -> None:
    arch = nano(views=2)
    policy = make(arch)
    seen = inputs(arch, rows=1)
    base = logits(policy, seen)
    other_first, other_second = seen.images.clone(), seen.images.clone()
    other_first[0, 0, :12, :12] = 255 - other_first[0, 0, :12, :12]
    other_second[0, 1, 12:, 12:] = 255 - other_second[0, 1, 12:, 12:]
    for changed in (
        {"images": other_first},
        {"images": other_second},
        {"proprio": seen.proprio + 0.3},
        {"task": seen.task + 1},
    ):
        found = logits(policy, dataclasses.replace(seen, **changed))
        assert (found - base).abs().amax(dim=(0, 3)).min() > 1e-5, "an action number ignores this input"


def take(seen: PolicyInput, row: int) -> PolicyInput:
    return PolicyInput(*(getattr(seen, f.name)[row : row + 1] for f in dataclasses.fields(seen)))


def choose(
    policy: OpenVLAOFT, seen: PolicyInput, uniforms: Tensor, greedy: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = policy.act(seen, {"uniforms": uniforms}, greedy, temperature)
    return chosen.record["tokens"], chosen.logprobs, chosen.values


def act(policy: OpenVLAOFT, rows: int, greedy: bool, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    arch = policy.architecture
    uniforms = torch.rand(rows, arch.chunk_size, arch.action_dim, generator=torch.Generator().manual_seed(seed))
    return choose(policy, inputs(arch, rows), uniforms, torch.full((rows,), greedy), 0.8)


def test_logprobs_of_act_equal_recomputed_ones() -> None:
    policy = make(nano())
    tokens, logprobs, values = act(policy, 6, greedy=False)
    policy.train()
    seen = inputs(policy.architecture, 6)
    output = policy(seen, {"tokens": tokens}, 0.8)
    assert tokens.dtype == torch.uint8
    torch.testing.assert_close(output.logprobs, logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(output.values, values, atol=1e-5, rtol=0)
    torch.testing.assert_close(output.entropy, token_entropy(logits(policy, seen, 0.8)), atol=1e-5, rtol=0)
    by_hand = logits(policy, seen, 0.8).double().softmax(-1).log().gather(-1, tokens.long()[..., None])[..., 0]
    torch.testing.assert_close(logprobs.double(), by_hand.detach(), atol=1e-5, rtol=0)


def test_greedy_rows_take_the_most_likely_bin_and_report_its_logprob() -> None:
    policy = make(nano())
    tokens, logprobs, _ = act(policy, 4, greedy=True)
    seen = inputs(policy.architecture, 4)
    found = logits(policy, seen, 0.8)
    assert torch.equal(tokens.long(), found.argmax(-1))
    torch.testing.assert_close(logprobs, found.log_softmax(-1).amax(-1), atol=1e-5, rtol=0)
    mixed = torch.tensor([True, False, True, False])
    uniforms = torch.rand(4, 2, 7, generator=torch.Generator().manual_seed(0))
    some, _, _ = choose(policy, seen, uniforms, mixed, 0.8)
    assert torch.equal(some[mixed], tokens[mixed])
    assert not torch.equal(some[~mixed], tokens[~mixed])


@torch.no_grad()
def test_samples_follow_the_reported_distribution() -> None:
    """One state, many uniform numbers: the frequencies of the bins are the probabilities (chi-square)."""
    policy = make(nano(chunk_size=1))
    policy.lm_head.weight.mul_(6)  # away from uniform
    observation = inputs(policy.architecture, 1)
    found = logits(policy, observation, 0.7)
    probabilities = found[0, 0].softmax(-1)
    assert probabilities.max() > 5 / NUM_BINS
    draws = 4_000
    uniforms = torch.rand(draws, 1, 7, generator=torch.Generator().manual_seed(3))
    tokens = sample_tokens(found.expand(draws, -1, -1, -1), uniforms)
    counts = torch.zeros(7, NUM_BINS).scatter_add_(1, tokens[:, 0].T, torch.ones(7, draws))
    expected = probabilities * draws
    common = expected > 5
    statistic = torch.where(common, (counts - expected) ** 2 / expected, 0).sum(-1)
    freedom = common.sum(-1)
    assert (statistic < freedom + 5 * (2 * freedom).sqrt()).all(), (statistic, freedom)
    acted, _, _ = choose(policy, observation, uniforms[:1], torch.tensor([False]), 0.7)
    assert torch.equal(acted.long(), tokens[:1])


def test_extreme_uniform_numbers_never_choose_an_impossible_bin() -> None:
    peaked = torch.full((2, 1, 1, NUM_BINS), -200.0)
    peaked[..., 100:110] = 0.0
    tokens = sample_tokens(peaked, torch.tensor([[[0.0]], [[1.0 - 2**-24]]]))
    assert tokens.flatten().tolist() == [100, 109]


def test_a_row_does_not_depend_on_its_batch() -> None:
    policy = make(nano())
    seen = inputs(policy.architecture, 8)
    uniforms = torch.rand(8, 2, 7, generator=torch.Generator().manual_seed(1))
    greedy = torch.zeros(8, dtype=torch.bool)
    together = choose(policy, seen, uniforms, greedy, 1.0)
    torch.manual_seed(999)  # nor on the global random state
    for row in (0, 5):
        one = slice(row, row + 1)
        alone = choose(policy, take(seen, row), uniforms[one], greedy[one], 1.0)
        assert torch.equal(alone[0], together[0][one])
        torch.testing.assert_close(alone[1], together[1][one], atol=1e-5, rtol=0)
        torch.testing.assert_close(alone[2], together[2][one], atol=1e-5, rtol=0)


def test_elapsed_time_reaches_the_value_alone() -> None:
    policy, draws = make(nano()), {"uniforms": torch.rand(3, 2, 7)}
    check_elapsed_time(policy, inputs(policy.architecture), draws, is_read=True)
    policy.value_time = False
    check_elapsed_time(policy, inputs(policy.architecture), draws, is_read=False)


def test_a_float32_head_under_bf16_loses_nothing_between_features_and_logits() -> None:
    policy = make(nano()).to(torch.bfloat16)
    batch = inputs(policy.architecture)
    rounded = logits(policy, batch)
    policy.lm_head.in_float32 = True
    exact = logits(policy, batch)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.equal(exact, exact.bfloat16().float())
    torch.testing.assert_close(exact, rounded, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("detach", [True, False])
def test_detach_value_stops_gradients_at_the_value_head(detach: bool) -> None:
    policy = make(nano())
    rate(policy, inputs(policy.architecture), detach_value=detach).values.sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in policy.value_parameters())
    reached = [p.grad is not None and bool(p.grad.abs().max() > 0) for p in policy.trunk_parameters()]
    assert any(reached) != detach


def test_policy_loss_reaches_every_trunk_parameter_and_only_those() -> None:
    policy = make(nano())
    rate(policy, inputs(policy.architecture)).logprobs.sum().backward()
    unreached = [name for name, p in policy.named_parameters() if p.grad is None and not name.startswith("value_head")]
    assert unreached == []
    assert all(p.grad is None for p in policy.value_parameters())
    everything = [*policy.trunk_parameters(), *policy.value_parameters()]
    assert {id(p) for p in everything} == {id(p) for p in policy.parameters()}
    assert len(everything) == len(list(policy.parameters()))


def test_entropy_is_that_of_the_distribution() -> None:
    drawn = torch.randn(2, 3, 7, NUM_BINS) * 2
    expected = torch.distributions.Categorical(logits=drawn).entropy()
    torch.testing.assert_close(token_entropy(drawn), expected, atol=1e-5, rtol=1e-5)
    assert token_entropy(drawn.bfloat16()).dtype == torch.float32


@torch.no_grad()
def test_bfloat16_is_close_to_float32() -> None:
    policy = make(nano())
    batch = inputs(policy.architecture)
    exact, exact_values = logits(policy, batch), rate(policy, batch).values
    rough, rough_values = logits(policy.bfloat16(), batch), rate(policy, batch).values
    assert rough.dtype == rough_values.dtype == torch.float32
    assert (rough - exact).abs().mean() < 0.03 * exact.std()
    assert (rough_values - exact_values).abs().max() < 0.05
    assert policy.language_model.rotary_emb.inv_freq.dtype == torch.float32, "positions must not be rounded"


def test_the_tiny_preset_is_tiny_and_runs() -> None:
    arch = tiny(views=2, proprio_dim=8)
    policy = make(arch)
    assert 1_000_000 <= sum(p.numel() for p in policy.parameters()) <= 3_000_000
    assert arch.patches == 64
    tokens, _, values = act(policy, 2, greedy=False)
    assert tokens.shape == (2, 8, 7)
    assert values.shape == (2,)


def test_the_7b_preset_has_the_published_shapes() -> None:
    arch = openvla_7b()
    tokenizer = PromptTokenizer(build_tiny_tokenizer(INSTRUCTIONS, arch.text_vocab_size), arch)
    with torch.device("meta"):
        policy = OpenVLAOFT(arch, CODEC, tokenizer)
    shapes = {name: tuple(p.shape) for name, p in policy.named_parameters()}
    assert shapes["language_model.embed_tokens.weight"] == shapes["lm_head.weight"] == (32064, 4096)
    assert shapes["language_model.layers.31.mlp.gate_proj.weight"] == (11008, 4096)
    assert "language_model.layers.32.mlp.gate_proj.weight" not in shapes
    assert shapes["dino.embeddings.patch_embeddings.projection.weight"] == (1024, 3, 14, 14)
    assert shapes["dino.embeddings.register_tokens"] == (1, 4, 1024)
    assert shapes["dino.encoder.layer.22.mlp.fc1.weight"] == (4096, 1024)
    assert shapes["siglip.encoder.layers.25.mlp.fc1.weight"] == (4304, 1152)
    assert shapes["siglip.embeddings.position_embedding.weight"] == (256, 1152)
    assert shapes["projector.fc1.weight"] == (8704, 2176)
    assert shapes["projector.fc3.weight"] == (4096, 4096)
    assert shapes["value_head.0.weight"] == (512, 4096)
    assert shapes["value_head.4.weight"] == (1, 128)
    # the published 7.54 billion less the unused last vision blocks, norms and pooling head, plus the value head
    total = sum(p.numel() for p in policy.parameters())
    assert total == pytest.approx(7.5e9, rel=0.002)
    assert (arch.text_vocab_size, arch.vocab_size - 1, arch.pad_id) == (31744, 31999, 32000)


def test_wrong_inputs_are_named() -> None:
    policy = make(nano())
    seen = inputs(policy.architecture)

    def changed(**values: Tensor) -> PolicyInput:
        return dataclasses.replace(seen, **values)

    with pytest.raises(ValueError, match=r"images: expected uint8 \[N, 1, H, W, 3\], found torch.float32"):
        rate(policy, changed(images=seen.images.float()))
    with pytest.raises(ValueError, match=r"found torch.uint8 \[3, 2, 24, 24, 3\]"):
        rate(policy, changed(images=seen.images.repeat(1, 2, 1, 1, 1)))
    with pytest.raises(ValueError, match=r"proprio: expected \[3, 8\], found \[3, 4\]"):
        rate(policy, changed(proprio=seen.proprio[:, :4]))
    with pytest.raises(ValueError, match="temperature=0"):
        rate(policy, seen, 0.0)
    with pytest.raises(ValueError, match="at least one instruction"):
        policy.set_instructions([])
    fresh = OpenVLAOFT(policy.architecture, CODEC, policy.tokenizer, PROPRIO)
    with pytest.raises(RuntimeError, match="set_instructions"):
        rate(fresh, seen)
    with pytest.raises(ValueError, match="proprioception statistics have 0 dimensions, proprio_dim=8"):
        OpenVLAOFT(policy.architecture, CODEC, policy.tokenizer, None)
    with pytest.raises(ValueError, match="action statistics have 7 dimensions, action_dim=6"):
        OpenVLAOFT(dataclasses.replace(policy.architecture, action_dim=6), CODEC, policy.tokenizer, PROPRIO)


def test_random_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = make(nano(), seed=1), make(nano(), seed=1), make(nano(), seed=2)
    assert torch.equal(torch.get_rng_state(), state), "building a policy must not disturb the global random state"
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_the_value_head_has_the_published_form() -> None:
    head = make(nano()).value_head
    assert [type(layer) for layer in head] == [nn.Linear, nn.GELU, nn.Linear, nn.GELU, nn.Linear]
    assert isinstance(head[4], nn.Linear)
    assert head[4].bias is None


class _FromHost(TorchDispatchMode):
    """Counts tensors made from Python numbers, and numbers read from tensors. A GPU waits for both."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::lift_fresh", "aten::_local_scalar_dense", "aten::nonzero")
        return func(*args, **(kwargs or {}))


def test_acting_waits_for_no_number_of_the_host() -> None:
    """From the second batch on; before, constants are made."""
    arch = dataclasses.replace(nano(views=2, center_crop=True), resize="lanczos")
    policy, seen = make(arch), inputs(arch)
    images = torch.cat([seen.images, seen.images], dim=2)  # to be resized
    seen = dataclasses.replace(seen, images=images)
    draws, greedy = {"uniforms": torch.rand(3, arch.chunk_size, arch.action_dim)}, torch.zeros(3, dtype=torch.bool)
    constant.cache_clear()
    counts = []
    for _ in range(2):
        with _FromHost() as found:
            policy.act(seen, draws, greedy, 1.0)
        counts.append(found.count)
    assert counts[0] > 0
    assert counts[1] == 0
