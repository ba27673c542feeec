"""Checkpoints whose parts lie apart, as their projects save them: heads, adapters, value heads by ``torch.save``."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.learner.learner_tools import config as learner_config
from tests.learner.learner_tools import make_learner, parameters, random_batch
from tests.policies.openvla_reference import OPENVLA_CODE, STATISTICS, twin, write_folder
from tests.policies.openvla_twins import (
    ACTIONS,
    adapters,
    l1_head,
    openvla_oft_film,
    openvla_oft_l1,
    openvla_oft_unmerged,
    value_head,
)
from tests.policies.policy_helpers import rate
from vla_rl.commands.cli import main
from vla_rl.core.actions import end_effector
from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.build import build_policy, check_policy, keys_of_checkpoint, save_policy
from vla_rl.policies.openvla_oft.checkpoint import load_policy
from vla_rl.policies.openvla_oft.config import LoraConfig, OpenVLAOFTConfig
from vla_rl.policies.openvla_oft.hf_folder import open_published
from vla_rl.policies.openvla_oft.hf_statistics import choose_unnorm_key
from vla_rl.policies.openvla_oft.lora import merged_state
from vla_rl.policies.openvla_oft.trunk import OpenVLA

SPEC = EnvSpec("fake", ("main",), 56, 0, end_effector(), 12, ("pick up the bowl", "push it"))
OFT = dataclasses.replace(SPEC, views=("main", "wrist"), proprio_dim=8)
LORA = LoraConfig(rank=4, alpha=2)  # of ``adapters``

pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """openvla-7b's twin in bfloat16, as it is published."""
    model = twin().bfloat16()
    norm_stats = {"bridge_orig": ACTIONS, "libero_spatial": ACTIONS}
    return write_folder(tmp_path_factory.mktemp("hub") / "openvla-7b", model, norm_stats=norm_stats, code=OPENVLA_CODE)


