"""Checkpoints written as published: bit-exact round trips, and the published model and the library peft load them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.policies.openvla_reference import OPENVLA_CODE, STATISTICS, ReferenceOpenVLA, twin, write_folder
from tests.policies.openvla_twins import FINE_TUNE, LAYOUTS, adapters
from vla_rl.commands.cli import main
from vla_rl.core.actions import end_effector
from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.build import build_policy
from vla_rl.policies.openvla_oft.checkpoint import load_policy, save_policy
from vla_rl.policies.openvla_oft.config import LoraConfig, OpenVLAOFTConfig
from vla_rl.policies.openvla_oft.hf_folder import open_published
from vla_rl.policies.openvla_oft.hf_reader import load_published
from vla_rl.policies.openvla_oft.hf_writer import write_published
from vla_rl.policies.openvla_oft.lora import merged_state
from vla_rl.policies.openvla_oft.model import OpenVLAOFT

SPEC = EnvSpec("fake", ("main",), 56, 0, end_effector(), 12, ("pick up the bowl", "push it"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("hub") / "openvla-7b", twin(), shards=3, code=OPENVLA_CODE)


def build(folder: Path, **settings: Any) -> OpenVLAOFT:
    return build_policy(OpenVLAOFTConfig(checkpoint=str(folder), chunk_size=2, **settings), SPEC, seed=3).eval()


def load(folder: Path) -> OpenVLAOFT:
    policy = load_published(open_published(folder), views=1, chunk_size=2, suite="libero_spatial").eval()
    policy.set_instructions(SPEC.instructions)
    return policy


def act(policy: OpenVLAOFT) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (2, 1, 56, 56, 3), dtype=torch.uint8, generator=generator)
    proprio = torch.rand(2, policy.architecture.proprio_dim, generator=generator) - 0.5
    uniforms = torch.rand(2, 2, 7, generator=generator)
    rows, greedy = torch.arange(2), torch.tensor([True, False])
    seen = PolicyInput(images, proprio, rows, torch.tensor([0.0, 0.5]))
    chosen = policy.act(seen, {"uniforms": uniforms}, greedy, 1.0)
    return *chosen.record.values(), chosen.logprobs, chosen.values


def assert_acts_alike(policy: OpenVLAOFT, other: OpenVLAOFT) -> None:
    """Up to the last digits of the values: torch adds in another order where equal weights lie at another alignment."""
    for found, expected in zip(act(policy), act(other), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def train_a_little(policy: OpenVLAOFT) -> None:
    """Change every weight, the position of DINOv2's class token included."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in policy.parameters():
            change = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.add_(0.05 * parameter.std(correction=0) * change + (0.01 if parameter.ndim == 3 else 0.0))


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [n for n in ours if ours[n].dtype != theirs[n].dtype or not torch.equal(ours[n], theirs[n])] == []


def export(*arguments: str | Path) -> int:
    return main(["export", *map(str, arguments)])


def published(layout: str, folder: Path, dtype: torch.dtype) -> Path:
    """A twin whose weights are all of one dtype."""
    for file in LAYOUTS[layout](folder, 1).glob("*.safetensors"):
        save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return folder


