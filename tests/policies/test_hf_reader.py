"""Checkpoints as published: every tensor finds its place, and the policy computes what the published model computes."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from tests import ROOT
from tests.policies.openvla_reference import (
    OFT_CODE,
    OPENVLA_CODE,
    STATISTICS,
    ReferenceOpenVLA,
    config_json,
    llama_tokenizer,
    twin,
    write_folder,
)
from tests.policies.openvla_twins import adapters, film_towers, proprio_projector, value_head
from tests.policies.policy_helpers import rate
from vla_rl.core.actions import end_effector
from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.build import build_policy, check_policy
from vla_rl.policies.openvla_oft import hf_architecture
from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds
from vla_rl.policies.openvla_oft.architecture import openvla_7b
from vla_rl.policies.openvla_oft.config import OpenVLAOFTConfig
from vla_rl.policies.openvla_oft.hf_architecture import read_architecture
from vla_rl.policies.openvla_oft.hf_files import Stored
from vla_rl.policies.openvla_oft.hf_folder import PublishedFolder, is_published, open_published
from vla_rl.policies.openvla_oft.hf_names import published_shapes, unused_names
from vla_rl.policies.openvla_oft.hf_reader import load_published
from vla_rl.policies.openvla_oft.hf_statistics import choose_unnorm_key
from vla_rl.policies.openvla_oft.hf_variant import read_variant
from vla_rl.policies.openvla_oft.hf_weights import to_ours
from vla_rl.policies.openvla_oft.model import OpenVLAOFT
from vla_rl.policies.openvla_oft.prompt import PromptTokenizer, build_tiny_tokenizer

TASK = "Pick up the Bowl"
SPEC = EnvSpec("fake", ("main",), 56, 0, end_effector(), 12, (TASK,))
CLOSE = 1e-5


@pytest.fixture(scope="module")
def model() -> ReferenceOpenVLA:
    return twin()


@pytest.fixture(scope="module")
def base(model: ReferenceOpenVLA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """openvla-7b's twin: three files and their index."""
    return write_folder(tmp_path_factory.mktemp("hub") / "openvla-7b", model, shards=3, code=OPENVLA_CODE)


def load(folder: Path, **settings: object) -> OpenVLAOFT:
    settings = {"views": 1, "chunk_size": 2, "variant": {"center_crop": False, "jpeg": False}} | settings
    policy = load_published(open_published(folder), **settings).eval()
    policy.set_instructions([TASK])
    return policy


def logits(policy: OpenVLAOFT, images: Tensor) -> Tensor:
    """[N, K * A, 256] of the first task, at temperature 1."""
    with torch.no_grad():
        return policy.distribution(seen(policy, images), 1.0)[0].flatten(1, 2)


def seen(policy: OpenVLAOFT, images: Tensor) -> PolicyInput:
    rows = len(images)
    proprio = torch.zeros(rows, policy.architecture.proprio_dim)
    return PolicyInput(images, proprio, torch.zeros(rows).long(), torch.linspace(0, 1, rows))