@pytest.fixture(scope="module")
def adapted(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of RL4VLA's layers."""
    folder = tmp_path_factory.mktemp("runs") / "adapters"
    adapters(folder, base, dtype=torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def unmerged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return openvla_oft_unmerged(tmp_path_factory.mktemp("oft") / "run--150000_chkpt")


def build(folder: Path, spec: EnvSpec = SPEC, dtype: torch.dtype | None = torch.float32, **settings: Any) -> OpenVLA:
    config = OpenVLAOFTConfig(checkpoint=str(folder), chunk_size=2, unnorm_key=None, **settings)
    return build_policy(config, dataclasses.replace(spec, suite="libero_spatial"), seed=3, dtype=dtype).eval()


@torch.no_grad()
def logprobs(policy: OpenVLA) -> Tensor:
    images = torch.randint(0, 256, (2, 1, 56, 56, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return rate(policy, PolicyInput(images, torch.zeros(2, 0), torch.arange(2), torch.zeros(2))).logprobs


def assert_same(policy: OpenVLA, other: OpenVLA) -> None:
    ours, theirs = policy.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def pickled(file: Path) -> None:
    """Replace a converted part by what its project saves."""
    torch.save(load_file(file), file.with_suffix(".pt"))
    file.unlink()


# --- files of torch.save ---


@pytest.mark.parametrize("twin_of", [openvla_oft_l1, openvla_oft_film])
def test_parts_are_read_as_openvla_oft_saves_them(twin_of: Any, tmp_path: Path) -> None:
    folder = twin_of(tmp_path / "oft")
    converted = build(folder, OFT)
    parts = list(folder.glob("*--150000_checkpoint.safetensors"))
    assert len(parts) == (2 if twin_of is openvla_oft_l1 else 3)
    for file in parts:
        pickled(file)
    assert_same(build(folder, OFT), converted)
    command = ["export", str(folder), "--format", "openvla-oft", "--output", str(tmp_path / "written"), "--views", "2"]
    assert main(command) == 0
    written, expected = build(tmp_path / "written", OFT).state_dict(), converted.state_dict()
    trunk = [name for name in expected if not name.startswith("value_head.")]
    assert [name for name in trunk if not torch.allclose(written[name], expected[name], atol=1e-6)] == []


class _RunsCode:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_what_is_no_mapping_of_tensors_is_refused_and_not_run(tmp_path: Path) -> None:
    folder = openvla_oft_l1(tmp_path / "oft")
    (head,) = folder.glob("action_head--*")
    tensors, file, marker = load_file(head), head.with_suffix(".pt"), tmp_path / "code was run"
    head.unlink()
    torch.save({**tensors, "more": _RunsCode(marker)}, file)
    with pytest.raises(
        UserError, match=r"action_head--150000_checkpoint\.pt: .*weights_only=True.*rejects it.*torch\.save"
    ):
        open_published(folder)
    assert not marker.exists()
    torch.save(tensors, file)
    whole = file.read_bytes()
    for broken in (whole[:-300], b"never a pickle", b""):
        file.write_bytes(broken)
        with pytest.raises(UserError, match=r"action_head--150000_checkpoint\.pt: .*copy it again if it is damaged"):
            open_published(folder)
    for other in (list(tensors.values()), {"step": 5}):
        torch.save(other, file)
        with pytest.raises(UserError, match=r"action_head--150000_checkpoint\.pt: expected tensors by name"):
            open_published(folder)
    torch.save(tensors, file, _use_new_zipfile_serialization=False)
    assert build(folder, OFT).architecture.head == "l1"


@pytest.mark.parametrize("saved_whole", ["value_head.", "value_head.modules_to_save.default."])
def test_adapters_of_older_versions_of_peft(adapted: Path, tmp_path: Path, saved_whole: str) -> None:
    folder = shutil.copytree(adapted, tmp_path / "adapters")
    file = folder / "adapter_model.safetensors"
    head = value_head(("head_l1", "head_l2", "head_l3"))
    tensors = load_file(file) | {f"base_model.model.{name}": tensor for name, tensor in head.items()}
    save_file(tensors, file)
    expected = build(folder)
    assert torch.equal(expected.value_head[0].weight, head["value_head.head_l1.weight"])
    torch.save(
        {name.replace("value_head.", saved_whole): t for name, t in tensors.items()}, folder / "adapter_model.bin"
    )
    file.unlink()
    assert_same(build(folder), expected)


def test_rl4vlas_training_state_has_the_value_head(adapted: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(adapted, tmp_path / "adapters")
    head = {n.removeprefix("value_head."): t for n, t in value_head(("head_l1", "head_l2", "head_l3")).items()}
    parameters = [torch.nn.Parameter(tensor) for tensor in head.values()]
    optimizer = torch.optim.AdamW(parameters)
    sum(p.sum() for p in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    state = {"vh": head, "vh_optimizer": optimizer.state_dict(), "vla_optimizer": optimizer.state_dict()}
    torch.save(state, folder / "training_state.pt")
    found = build(folder).value_head.state_dict()
    expected = {"0": "head_l1", "2": "head_l2", "4": "head_l3"}
    assert all(torch.equal(found[f"{ours}.weight"], head[f"{theirs}.weight"]) for ours, theirs in expected.items())


# --- adapters ---


def test_adapters_are_merged_in_float32_and_rounded_once(base: Path, adapted: Path) -> None:
    name = "language_model.layers.0.mlp.up_proj"
    key = f"base_model.model.language_model.model.{name.removeprefix('language_model.')}"
    a, b = (load_file(adapted / "adapter_model.safetensors")[f"{key}.lora_{matrix}.weight"] for matrix in "AB")
    exact = build(base).state_dict()[f"{name}.weight"] + b @ a * 0.5
    found = build(adapted).state_dict()[f"{name}.weight"]
    assert found.dtype == torch.float32
    assert torch.allclose(found, exact, atol=1e-6)
    rounded = build(adapted, dtype=None)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded.state_dict()[f"{name}.weight"], exact.bfloat16())
    assert not torch.allclose(exact, exact.bfloat16().float(), atol=1e-4)


def test_training_goes_on_with_the_adapters_of_a_folder(base: Path, adapted: Path, tmp_path: Path) -> None:
    merged, policy = build(adapted), build(adapted, lora=LORA)
    assert torch.allclose(logprobs(policy), logprobs(merged), atol=1e-5)
    assert not torch.allclose(logprobs(build(base)), logprobs(merged), atol=1e-2)
    frozen, before = policy.state_dict(), build(base).state_dict()
    for path in policy.adapted:
        assert torch.equal(frozen[f"{path}.base_layer.weight"], before[f"{path}.weight"]), "not the base's"
    assert len(policy.adapted) > 20
    assert not torch.equal(
        frozen["dino.embeddings.patch_embeddings.projection.weight"],
        before["dino.embeddings.patch_embeddings.projection.weight"],
    ), "a convolution gets no adapter: its own is merged"
    assert {n.split(".")[-2] for n in policy.trained_parameters() if "value" not in n} == {"default"}
    assert not policy.has_reference, "the base is not what training began with"
    assert not OpenVLAOFTConfig(checkpoint=str(adapted), lora=LORA).holds_reference
    assert OpenVLAOFTConfig(checkpoint=str(base), lora=LORA).holds_reference
    assert_same(build(adapted, lora=LORA), policy)  # as a server, or a resumed run, builds it
    save_policy(OpenVLAOFTConfig(), policy, tmp_path / "ours", {})
    saved, expected = load_policy(tmp_path / "ours").state_dict(), merged.state_dict()
    assert all(torch.allclose(saved[name], tensor, atol=1e-5) for name, tensor in expected.items())


def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """The frozen weights are the base's again, and the trained adapters those of the run; the divergence is from what
    training began with, not from the base."""
    rows = {key: values[:3] for key, values in STATISTICS["proprio"].items() if isinstance(values, list)}
    statistics = {"libero_spatial_no_noops": {**STATISTICS, "proprio": rows}}
    base = write_folder(tmp_path / "base", twin(), statistics=statistics)
    shapes = {"fc1.weight": (64, 3), "fc1.bias": (64,), "fc2.weight": (64, 64), "fc2.bias": (64,)}
    torch.save(
        {name: torch.ones(shape) / 64 for name, shape in shapes.items()}, base / "proprio_projector--5_checkpoint.pt"
    )
    adapters(tmp_path / "adapters", base)
    policy = {"checkpoint": str(tmp_path / "adapters"), "chunk_size": 4, "lora": LORA.model_dump()}
    config = learner_config(policy=policy, algo={"kl_coef": 1.0, "minibatches": 1})
    first = make_learner(config)
    began = parameters(first)
    assert first.update(random_batch(0))["learner/reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert first.update(random_batch(1, policy_version=1))["learner/reference_kl"] > 1e-7
    first.save(tmp_path / "saved")
    trained = parameters(first)
    assert any((trained[name] != began[name]).any() for name in trained)
    resumed = make_learner(config)
    assert all((parameters(resumed)[name] == began[name]).all() for name in began), "a server starts with these"
    resumed.load(tmp_path / "saved")
    assert all((parameters(resumed)[name] == trained[name]).all() for name in trained)
    for learner in (first, resumed):
        learner.update(random_batch(2, policy_version=2))
    found, expected = parameters(resumed), parameters(first)
    assert all((found[name] == expected[name]).all() for name in expected)


def test_an_exported_run_goes_on(base: Path, tmp_path: Path) -> None:
    """Query, key and value are one layer of three times the rank there."""
    first = build(base, lora=LORA)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in first.trained_parameters().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    save_policy(OpenVLAOFTConfig(), first, tmp_path / "ours", {})
    output = tmp_path / "exported"
    command = ["export", tmp_path / "ours", "--format", "lora", "--source", base, "--output", output]
    assert main(list(map(str, command))) == 0
    again = build(output, lora=LORA)
    assert_same(again, first)
    assert merged_state(again).keys() == merged_state(first).keys()


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 8}, r"its adapters need policy\.lora\.rank=4 "),
        ({"alpha": 4}, r"its adapters need policy\.lora\.alpha=2\.0 "),
        (
            {"targets": ("language_model",)},
            r"its adapters need policy\.lora\.targets=\['language_model', 'lm_head', 'projector', 'vision'\] ",
        ),
    ],
)
def test_settings_that_contradict_the_folder(adapted: Path, lora: dict[str, Any], message: str) -> None:
    config = OpenVLAOFTConfig(checkpoint=str(adapted), chunk_size=2, lora=LORA.model_copy(update=lora))
    with pytest.raises(UserError, match=message):
        check_policy(config, dataclasses.replace(SPEC, suite="libero_spatial"))


# --- parts that lie apart ---


def test_adapters_and_heads_in_two_folders_are_one_checkpoint(unmerged: Path, tmp_path: Path) -> None:
    """Either folder names the policy that OpenVLA-OFT merges and loads: L1, two views, a chunk."""
    model = twin()
    model.load_state_dict(adapters(tmp_path / "again", unmerged))
    merged = write_folder(tmp_path / "merged", model, statistics={"libero_spatial_no_noops": STATISTICS})
    for file in unmerged.glob("*.pt"):
        shutil.copy(file, merged)
    expected = build(merged, OFT)
    for folder in (unmerged, unmerged / "lora_adapter"):
        config = OpenVLAOFTConfig(checkpoint=str(folder))
        assert config.head_in_use == "l1"
        spec = dataclasses.replace(SPEC, suite="libero_spatial")
        asked = {"env.wrist_camera": True, "env.proprio": True, "policy.chunk_size": 8}
        assert keys_of_checkpoint(config, spec) == asked
        policy = build(folder, OFT)
        assert policy.architecture == expected.architecture
        assert policy.codec.bounds == expected.codec.bounds
        assert torch.equal(policy.action_head.fc2.weight, l1_head(0).model.fc2.weight)
        for name, tensor in expected.state_dict().items():
            assert torch.allclose(policy.state_dict()[name], tensor, atol=1e-6), name
    command = ["export", str(unmerged), "--format", "openvla-oft", "--output", str(tmp_path / "all"), "--views", "2"]
    assert main(command) == 0
    written, merged_weights = build(tmp_path / "all", OFT).state_dict(), expected.state_dict()
    assert all(torch.allclose(written[n], t, atol=1e-6) for n, t in merged_weights.items() if "value_head" not in n)
    targets = ("vision", "projector", "language_model")  # a regression head needs no lm_head
    assert build(unmerged, OFT, lora=LORA.model_copy(update={"targets": targets})).goes_on


def test_adapters_of_openvla_oft_with_tokens_are_decoded_in_parallel(unmerged: Path, tmp_path: Path) -> None:
    """Their base folder has OpenVLA's code."""
    folder = shutil.copytree(unmerged, tmp_path / "tokens")
    (folder / "action_head--150000_checkpoint.pt").unlink()
    found = build(folder / "lora_adapter", dataclasses.replace(SPEC, proprio_dim=8)).architecture
    assert (found.head, found.decoding) == ("tokens", "parallel")
    command = ["export", str(folder), "--format", "openvla-oft", "--output", str(tmp_path / "merged")]
    assert main(command) == 0
    written = OpenVLAOFTConfig(checkpoint=str(tmp_path / "merged"), chunk_size=2)
    spec = dataclasses.replace(SPEC, proprio_dim=8)
    assert build_policy(written, spec, 0).architecture == found, "its code is that of the base"


def test_a_checkpoint_of_which_a_part_was_left_behind(unmerged: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(unmerged / "lora_adapter", tmp_path / "one" / "lora_adapter")
    with pytest.raises(
        UserError, match=r"dataset_statistics\.json is missing; copy the whole checkpoint, not lora_adapter"
    ):
        build(alone)
    headless = shutil.copytree(unmerged, tmp_path / "two", ignore=shutil.ignore_patterns("lora_adapter"))
    with pytest.raises(UserError, match=r"\(action_head, proprio_projector\) without its weights; .* or lora_adapter"):
        build(headless)


def test_parts_are_of_the_newest_step(unmerged: Path, tmp_path: Path) -> None:
    """By its number, whatever the format; files of several steps that do not match are refused."""
    folder = shutil.copytree(unmerged, tmp_path / "steps")
    old = {name: tensor + 1 for name, tensor in torch.load(folder / "action_head--150000_checkpoint.pt").items()}
    save_file(old, folder / "action_head--50000_checkpoint.safetensors")
    assert torch.equal(build(folder, OFT).action_head.fc2.weight, l1_head(0).model.fc2.weight)
    (folder / "proprio_projector--150000_checkpoint.pt").rename(folder / "proprio_projector--50000_checkpoint.pt")
    expected = r"keep those of one step there: action_head--150000.*action_head--50000.*proprio_projector--50000"
    with pytest.raises(UserError, match=expected):
        build(folder, OFT)
    (folder / "proprio_projector--50000_checkpoint.pt").rename(folder / "proprio_projector--latest_checkpoint.pt")
    with pytest.raises(UserError, match=r"keep those of one step there: .*proprio_projector--latest"):
        build(folder, OFT)


@pytest.mark.parametrize(
    ("name", "suite", "is_taken"),
    [
        ("libero_spatial_no_noops", "libero_object", False),
        ("libero_10_no_noops", "libero_spatial", False),
        ("libero_spatial_no_noops", "libero_spatial", True),
        ("libero_spatial_my_own", "libero_spatial", True),
        ("libero_4_task_suites_no_noops", "libero_goal", True),
        ("libero_100", "libero_goal", True),
        ("kitchen", "libero_goal", True),
        ("libero_spatial_no_noops", "", True),
    ],
)
def test_statistics_of_another_suite_must_be_chosen(name: str, suite: str, is_taken: bool) -> None:
    statistics = {name: STATISTICS}
    if is_taken:
        assert choose_unnorm_key(statistics, None, suite) == name
        return
    with pytest.raises(
        UserError, match=rf"statistics of {name} only, .*env\.suite={suite}; .*policy\.unnorm_key={name}"
    ):
        choose_unnorm_key(statistics, None, suite)
    assert choose_unnorm_key(statistics, name, suite) == name