def contents(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Tensors by file: without a value head, the step in a file's name, and the prefix of a distributed run."""
    return {
        file.stem.partition("--")[0]: {
            key.removeprefix("module."): tensor for key, tensor in load_file(file).items() if "value_head" not in key
        }
        for file in folder.glob("*.safetensors")
    }


def value_head(folder: Path) -> dict[str, Tensor]:
    """By the names of RL4VLA; empty without one."""
    layers = {"mlp.0": "head_l1", "mlp.2": "head_l2", "mlp.4": "head_l3"}
    return {
        re.sub(r"mlp\.\d", lambda found: layers[found[0]], key): tensor
        for file in folder.glob("*.safetensors")
        for key, tensor in load_file(file).items()
        if key.startswith("value_head.")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["openvla", "openvla-oft", "openvla-oft-l1", "simplevla-rl", "rl4vla", "rlinf"])
def test_round_trip_is_bit_exact(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    """File for file, but for a value head: ours, with more inputs, is a file of its own, and the shards lose theirs."""
    source, written = published(layout, tmp_path / "source", dtype), tmp_path / "written"
    first = load(source)
    write_published(first, open_published(source), written)
    theirs, ours = contents(source), contents(written)
    assert ours.keys() - {"value_head", "action_noise"} == theirs.keys()
    for file in theirs:
        assert_equal(ours[file], theirs[file])
    head = value_head(source)
    assert bool(head) == (layout in ("rl4vla", "rlinf"))
    assert_equal({name: value_head(written)[name] for name in head}, head)
    same = {path.name for path in source.iterdir() if path.suffix in (".json", ".py")}
    for name in same - {"config.json", "dataset_statistics.json", "model.safetensors.index.json"}:
        assert (written / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((written / "config.json").read_text())
    assert config.pop("torch_dtype") == str(dtype).removeprefix("torch.")
    assert config == {k: v for k, v in json.loads((source / "config.json").read_text()).items() if k != "torch_dtype"}
    found = json.loads((written / "dataset_statistics.json").read_text())
    assert found[next(iter(found))]["action"] == STATISTICS["action"]
    if (source / "model.safetensors.index.json").exists():
        shards = {file: tensors for file, tensors in ours.items() if file.startswith("model-")}
        assert len(shards) > 1
        assert json.loads((written / "model.safetensors.index.json").read_text()) == {
            "metadata": {"total_size": sum(t.nbytes for tensors in shards.values() for t in tensors.values())},
            "weight_map": {name: f"{file}.safetensors" for file, tensors in shards.items() for name in tensors},
        }
    second = load(written)
    assert_equal(second.state_dict(), first.state_dict())  # the value head, too, which most sources lack
    assert second.architecture == first.architecture
    assert_acts_alike(second, first)
    assert len({path.stat().st_mode for path in written.iterdir() if path.suffix != ".py"}) == 1


def test_the_published_model_loads_what_training_made(base: Path, tmp_path: Path) -> None:
    """All names, none besides; the same logits; blocks that we do not build are the source's."""
    policy = load(base)
    train_a_little(policy)
    assert policy.dino.embeddings.position_embeddings[:, 0].abs().max() > 0.001
    write_published(policy, open_published(base), tmp_path / "written")
    weights = {}
    for file in (tmp_path / "written").glob("model-*.safetensors"):
        weights |= load_file(file)
    model = twin(seed=9)
    model.load_state_dict(weights)
    last = "vision_backbone.featurizer.blocks.2.mlp.fc1.weight"
    assert torch.equal(weights[last], twin().state_dict()[last])
    pixels = torch.randn(2, 3, 56, 56)
    with torch.no_grad():
        difference = model.vision_backbone.featurizer(pixels) - policy.dino(pixels).last_hidden_state[:, 5:]
        assert difference.abs().max() < 1e-5
    again = load(tmp_path / "written")
    assert_acts_alike(again, policy)


def test_proprioception_and_new_statistics(base: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "oft", twin(), statistics=FINE_TUNE)
    shapes = {"fc1.weight": (64, 8), "fc1.bias": (64,), "fc2.weight": (64, 64), "fc2.bias": (64,)}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "proprio_projector.safetensors")
    policy = load(folder)
    train_a_little(policy)
    write_published(policy, open_published(folder), tmp_path / "written")
    again = load(tmp_path / "written")
    assert again.proprio_bounds == policy.proprio_bounds
    assert_acts_alike(again, policy)
    with pytest.raises(UserError, match="has no statistics equal to the policy's; name new ones with --unnorm-key"):
        write_published(policy, open_published(base), tmp_path / "elsewhere")
    write_published(policy, open_published(base), tmp_path / "named", unnorm_key="my_data")
    entry = json.loads((tmp_path / "named" / "dataset_statistics.json").read_text())
    assert list(entry) == ["my_data"]
    assert entry["my_data"]["proprio"]["q99"] == [0.75] * 8


def test_a_source_of_another_size(base: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 704}
    other = ReferenceOpenVLA(num_attention_heads=4, pad_token_id=640, **settings)
    folder = write_folder(tmp_path / "other", other)
    with pytest.raises(UserError, match="another architecture than the policy's"):
        write_published(load(folder), open_published(base), tmp_path / "written")


def test_a_written_checkpoint_is_read_as_it_was_trained(base: Path, tmp_path: Path) -> None:
    """OpenVLA's weights, trained as OpenVLA-OFT: the folder's code says otherwise, so config.json says it."""
    chosen = {"decoding": "parallel", "stop_token": False, "jpeg": False}
    policy = load_published(open_published(base), views=1, chunk_size=2, variant=chosen)
    for source, output in ((base, tmp_path / "first"), (tmp_path / "first", tmp_path / "second")):
        write_published(policy, open_published(source), output)
        assert json.loads((output / "config.json").read_text())["vla_rl"] == chosen
        assert load(output).architecture == policy.architecture
    write_published(load(base), open_published(tmp_path / "first"), tmp_path / "third")
    assert "vla_rl" not in json.loads((tmp_path / "third" / "config.json").read_text())


# --- adapters ---


@pytest.fixture(scope="module")
def adapted(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Adapters that peft has made and saved, for the layers of RL4VLA, and the weights into which peft merges them."""
    folder = tmp_path_factory.mktemp("runs") / "adapters"
    return folder, adapters(folder, base)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_adapters_of_peft_are_merged(base: Path, adapted: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """Also those of the convolution, of fused query, key and value, and of layers that our model leaves out."""
    folder, merged = adapted
    keys = load_file(folder / "adapter_model.safetensors")
    layers = "featurizer.patch_embed.proj", "featurizer.blocks.0.attn.qkv", "fused_featurizer.attn_pool.kv"
    assert all(f"base_model.model.vision_backbone.{layer}.lora_A.weight" in keys for layer in layers)
    assert "base_model.model.language_model.lm_head.base_layer.weight" in keys  # peft adds it
    model = twin()
    model.load_state_dict(merged)
    expected = load(write_folder(tmp_path / "merged", model)).state_dict()
    before, found = load(base).state_dict(), load(folder).state_dict()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name
        if tensor.ndim in (2, 4) and "embed_tokens" not in name and "value" not in name and "position" not in name:
            assert not torch.allclose(before[name], tensor, atol=1e-4), name


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"use_dora": True}, r"use_dora=True, supported: False"),
        ({"base_model_name_or_path": None}, r"base_model_name_or_path=None; set it to the folder"),
        (
            {"base_model_name_or_path": "/nowhere"},
            r"base_model_name_or_path: checkpoint folder /nowhere does not exist",
        ),
    ],
)
def test_adapters_that_cannot_be_merged(
    adapted: tuple[Path, dict[str, Tensor]], tmp_path: Path, edit: dict[str, Any], message: str
) -> None:
    for path in adapted[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | edit))
    with pytest.raises(UserError, match=message):
        open_published(tmp_path)


def test_adapters_of_an_unknown_layer(adapted: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    for path in adapted[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    file = tmp_path / "adapter_model.safetensors"
    more = {
        f"base_model.model.language_model.model.layers.7.mlp.up_proj.lora_{m}.weight": torch.zeros(4, 4) for m in "AB"
    }
    save_file(load_file(file) | more, file)
    with pytest.raises(
        UserError, match=r"adapter of language_model\.model\.layers\.7\.mlp\.up_proj\.weight is of an unk"
    ):
        load(tmp_path)
    save_file({**load_file(file), "base_model.model.projector.fc1.bias": torch.zeros(4)}, file)
    with pytest.raises(UserError, match=r"1 tensors are not low-rank matrices, such as base_model\.model\.projector"):
        load(tmp_path)


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[OpenVLAOFT, Path]:
    """A policy with this project's adapters on a published checkpoint, as a run saves it."""
    policy = build(base, lora=LoraConfig(rank=4, alpha=8))
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in policy.trained_parameters().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    folder = tmp_path_factory.mktemp("run") / "checkpoints" / "000001" / "policy"
    save_policy(policy, folder, {})
    return policy, folder


def test_peft_loads_exported_adapters(trained: tuple[OpenVLAOFT, Path], base: Path, tmp_path: Path) -> None:
    policy, checkpoint = trained
    output = tmp_path / "adapters"
    assert export(checkpoint, "--format", "lora", "--source", base, "--output", output) == 0
    model = peft.PeftModel.from_pretrained(twin(), str(output)).merge_and_unload()  # type: ignore[arg-type]
    by_peft = load(write_folder(tmp_path / "merged", model)).state_dict()
    by_us = load(output).state_dict()
    for name, tensor in merged_state(policy).items():
        assert torch.allclose(by_us[name], tensor, atol=1e-6), name
        if not name.startswith("value_head."):
            assert torch.allclose(by_peft[name], tensor, atol=1e-6), name
        else:
            assert torch.equal(by_us[name], tensor), name
    assert not torch.allclose(by_us["lm_head.weight"], load(base).lm_head.weight, atol=1e-3)


def test_adapters_of_another_base_are_not_written(
    trained: tuple[OpenVLAOFT, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_folder(tmp_path / "other", twin(seed=9))
    assert export(trained[1], "--format", "lora", "--source", other, "--output", tmp_path / "new") == 2
    assert "other is not the checkpoint that the adapters were trained on" in capsys.readouterr().err


# --- the command ---


def test_a_run_exports_merged_weights_with_its_own_source(
    trained: tuple[OpenVLAOFT, Path], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, checkpoint = trained
    run = checkpoint.parents[2]
    (run / "config.yaml").write_text(f"env: tabletop\npolicy: {{checkpoint: {base}}}\n")
    for number, target in enumerate((run, checkpoint.parent, checkpoint)):
        output = tmp_path / str(number)
        assert export(target, "--format", "openvla-oft", "--output", output) == 0
        assert_equal(load(output).state_dict(), merged_state(policy))
    assert f"-> {output} (openvla-oft)" in capsys.readouterr().out
    (run / "config.yaml").unlink()


def test_a_published_checkpoint_becomes_one_of_our_format(base: Path, tmp_path: Path) -> None:
    assert export(base, "--format", "native", "--output", tmp_path / "ours", "--chunk-size", "2") == 0
    ours, theirs = load_policy(tmp_path / "ours").eval(), load(base)
    assert ours.architecture == theirs.architecture
    trunk = {name: tensor for name, tensor in theirs.state_dict().items() if not name.startswith("value_head.")}
    assert_equal({name: ours.state_dict()[name] for name in trunk}, trunk)
    ours.set_instructions(SPEC.instructions)
    assert torch.equal(act(ours)[0], act(theirs)[0])


def test_adapters_are_merged_by_the_command(adapted: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    assert export(adapted[0], "--format", "openvla", "--output", tmp_path / "merged", "--chunk-size", "2") == 0
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert_equal(load(tmp_path / "merged").state_dict(), load(adapted[0]).state_dict())


def test_what_the_command_refuses(
    trained: tuple[OpenVLAOFT, Path], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, checkpoint = trained
    assert export(checkpoint, "--format", "openvla-oft", "--output", tmp_path / "new") == 2
    assert "name the published checkpoint that training began with: --source FOLDER" in capsys.readouterr().err
    assert export(checkpoint, "--format", "openvla-oft", "--output", tmp_path, "--source", base) == 2
    assert f"the output {tmp_path} exists" in capsys.readouterr().err
    assert export(base, "--format", "lora", "--output", tmp_path / "new") == 2
    assert "adapters.safetensors is missing: all weights were trained" in capsys.readouterr().err
    assert export(base, "--format", "openvla", "--output", tmp_path / "new", "--views", "2") == 2
    assert "OpenVLA has one image and no proprioception, the policy has views=2" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