def pictures(views: int = 1) -> Tensor:
    return torch.randint(0, 256, (3, views, 56, 56, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def changed(folder: Path, copy: Path, edit: dict[str, Tensor | None], file: str = "model.safetensors") -> Path:
    """A copy of a folder with tensors replaced, added, or removed (None)."""
    copy.mkdir()
    for path in folder.iterdir():
        if path.name != file:
            (copy / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / file) | edit
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, copy / file)
    return copy


@pytest.fixture(scope="module")
def single(model: ReferenceOpenVLA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in one file, with the statistics of a fine-tune: OpenVLA-OFT with discrete tokens."""
    statistics = {"libero_spatial_no_noops": STATISTICS}
    return write_folder(tmp_path_factory.mktemp("hub") / "oft", model, statistics=statistics)


def test_towers_are_timms(model: ReferenceOpenVLA, base: Path) -> None:
    policy = load(base)
    pixels = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(2))
    backbone = model.vision_backbone
    with torch.no_grad():
        dino, siglip = policy.dino(pixels).last_hidden_state[:, 5:], policy.siglip(pixels).last_hidden_state
        expected = backbone.featurizer(pixels), backbone.fused_featurizer(pixels)
    for ours, theirs in zip((dino, siglip), expected, strict=True):
        assert theirs.std() > 0.3
        assert (ours - theirs).abs().max() < CLOSE


def test_the_whole_policy_is_the_published_model(model: ReferenceOpenVLA, single: Path) -> None:
    """Towers, projector, prompt, LlamaForCausalLM with the same mask, the head's rows, and their order."""
    policy, images = load(single), pictures()
    assert policy.architecture.dino_mean == (0.484375, 0.455078125, 0.40625)  # preprocessor_config.json
    prompt = llama_tokenizer().encode(f"In: What action should the robot take to {TASK.lower()}?\nOut:").ids
    final = llama_tokenizer().token_to_id("\u2581")
    assert prompt[0] == 1
    assert prompt[-1] != final
    with torch.no_grad():
        patches = model.patches(images[:, 0], policy.architecture.dino_mean, policy.architecture.dino_std)
        expected = model.parallel_logits(patches, [*prompt, final], 14)
    assert expected.std() > 0.5
    assert (logits(policy, images) - expected).abs().max() < CLOSE


def test_prompt_ids(base: Path) -> None:
    """The prompt of RL4VLA, which ends in a space, has the same ids as OpenVLA's with the final token appended."""
    policy, tokenizer = load(base), llama_tokenizer()
    question = f"In: What action should the robot take to {TASK.lower()}?\nOut:"
    assert policy.tokenizer.encode(TASK) == [*tokenizer.encode(question).ids, policy.architecture.final_id]
    assert policy.tokenizer.encode(TASK) == tokenizer.encode(f"{question} ").ids


def test_one_file_or_several(base: Path, single: Path) -> None:
    ours, theirs = load(base).state_dict(), load(single).state_dict()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_views_share_the_weights(base: Path) -> None:
    """One policy with two views: each is encoded as the only view of another policy is."""
    two, one, images = load(base, views=2), load(base), pictures(2)
    with torch.no_grad():
        alone = [one._patch_tokens(images[:, view : view + 1], {}) for view in (0, 1)]
        assert torch.allclose(two._patch_tokens(images, {}), torch.cat(alone, 1), atol=1e-6)


# --- openvla-7b itself, without its weights ---


@pytest.fixture(scope="module")
def published() -> PublishedFolder:
    """Names and shapes of openvla-7b from the published definition, on the meta device, and its config.json."""
    with torch.device("meta"):
        model = ReferenceOpenVLA((1024, 24, 4096), (1152, 27, 4304), 224, vocab_size=32_064, pad_token_id=32_000)
    weights = {
        name: Stored(Path("model.safetensors"), name, tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
    }
    return PublishedFolder(Path("openvla-7b"), config_json(model, {}), {}, weights)


def test_all_tensors_of_the_published_7b_have_a_place(published: PublishedFolder) -> None:
    shapes = {name: stored.shape for name, stored in published.weights.items()}
    arch = openvla_7b(proprio_dim=0)
    assert shapes == published_shapes(arch)
    assert len(shapes) == 982
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 7_541_237_184  # as the model hub counts
    with torch.device("meta"):
        codec = ActionCodec(Bounds((-1.0,) * 7, (1.0,) * 7, (True,) * 7))
        policy = OpenVLAOFT(arch, codec, PromptTokenizer(build_tiny_tokenizer([], 99), arch))
    state = to_ours(arch, lambda name: torch.empty(shapes[name], device="meta"))
    ours = {name: tensor.shape for name, tensor in policy.state_dict().items() if not name.startswith("value_head.")}
    assert {name: tensor.shape for name, tensor in state.items()} == ours
    unused = {name for name in unused_names(arch) if not name.startswith("vision_backbone.fused_featurizer.attn_pool.")}
    assert {name.split(".")[2] + name.split(".")[3] for name in unused if ".blocks." in name} == {
        "blocks23",
        "blocks26",
    }
    assert sum(".norm." in name and ".blocks." not in name for name in unused) == 4


@pytest.mark.parametrize(
    ("limit", "listed"),
    [(7e9, [6.95e9, 6.97e9, 1.16e9]), (5e9, [4.93e9, 4.95e9, 4.95e9, 263e6])],
    ids=["openvla-7b", "fine-tunes on LIBERO"],
)
def test_files_have_the_sizes_that_the_model_hub_lists(limit: float, listed: list[float]) -> None:
    """Of the published folders, which nobody could download here: shapes and order of all tensors decide where a file
    ends, and the length of all names how long the index is (94.8 kB).
    """
    nbytes = {name: 2 * math.prod(shape) for name, shape in published_shapes(openvla_7b(proprio_dim=0)).items()}
    files = [0]
    for size in nbytes.values():  # as save_pretrained divides them
        if files[-1] + size > limit:
            files.append(0)
        files[-1] += size
    assert [float(f"{size:.3g}") for size in files] == listed
    places = dict.fromkeys(nbytes, "model-00001-of-00003.safetensors")
    index = {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": places}
    assert len(json.dumps(index, indent=2, sort_keys=True) + "\n") == pytest.approx(94_800, abs=50)


def test_the_published_config_is_the_7b_preset(published: PublishedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**published.config, "text_config": {"model_type": "llama", "vocab_size": 32_064, "pad_token_id": 32_000}}
    config.pop("image_sizes")
    config.pop("timm_model_ids")
    monkeypatch.setattr(hf_architecture, "_token_ids", lambda _: {"bos_id": 1, "eos_id": 2, "final_id": 29_871})
    variant = read_variant(published, {"decoding": "autoregressive"})
    found = read_architecture(replace(published, config=config), views=1, chunk_size=1, action_dim=7, variant=variant)
    images = {"jpeg": True, "resize": "lanczos", "crop_rounding": "truncate"}
    expected = replace(openvla_7b(chunk_size=1), name="openvla", decoding="autoregressive", stop_token=False)
    assert found == replace(expected, **images)


def test_a_tower_that_lost_a_block_is_not_taken_for_a_smaller_one(
    published: PublishedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second-to-last block would then be another one."""
    monkeypatch.setattr(hf_architecture, "_token_ids", lambda _: {"bos_id": 1, "eos_id": 2, "final_id": 29_871})
    lost = "vision_backbone.featurizer.blocks.23."
    weights = {name: stored for name, stored in published.weights.items() if not name.startswith(lost)}
    with pytest.raises(UserError, match=r"blocks\.\*: 23 blocks of width 1024, expected 24"):
        read_architecture(replace(published, weights=weights), views=1, chunk_size=8, action_dim=7, variant={})


def test_defaults_are_the_librarys() -> None:
    config = LlamaConfig()
    library = config.to_dict() | {"rope_theta": config.rope_parameters["rope_theta"]}
    assert {key: library[key] for key in hf_architecture._LLAMA_DEFAULTS} == hf_architecture._LLAMA_DEFAULTS


# --- what is wrong is said, before torch is loaded ---


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"projector.fc2.bias": None}, r"projector\.fc2\.bias is missing"),
        ({"vision_backbone.featurizer.blocks.2.norm1.bias": None}, r"blocks\.2\.norm1\.bias is missing"),
        ({"language_model.model.layers.0.mlp.gate_proj.bias": torch.zeros(96)}, r"gate_proj\.bias is unknown"),
        ({"projector.fc3.bias": torch.zeros(65)}, r"projector\.fc3\.bias is \[65\], expected \[64\]"),
        ({"value_head.head_l1.weight": torch.zeros(8, 64)}, r"value_head\.0\.bias is missing"),
        ({"vision_backbone.featurizer.reg_token": None}, r"not the weights of an OpenVLA model"),
    ],
)
def test_every_tensor_is_known_and_there(
    single: Path, tmp_path: Path, edit: dict[str, Tensor | None], message: str
) -> None:
    config = OpenVLAOFTConfig(checkpoint=str(changed(single, tmp_path / "copy", edit)), chunk_size=2)
    with pytest.raises(UserError, match=message):
        check_policy(config, SPEC)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            {"timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "other"]},
            r"timm_model_ids=.*'other'.*supported",
        ),
        ({"image_sizes": [60, 60]}, r"image_size=60 is not a multiple of patch_size=14"),
        ({"text_config": {"num_key_value_heads": 2}}, r"text_config\.num_key_value_heads=2; supported: 4"),
        ({"text_config": {"rope_scaling": {"type": "linear"}}}, r"text_config\.rope_scaling"),
        ({"n_action_bins": 128}, r"n_action_bins=128; supported: 256"),
        ({"norm_stats": {}}, r"no statistics"),
        (
            {"norm_stats": {"bridge": {"action": {"q01": [0.0]}}}},
            r"statistics of bridge\.action: need lists q01 and q99",
        ),
    ],
)
def test_unsupported_configs(base: Path, tmp_path: Path, edit: dict, message: str) -> None:
    content = json.loads((base / "config.json").read_text())
    edit = {key: content[key] | value if key == "text_config" else value for key, value in edit.items()}
    for path in base.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(content | edit))
    with pytest.raises(UserError, match=message):
        check_policy(OpenVLAOFTConfig(checkpoint=str(tmp_path), chunk_size=2), SPEC)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("noisy_action_projector--150000_checkpoint.pt", "noisy_action_projector: of a head for diffusion"),
        ("depth_encoder--150000_checkpoint.pt", "a part that is not implemented"),
    ],
)
def test_other_heads_are_refused(single: Path, tmp_path: Path, name: str, message: str) -> None:
    folder = changed(single, tmp_path / "copy", {})
    (folder / name).write_bytes(b"never read")
    with pytest.raises(UserError, match=message):
        open_published(folder)


def test_towers_that_the_prompt_modulates_must_be_whole(single: Path, base: Path, tmp_path: Path) -> None:
    folder, towers = changed(single, tmp_path / "copy", {}), film_towers()
    file = folder / "vision_backbone--5_checkpoint.safetensors"
    lacking = "vision_backbone.featurizer.blocks.1.scale.weight"
    save_file({name: tensor for name, tensor in towers.items() if name != lacking}, file)
    with pytest.raises(UserError, match=r"featurizer\.blocks\.1\.scale\.weight is missing"):
        load(folder)
    half = "vision_backbone.featurizer.blocks.0.block.mlp.fc1.lora_B.default.weight"
    save_file({name: tensor for name, tensor in towers.items() if name != half}, file)
    with pytest.raises(UserError, match=r"an adapter of .*blocks\.0\.mlp\.fc1\.weight has one of its two matrices"):
        load(folder)
    save_file(towers, file)
    assert load(folder).architecture.film
    with pytest.raises(UserError, match="film=true is OpenVLA-OFT's: decoding='autoregressive'"):
        load(folder, variant={"decoding": "autoregressive"})
    adapters(tmp_path / "adapters", folder)
    with pytest.raises(UserError, match=r"copy has adapters in its vision backbone; merge those first"):
        open_published(tmp_path / "adapters")


def test_damaged_and_pickled_files(single: Path, tmp_path: Path) -> None:
    folder = changed(single, tmp_path / "copy", {})
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(UserError, match="damaged or truncated"):
        open_published(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"neither model\.safetensors nor .*, or convert its pytorch_model\*\.bin"):
        open_published(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(UserError, match=r"model-00001-of-00002\.safetensors of .* missing"):
        open_published(folder)


def test_the_check_loads_no_torch(single: Path) -> None:
    code = (
        "import sys; from vla_rl.core.records import EnvSpec; from vla_rl.policies.build import check_policy;"
        "from vla_rl.core.actions import end_effector;"
        "from vla_rl.policies.openvla_oft.config import OpenVLAOFTConfig;"
        f"check_policy(OpenVLAOFTConfig(checkpoint={str(single)!r}, chunk_size=2),"
        " EnvSpec('fake', ('main',), 56, 0, end_effector(), 12, ('do it',))); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_model_hub(monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    """An id is one only where no folder has that name; without a network, one error says what to do."""
    assert is_published("someone/some-model")
    assert not is_published("checkpoints/nowhere")  # a folder of this repository
    assert not is_published("/nowhere/at-all")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^someone/some-model: no such folder, .* name its folder$"):
        open_published("someone/some-model")
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(base))
    assert open_published("openvla/openvla-7b").path == base
    assert asked == ["openvla/openvla-7b"]


# --- in a run ---


def test_a_run_builds_the_policy(single: Path) -> None:
    config = OpenVLAOFTConfig(checkpoint=str(single), chunk_size=2)
    policies = [build_policy(config, SPEC, seed=3).eval() for _ in range(2)]
    states = [policy.state_dict() for policy in policies]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0]), "every process has the same policy"
    assert policies[0].architecture.center_crop
    action = STATISTICS["action"]
    assert policies[0].codec.bounds == Bounds(tuple(action["q01"]), tuple(action["q99"]), tuple(action["mask"]))
    assert policies[0].value_head[0].weight.std() > 0.01, "a new value head must not be uninitialized"
    assert not torch.equal(policies[0].value_head[0].weight, build_policy(config, SPEC, 4).value_head[0].weight)
    plain = config.model_copy(update={"center_crop": False})
    assert not build_policy(plain, SPEC, 3).architecture.center_crop
    rate(policies[0], seen(policies[0], pictures())).logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in policies[0].trunk_parameters())


def test_what_does_not_fit_the_simulator(single: Path) -> None:
    config = OpenVLAOFTConfig(checkpoint=str(single))
    with pytest.raises(UserError, match=r"made for proprio_dim=0, the run has 8 \(set env\.proprio=false\)"):
        check_policy(config, replace(SPEC, proprio_dim=8))
    with pytest.raises(UserError, match=r"policy\.unnorm_key='bridge_orig'"):
        check_policy(config.model_copy(update={"unnorm_key": "bridge_orig"}), SPEC)


def test_the_suite_chooses_the_statistics(model: ReferenceOpenVLA, tmp_path: Path) -> None:
    other = {"action": STATISTICS["action"] | {"q99": [2.0] * 7}}
    statistics = {"bridge_orig": STATISTICS, "libero_goal_no_noops": other}
    config = OpenVLAOFTConfig(checkpoint=str(write_folder(tmp_path / "several", model, statistics=statistics)))
    assert build_policy(config, replace(SPEC, suite="libero_goal"), 0).codec.bounds.q99 == (2.0,) * 7
    with pytest.raises(UserError, match="name one; found: bridge_orig, libero_goal_no_noops"):
        build_policy(config, replace(SPEC, suite="libero_object"), 0)


@pytest.mark.parametrize(
    ("wanted", "suite", "expected"),
    [
        ("bridge_orig", "libero_spatial", "bridge_orig"),
        (None, "libero_spatial", "libero_spatial_no_noops"),
        (None, "libero_goal", "libero_goal"),
        (
            None,
            "",
            "policy.unnorm_key=null: the checkpoint has statistics of 3 data sets; name one; found: bridge_orig, ",
        ),
        (
            "bridge",
            "libero_spatial",
            "policy.unnorm_key='bridge': the checkpoint has no statistics of that name; found: b",
        ),
    ],
)
def test_the_choice_of_statistics(wanted: str | None, suite: str, expected: str) -> None:
    statistics = dict.fromkeys(("bridge_orig", "libero_spatial_no_noops", "libero_goal"), STATISTICS)
    if "null" in expected or "no statistics" in expected:
        with pytest.raises(UserError) as caught:
            choose_unnorm_key(statistics, wanted, suite)
        assert str(caught.value).startswith(expected)
    else:
        assert choose_unnorm_key(statistics, wanted, suite) == expected
    assert choose_unnorm_key({"one": STATISTICS}, None, suite) == "one"


# --- variants ---


@pytest.mark.parametrize(
    ("config", "code", "decoding", "stop_token"),
    [
        ({}, OPENVLA_CODE, "autoregressive", False),
        ({}, OFT_CODE, "parallel", True),
        ({"architectures": ["OpenVLAForActionPredictionWithValueHead"]}, OFT_CODE, "autoregressive", False),
        ({"architectures": ["OpenVLAForRLActionPrediction"]}, None, "autoregressive", False),
        ({"architectures": ["OpenVLAOFTForRLActionPrediction"], "model_type": "openvla_oft"}, None, "parallel", False),
    ],
    ids=["OpenVLA", "OpenVLA-OFT", "RL4VLA", "RLinf", "RLinf, OFT"],
)
def test_the_folder_says_how_actions_are_decoded(
    model: ReferenceOpenVLA, tmp_path: Path, config: dict, code: str | None, decoding: str, stop_token: bool
) -> None:
    folder = write_folder(tmp_path / "folder", model, config=config, code=code)
    found = load(folder, variant={}).architecture
    assert (found.decoding, found.stop_token) == (decoding, stop_token)
    images = (found.jpeg, found.resize, found.center_crop, found.crop_rounding)
    assert images == (True, "lanczos", True, "truncate")
    other = load(folder, variant={"decoding": "parallel", "jpeg": False}).architecture
    assert (other.decoding, other.jpeg, other.resize) == ("parallel", False, "lanczos")
    assert other.stop_token == (stop_token or decoding == "autoregressive"), "OpenVLA-OFT's, if the folder is OpenVLA's"


def test_the_script_writes_a_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = runpy.run_path(str(ROOT / "scripts/make_openvla_twin.py"))["main"]
    arguments = ["--layout", "rlinf", "--output", str(tmp_path / "twin"), "--seed", "3"]
    monkeypatch.setattr("sys.argv", ["make_openvla_twin.py", *arguments])
    assert main() == 0
    assert not load(tmp_path / "twin").architecture.stop_token
    with pytest.raises(SystemExit):
        main()


def test_a_folder_that_does_not_say_it(model: ReferenceOpenVLA, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", model, code=None)
    config = OpenVLAOFTConfig(checkpoint=str(folder), chunk_size=2)
    with pytest.raises(
        UserError, match=r"policy\.decoding=null: nothing in .*folder says .* set policy\.decoding=auto"
    ):
        check_policy(config, SPEC)
    chosen = config.model_copy(update={"decoding": "autoregressive"})
    check_policy(chosen, SPEC)
    assert build_policy(chosen, SPEC, 0).architecture.decoding == "autoregressive"
    (folder / "config.json").write_text(json.dumps(config_json(model, {"a": STATISTICS}) | {"vla_rl": {"x": 1}}))
    with pytest.raises(UserError, match=r"config\.json: vla_rl=\{'x': 1\}; known: decoding, stop_token"):
        check_policy(chosen, SPEC)


@pytest.mark.parametrize(
    "names", [("head_l1", "head_l2", "head_l3"), ("mlp.0", "mlp.2", "mlp.4")], ids=["RL4VLA", "RLinf"]
)
def test_value_heads(single: Path, tmp_path: Path, names: tuple[str, str, str]) -> None:
    head = value_head(names)
    policy = load(changed(single, tmp_path / "copy", head))
    weights = [head[f"value_head.{name}.weight"] for name in names]
    biases = [head[f"value_head.{name}.bias"] for name in names[:2]]
    with torch.no_grad():
        output = rate(policy, seen(policy, pictures()))
        hidden = output.features
        for weight, bias in zip(weights, biases, strict=False):
            hidden = torch.nn.functional.gelu(hidden @ weight.T + bias)
        assert torch.allclose(output.values, (hidden @ weights[2].T).squeeze(-1), atol=1e-4)


def test_a_value_head_with_one_output_per_action_is_replaced(
    single: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = changed(single, tmp_path / "copy", value_head(("mlp.0", "mlp.2", "mlp.4"), outputs=8))
    assert load(folder).value_head[4].weight.shape == (1, 12)
    assert "its value head has 8 outputs, not 1" in caplog.text


def test_names_of_other_library_versions(model: ReferenceOpenVLA, single: Path, tmp_path: Path) -> None:
    """timm's own name of the layer scale; a buffer that older versions of transformers saved."""
    scales = {name: tensor for name, tensor in model.state_dict().items() if name.endswith(".scale_factor")}
    edit: dict[str, Tensor | None] = dict.fromkeys(scales)
    edit |= {name.replace("scale_factor", "gamma"): tensor for name, tensor in scales.items()}
    edit |= {"language_model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    ours = load(changed(single, tmp_path / "copy", edit)).state_dict()
    theirs = load(single).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_proprioception(single: Path, tmp_path: Path) -> None:
    """OpenVLA-OFT's projector, converted to safetensors, with the prefix of a distributed run."""
    folder = changed(single, tmp_path / "copy", {})
    tensors = proprio_projector()
    save_file(tensors, folder / "proprio_projector--150000_checkpoint.safetensors")
    policy = load(folder)
    assert policy.proprio_bounds == Bounds((-0.5,) * 8, (0.75,) * 8, (True,) * 8)
    assert policy.proprio_projector is not None
    assert torch.equal(policy.proprio_projector.fc2.weight, tensors["module.fc2.weight"])
    assert logits(policy, pictures()).shape == (3, 14, 256)
    (folder / "dataset_statistics.json").unlink()
    with pytest.raises(UserError, match=r"statistics of 'bridge_orig' have none; add q01 and q99 of proprio"):
        load(folder)
