"""OpenVLA-OFT's continuous actions: its published head, and a Laplace distribution around what it regresses."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributions import Laplace

from tests.policies.openvla_reference import STATISTICS, L1Head, llama_tokenizer, read_folder
from tests.policies.openvla_twins import l1_head, openvla_oft, openvla_oft_film, openvla_oft_l1, proprio_projector
from tests.policies.policy_helpers import INSTRUCTIONS, check_elapsed_time
from vla_rl.config.loading import ConfigError, load_config
from vla_rl.core.actions import end_effector
from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.blocks import checkpoint_activations
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.build import build_policy, check_policy, policy_sizes
from vla_rl.policies.openvla_oft.architecture import openvla_7b
from vla_rl.policies.openvla_oft.checkpoint import load_policy, save_policy
from vla_rl.policies.openvla_oft.config import OpenVLAOFTConfig
from vla_rl.policies.openvla_oft.hf_folder import open_published
from vla_rl.policies.openvla_oft.hf_names import action_head_shapes
from vla_rl.policies.openvla_oft.hf_reader import load_published
from vla_rl.policies.openvla_oft.hf_writer import write_published
from vla_rl.policies.openvla_oft.regression import OpenVLARegression, sample_laplace

SPEC = EnvSpec("fake", ("main", "wrist"), 56, 8, end_effector(), 12, INSTRUCTIONS)
CLOSE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return openvla_oft_l1(tmp_path_factory.mktemp("hub") / "oft")


@pytest.fixture(scope="module")
def modulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its towers read the prompt (FiLM)."""
    return openvla_oft_film(tmp_path_factory.mktemp("hub") / "film")


def config(folder: Path | None = None, **settings: object) -> OpenVLAOFTConfig:
    plain = {"head": "l1", "chunk_size": 2, "center_crop": False, "jpeg": False, "size": "nano"}
    return OpenVLAOFTConfig(checkpoint=None if folder is None else str(folder), **(plain | settings))


def build(folder: Path | None = None, **settings: object) -> OpenVLARegression:
    policy = build_policy(config(folder, **settings), SPEC, seed=3).eval()
    assert isinstance(policy, OpenVLARegression)
    return policy


def observations(rows: int = 3) -> PolicyInput:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (rows, 2, 56, 56, 3), dtype=torch.uint8, generator=generator)
    proprio = torch.rand(rows, 8, generator=generator) - 0.5
    return PolicyInput(images, proprio, torch.arange(rows) % 3, torch.linspace(0, 1, rows))


