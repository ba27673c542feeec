"""Checkpoints: bit-exact round trips, and one clear error for each way in which a folder can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.policies.policy_helpers import INSTRUCTIONS, inputs, make, nano, rate
from vla_rl.policies.base.checkpoint_folder import CheckpointError
from vla_rl.policies.openvla_oft.checkpoint import load_metadata, load_policy, save_policy

METADATA = {"data": "expert, 90 episodes", "assets": "placeholder", "command": ["vla-rl", "sft"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_policy(make(nano()), tmp_path / "policy", METADATA)
    return tmp_path / "policy"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    policy = make(nano(views=2)).to(dtype)
    save_policy(policy, tmp_path / "a" / "policy", METADATA)
    loaded = load_policy(tmp_path / "a" / "policy").eval()
    assert loaded.architecture == policy.architecture
    assert loaded.codec == policy.codec
    assert loaded.proprio_bounds == policy.proprio_bounds
    for (name, ours), (other_name, theirs) in zip(
        policy.state_dict().items(), loaded.state_dict().items(), strict=True
    ):
        assert name == other_name
        assert theirs.dtype == dtype
        assert torch.equal(ours, theirs), name
    loaded.set_instructions(INSTRUCTIONS)
    with torch.no_grad():
        ours, theirs = (rate(p, inputs(policy.architecture)) for p in (policy, loaded))
    assert torch.equal(ours.entropy, theirs.entropy)
    assert torch.equal(ours.values, theirs.values)
    assert load_metadata(tmp_path / "a" / "policy") == METADATA


def test_loaded_weights_can_be_trained(folder: Path) -> None:
    policy = load_policy(folder)
    policy.set_instructions(INSTRUCTIONS)
    rate(policy, inputs(policy.architecture)).logprobs.sum().backward()
    assert all(p.requires_grad for p in policy.parameters())
    assert all(p.grad is not None for p in policy.trunk_parameters())


def test_saving_replaces_the_folder_and_leaves_nothing_else(folder: Path) -> None:
    other = make(nano(), seed=7)
    save_policy(other, folder, {"run": 2})
    assert torch.equal(load_policy(folder).lm_head.weight, other.lm_head.weight)
    assert load_metadata(folder) == {"run": 2}
    assert [path.name for path in folder.parent.iterdir()] == ["policy"]
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        save_policy(other, folder, {"tensor": torch.zeros(1)})
    assert load_metadata(folder) == {"run": 2}, "a failed save must not touch the previous checkpoint"


def test_all_files_have_the_same_permissions(folder: Path) -> None:
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_a_failed_save_keeps_the_previous_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("vla_rl.policies.base.checkpoint_folder.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_policy(make(nano(), seed=7), folder, {"run": 2})
    assert load_metadata(folder) == METADATA
    assert [path.name for path in folder.parent.iterdir()] == ["policy"]


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"folder .*nowhere does not exist"):
        load_policy(tmp_path / "nowhere")
    assert issubclass(CheckpointError, ValueError)


@pytest.mark.parametrize("name", ["model.safetensors", "architecture.json", "tokenizer.json", "statistics.json"])
def test_a_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load_policy(folder)


@pytest.mark.parametrize("name", ["architecture.json", "tokenizer.json", "statistics.json"])
def test_a_file_that_is_not_json(folder: Path, name: str) -> None:
    (folder / name).write_text("{ truncated")
    with pytest.raises(CheckpointError, match=rf"{name}.*not JSON"):
        load_policy(folder)


def test_an_unknown_format_version(folder: Path) -> None:
    path = folder / "architecture.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 9}))
    with pytest.raises(CheckpointError, match="format_version=9, this program reads 1"):
        load_policy(folder)


def test_a_damaged_architecture_or_statistics(folder: Path) -> None:
    path = folder / "architecture.json"
    good = path.read_text()
    content = json.loads(good)
    content["architecture"]["dino"]["heads"] = 5
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"architecture\.dino: width=32 is not a multiple of heads=5"):
        load_policy(folder)
    path.write_text(good)
    (folder / "statistics.json").write_text('{"action": {"q01": [0]}}')
    with pytest.raises(CheckpointError, match=r"statistics.json: bounds: expected the keys"):
        load_policy(folder)
    (folder / "statistics.json").write_text('{"action": {"q01": [0], "q99": [1], "mask": [true]}}')
    with pytest.raises(CheckpointError, match="action statistics have 1 dimensions, action_dim=7"):
        load_policy(folder)


def test_tensors_of_other_shapes_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["projector.fc1.weight"] = torch.zeros(3, 3)
    tensors["foreign"] = torch.zeros(1)
    del tensors["value_head.0.bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"value_head\.0\.bias is missing") as caught:
        load_policy(folder)
    assert "foreign is unknown" in str(caught.value)
    assert "projector.fc1.weight is [3, 3], expected [64, 80]" in str(caught.value)


@pytest.mark.parametrize("kept", [4, 1000, -8])
def test_truncated_weights(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        load_policy(folder)
