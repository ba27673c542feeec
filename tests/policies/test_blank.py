"""vla_rl.policies.openvla_oft.blank: large policies come to be on their device, small ones stay as they were."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.learner.learner_tools import SPEC
from tests.policies.memory_tools import LiveBytes
from tests.policies.policy_helpers import CODEC, INSTRUCTIONS, few_blocks, inputs, logits, make, nano, rate
from vla_rl.core.devices.settings import set_up_torch
from vla_rl.core.ipc.frozen_weights import attach_frozen_weights, share_frozen_weights
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.build import build_policy
from vla_rl.policies.openvla_oft import checkpoint, initialize
from vla_rl.policies.openvla_oft.architecture import openvla_7b
from vla_rl.policies.openvla_oft.checkpoint import load_policy, save_policy
from vla_rl.policies.openvla_oft.config import LoraConfig, OpenVLAOFTConfig
from vla_rl.policies.openvla_oft.initialize import make_policy
from vla_rl.policies.openvla_oft.model import OpenVLAOFT
from vla_rl.policies.openvla_oft.sizes import openvla_sizes

# The second number of each of these weights, as drawn before large policies were drawn in another way.
NAMES = (
    "language_model.layers.2.mlp.up_proj.base_layer.weight",
    "language_model.layers.1.self_attn.q_proj.base_layer.weight",
    "siglip.encoder.layers.0.mlp.fc1.base_layer.weight",
    "value_head.0.weight",
    "projector.fc1.lora_A.default.weight",
)
DRAWN = {
    ("nano", 0): [-0.0098934, -0.0304967, 0.0650421, -0.0589471, 0.0116881],
    ("nano", 7): [0.0029701, 0.0010787, 0.1232944, 0.0916286, -0.2392735],
    ("tiny", 0): [-0.0345655, -0.0124833, -0.0361985, -0.0526391, -0.1904386],
    ("tiny", 7): [-0.0313405, -0.0329539, -0.0180095, -0.0287286, -0.3984638],
}


@pytest.mark.parametrize(("size", "seed"), DRAWN)
def test_small_policies_are_drawn_as_ever(size: Any, seed: int) -> None:
    """Checkpoints and results of runs depend on it."""
    policy = build_policy(OpenVLAOFTConfig(size=size, chunk_size=4, lora=LoraConfig(rank=4)), SPEC, seed)
    weights = policy.state_dict()
    assert [weights[name].flatten()[1].item() for name in NAMES] == pytest.approx(DRAWN[size, seed], abs=1e-6)


def test_a_large_policy_is_drawn_in_its_dtype() -> None:
    """Its 1.2 GiB in bfloat16, and never more than one tensor besides: no copy of it in float32."""
    arch = few_blocks(openvla_7b())
    with FakeTensorMode(), LiveBytes() as live:
        policy = make_policy(arch, INSTRUCTIONS, CODEC, dtype=torch.bfloat16)
    assert {weight.dtype for weight in policy.parameters()} == {torch.bfloat16}
    largest = max(weight.numel() for weight in policy.parameters())
    assert 0 <= live.peaks["cpu"] - 2 * openvla_sizes(arch).parameters < 4 * largest
    assert policy.language_model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_large_policy_has_seeded_numbers_of_a_sane_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialize, "_SMALL", 0)
    first, again, other = (make(nano(), seed=seed) for seed in (1, 1, 2))
    states = [policy.state_dict() for policy in (first, again, other)]
    assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items())
    assert not torch.equal(states[0]["lm_head.weight"], states[2]["lm_head.weight"])
    assert states[0]["lm_head.weight"].std().item() == pytest.approx(0.1, rel=0.1), "that of the architecture"
    assert states[0]["language_model.norm.weight"].eq(1).all()
    plain = make_policy(nano(proprio_dim=0), INSTRUCTIONS, CODEC, seed=1)
    assert states[0].keys() > plain.state_dict().keys()
    with torch.no_grad():
        found, output = logits(first, inputs(first.architecture)), rate(first, inputs(first.architecture))
    assert found.isfinite().all()
    assert found.std() > 0.1
    assert output.values.abs().max() < 1


class _Watched:
    """A checkpoint file that sees how many of its tensors are alive at one time."""

    def __init__(self, file: Any) -> None:
        self._file, self._alive, self.most = file, 0, 0

    def __enter__(self) -> _Watched:
        self._opened = self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor = self._opened.get_tensor(name)
        self._alive += 1
        self.most = max(self.most, self._alive)
        weakref.finalize(tensor, self._gone)
        return tensor

    def _gone(self) -> None:
        self._alive -= 1


def test_a_checkpoint_is_read_tensor_by_tensor_into_its_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make(nano())
    save_policy(policy, tmp_path / "policy", {})
    opened: list[_Watched] = []

    def safe_open(*arguments: Any, **settings: Any) -> _Watched:
        opened.append(_Watched(real(*arguments, **settings)))
        return opened[-1]

    real = checkpoint.safe_open
    monkeypatch.setattr(checkpoint, "safe_open", safe_open)
    loaded = load_policy(tmp_path / "policy", dtype=torch.bfloat16)
    assert opened[-1].most == 1
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, policy.state_dict()[name].bfloat16()), name
    empty = load_policy(tmp_path / "policy", "meta", torch.bfloat16)
    assert {(w.is_meta, w.dtype) for w in empty.parameters()} == {(True, torch.bfloat16)}
    assert not any(buffer.is_meta for buffer in empty.buffers())


def test_a_server_that_attaches_frozen_weights_has_none_before(tmp_path: Path) -> None:
    save_policy(build_policy(OpenVLAOFTConfig(size="nano", chunk_size=4), SPEC, 3), tmp_path / "policy", {})
    config = OpenVLAOFTConfig(checkpoint=str(tmp_path / "policy"), chunk_size=4, lora=LoraConfig(rank=4))
    learner = build_policy(config, SPEC, 0, dtype=torch.bfloat16)
    server = build_policy(config, SPEC, 0, device="meta", dtype=torch.bfloat16)
    assert all(weight.is_meta for weight in server.parameters())
    attach_frozen_weights(server, share_frozen_weights(learner, tmp_path / "frozen"))
    trained = server.trained_parameters()
    assert trained.keys() == learner.trained_parameters().keys()
    with torch.no_grad():
        for name, weight in learner.trained_parameters().items():
            trained[name].copy_(weight)  # as a weight sync does
    ours, theirs = (_logits(policy) for policy in (learner, server))
    assert torch.equal(ours, theirs)


def _logits(policy: OpenVLAOFT) -> torch.Tensor:
    images = torch.zeros(2, 1, 64, 64, 3, dtype=torch.uint8)
    with torch.no_grad():
        return logits(policy, PolicyInput(images, torch.ones(2, 3), torch.arange(2), torch.zeros(2)))


def test_gpus_multiply_float32_in_tf32() -> None:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        set_up_torch("cpu", 1)
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (1, precision)
        set_up_torch("cuda", 1)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