def act(policy: OpenVLARegression, rows: int = 3, greedy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    uniforms = torch.rand(rows, 2, 7, generator=torch.Generator().manual_seed(2))
    chosen = policy.act(observations(rows), {"uniforms": uniforms}, torch.full((rows,), greedy), 1.3)
    return chosen.record["actions"], chosen.logprobs, chosen.values


# --- the published model ---


@torch.no_grad()
@pytest.mark.parametrize("layout", ["folder", "modulated"])
def test_means_are_those_of_the_published_head(layout: str, request: pytest.FixtureRequest) -> None:
    """Two images, proprioception, the hidden states of all placeholders, and the head itself."""
    folder: Path = request.getfixturevalue(layout)
    policy, seen, model = build(folder), observations(), read_folder(folder)
    mean, _, _ = policy.distribution(seen, 1.0)
    arch, projector = policy.architecture, proprio_projector(0)
    assert (arch.views, arch.proprio_dim, arch.head, arch.decoding) == (2, 8, "l1", "parallel")
    assert arch.film == (layout == "modulated")
    low, high = (torch.tensor(STATISTICS["proprio"][name]) for name in ("q01", "q99"))
    hidden = (2 * (seen.proprio - low) / (high - low + 1e-8) - 1).clamp(-1, 1)
    hidden = hidden @ projector["module.fc1.weight"].T + projector["module.fc1.bias"]
    token = torch.nn.functional.gelu(hidden) @ projector["module.fc2.weight"].T + projector["module.fc2.bias"]
    for row, instruction in enumerate(INSTRUCTIONS):
        one = slice(row, row + 1)
        prompt = llama_tokenizer().encode(f"In: What action should the robot take to {instruction.lower()}?\nOut: ").ids
        views = seen.images[one].unbind(1)
        patches = torch.cat([model.patches(view, arch.dino_mean, arch.dino_std, prompt) for view in views], 1)
        states = model.parallel_states(patches, prompt, 14, proprio=token[one])
        expected = l1_head(0)(states, 2)
        assert expected.std() > 0.1
        assert (mean[one] - expected).abs().max() < CLOSE


def test_the_published_head_has_these_tensors() -> None:
    """At the widths of 7B, by the published definition."""
    with torch.device("meta"):
        published = L1Head(4096, 7).state_dict()
    expected = {name.removeprefix("model."): tuple(tensor.shape) for name, tensor in published.items()}
    assert action_head_shapes(openvla_7b(head="l1")) == expected
    assert expected["fc1.weight"] == (4096, 28_672)


def test_actions_are_in_the_units_of_the_data(folder: Path) -> None:
    policy = build(folder)
    action = STATISTICS["action"]
    low, high = (np.array(action[name]) for name in ("q01", "q99"))
    normalized = np.random.default_rng(0).uniform(-1, 1, (4, 2, 7)).astype(np.float32)
    decoded = policy.decode({"actions": normalized})
    expected = np.where(action["mask"], 0.5 * (normalized + 1) * (high - low) + low, normalized)
    assert np.allclose(decoded, expected, atol=1e-6)
    encoded = policy.encode(decoded, np.random.default_rng(0))["actions"]
    assert encoded.dtype == np.float32
    assert np.allclose(encoded, normalized, atol=1e-5)
    assert policy.normalized_actions({"actions": normalized}) is normalized


# --- the distribution ---


def test_limits_of_actions_may_lie_beyond_those_of_the_data(folder: Path) -> None:
    policy, ends = build(folder), np.stack([np.full((2, 7), -1.0), np.full((2, 7), 1.0)]).astype(np.float32)
    limits = policy.action_limits(ends)
    assert np.abs(limits).max() > 1
    assert np.allclose(policy.decode({"actions": limits}), ends, atol=1e-5)


def test_logprobs_are_laplaces_and_the_learners_are_the_samplers(folder: Path) -> None:
    policy = build(folder, noise_scale=0.2)
    actions, logprobs, values = act(policy)
    seen = observations()
    mean, scale, _ = policy.distribution(seen, 1.3)
    assert torch.allclose(scale, torch.full((7,), 0.26))
    expected = Laplace(mean, scale.expand_as(mean))
    torch.testing.assert_close(logprobs, expected.log_prob(actions), atol=CLOSE, rtol=0)
    output = policy.train()(seen, {"actions": actions}, 1.3)
    torch.testing.assert_close(output.logprobs, logprobs, atol=CLOSE, rtol=0)
    torch.testing.assert_close(output.values, values, atol=CLOSE, rtol=0)
    torch.testing.assert_close(output.entropy, expected.entropy(), atol=CLOSE, rtol=0)
    greedy, _, _ = act(policy.eval(), greedy=True)
    torch.testing.assert_close(greedy, mean, atol=CLOSE, rtol=0)
    assert (actions - greedy).abs().mean() > 0.1
    alone = policy.act(
        PolicyInput(seen.images[:1], seen.proprio[:1], seen.task[:1], seen.elapsed[:1]),
        {"uniforms": torch.rand(3, 2, 7, generator=torch.Generator().manual_seed(2))[:1]},
        torch.tensor([False]),
        1.3,
    )
    torch.testing.assert_close(alone.record["actions"][0], actions[0], atol=CLOSE, rtol=0)


def test_samples_invert_the_cumulative_distribution() -> None:
    uniforms = torch.rand(50_000, generator=torch.Generator().manual_seed(0))
    mean, scale = torch.tensor(0.3), torch.tensor(0.7)
    samples = sample_laplace(mean, scale, uniforms)
    torch.testing.assert_close(Laplace(mean, scale).cdf(samples), uniforms, atol=1e-5, rtol=0)
    extremes = sample_laplace(mean, scale, torch.tensor([0.0, 0.5, 1 - 2.0**-24]))
    assert extremes.isfinite().all()
    assert extremes[1] == 0.3


@pytest.mark.parametrize("value_time", [True, False])
def test_elapsed_time_reaches_the_value_alone(value_time: bool) -> None:
    policy = build(value_time=value_time)
    check_elapsed_time(policy, observations(), {"uniforms": torch.rand(3, 2, 7)}, is_read=value_time)


# --- training ---


@pytest.mark.parametrize("layout", ["folder", "modulated"])
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_every_weight_learns(layout: str, lora: dict | None, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(layout)
    gradients = []
    for checkpointed in (False, True):
        policy = build(folder, lora=lora).train()
        if checkpointed:
            checkpoint_activations(policy)
        output = policy(observations(), {"actions": torch.zeros(3, 2, 7)}, 1.0)
        (output.logprobs.sum() + output.values.sum()).backward()
        gradients.append({name: weight.grad for name, weight in policy.trained_parameters().items()})
    assert [name for name, gradient in gradients[0].items() if gradient is None] == []
    assert {"action_head.fc1.weight", "action_head.log_noise", "value_head.0.weight"} <= gradients[0].keys()
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
    assert (lora is None) == ("projector.fc1.weight" in gradients[0])
    sizes = policy_sizes(config(folder, lora=lora), SPEC, 4)
    assert sizes.trained == sum(weight.numel() for weight in policy.trained_parameters().values())
    assert sizes.parameters == sum(weight.numel() for weight in policy.parameters())


@torch.no_grad()
def test_means_in_float32_under_bf16(folder: Path) -> None:
    policy = build(folder).to(torch.bfloat16)
    rounded, _, _ = policy.distribution(observations(), 1.0)
    policy.compute_head_in_float32(True)
    exact, scale, _ = policy.distribution(observations(), 1.0)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.equal(exact, exact.bfloat16().float())
    torch.testing.assert_close(exact, rounded, atol=0.02, rtol=0.02)
    assert exact.dtype == scale.dtype == torch.float32


@pytest.mark.parametrize("head", ["tokens", "l1"])
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_the_plan_knows_what_is_copied_as_a_reference(head: str, lora: dict | None) -> None:
    """Switching adapters off does not bring back a head that is trained in full."""
    settings = config(head=head, lora=lora)
    policy = build_policy(settings, SPEC, seed=3)
    assert policy.has_reference == settings.holds_reference == (head == "tokens" and lora is not None)
    if not policy.has_reference:
        with pytest.raises(RuntimeError, match="keep a copy"), policy.reference():
            pass
        copied = copy.deepcopy(policy)
        assert all(torch.equal(*pair) for pair in zip(copied.parameters(), policy.parameters(), strict=True))
        assert not {id(layer) for layer in copied.modules()} & {id(layer) for layer in policy.modules()}
        assert copied.adapted.keys() == policy.adapted.keys()
        assert all(layer is copied.get_submodule(path) for path, layer in copied.adapted.items())


def test_cloning_regresses_the_mean() -> None:
    policy = build().train()
    seen = observations(4)
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 2, 7))
    mask = torch.tensor([[True, True], [True, False]] * 2)
    optimizer = torch.optim.AdamW(policy.trunk_parameters(), lr=3e-3)
    with torch.no_grad():
        mean, _, _ = policy.distribution(seen, 1.0)
    by_hand = float((mean - torch.from_numpy(actions)).abs()[mask].mean())
    losses = []
    for _ in range(25):
        loss = policy.imitation_loss(seen, actions, mask, np.random.default_rng(0), smoothing=0)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] == pytest.approx(by_hand, abs=1e-5)
    assert losses[-1] < 0.75 * losses[0]


# --- checkpoints ---


def test_round_trips(folder: Path, tmp_path: Path) -> None:
    policy = build(folder, noise_scale=0.1)
    with torch.no_grad():
        for parameter in policy.action_head.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    save_policy(policy, tmp_path / "ours", {})
    write_published(policy, open_published(folder), tmp_path / "published")
    written = load_file(tmp_path / "published/action_head.safetensors")
    head = l1_head(0)
    head.load_state_dict(written)  # the published definition, strictly
    assert torch.equal(head.model.fc2.weight, policy.action_head.fc2.weight)
    source, target = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "published"))
    lm_head = "language_model.lm_head.weight"
    assert torch.equal(source[lm_head], target[lm_head]), "of no use to this head, but the original code expects it"
    again = load_published(open_published(tmp_path / "published"), views=2, chunk_size=2, suite="").eval()
    for found in (load_policy(tmp_path / "ours").eval(), again):
        assert found.architecture == policy.architecture
        found.set_instructions(INSTRUCTIONS)
        assert found.state_dict().keys() == policy.state_dict().keys()
        assert all(torch.equal(*pair) for pair in zip(act(found), act(policy), strict=True))


def test_the_head_follows_the_folder(folder: Path, tmp_path: Path) -> None:
    """No key is needed for it; what the run must show the policy is said in one message, with the keys."""
    save_policy(build(folder), tmp_path / "ours", {})
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    for checkpoint in (folder, tmp_path / "ours", adapters):
        found = config(checkpoint, head=None)
        assert (found.head_in_use, found.discrete) == ("l1", False)
        assert found.spec(SPEC).record.keys() == {"actions"}
    check_policy(config(folder, head=None), SPEC)
    for tokens in (openvla_oft(tmp_path / "tokens"), tmp_path / "none", None):
        assert config(tokens, head=None).head_in_use == "tokens"
    blind = dataclasses.replace(SPEC, views=("main",), proprio_dim=0)
    expected = r"the run has 0 \(set env.proprio=true\); its files do not say .* \(set env.wrist_camera=true\)"
    with pytest.raises(UserError, match=expected):
        check_policy(config(folder, head=None), blind)


def test_what_does_not_fit_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"made for head=l1, the run has tokens \(set policy\.head=l1\)"):
        check_policy(config(folder, head="tokens"), SPEC)
    tokens = openvla_oft(tmp_path / "tokens")
    with pytest.raises(UserError, match=r"made for head=tokens, the run has l1 \(set policy\.head=tokens\)"):
        check_policy(config(tokens), SPEC)
    save_policy(build(folder), tmp_path / "ours", {})
    for checkpoint in (folder, tmp_path / "ours"):
        wrong = config(checkpoint, head="tokens", decoding="autoregressive")
        with pytest.raises(UserError, match=r"head='l1' reads a whole chunk: decoding='autoregressive'"):
            check_policy(wrong, SPEC)
    file = tmp_path / "tokens/action_head--150000_checkpoint.safetensors"
    head = l1_head().state_dict()
    save_file({name: tensor for name, tensor in head.items() if name != "model.fc2.bias"}, file)
    with pytest.raises(UserError, match=r"action_head\.fc2\.bias is missing"):
        check_policy(config(tokens), SPEC)
    save_file({"noise_predictor.mlp_resnet.fc1.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(UserError, match="action_head is one for diffusion"):
        check_policy(config(tokens), SPEC)


def test_bins_of_continuous_actions_cannot_be_smoothed() -> None:
    assert config().spec(SPEC).record["actions"].dtype == "<f4"
    with pytest.raises(ConfigError, match="bin_smoothing"):
        load_config(None, ["policy.head=l1", "sft.bin_smoothing=2"])
    with pytest.raises(ConfigError, match=r"policy.*head=l1 reads a whole chunk.*decoding=parallel"):
        load_config(None, ["policy.head=l1", "sft.bin_smoothing=0", "policy.decoding=autoregressive"])
    assert load_config(None, ["policy.head=l1", "sft.bin_smoothing=0"]).policy.discrete is False
