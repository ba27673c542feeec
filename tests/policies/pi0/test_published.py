"""A π0 in the layout in which lerobot publishes it: read, equal to lerobot's own network, trained, and saved."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.policies import pi0_twin as twin
from vla_rl.commands.cli import main
from vla_rl.core.actions import assumed
from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.checkpoint_folder import CheckpointError
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.build import build_policy, check_policy, keys_of_checkpoint, policy_sizes, save_policy
from vla_rl.policies.pi0.checkpoint import is_pi0
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.policies.pi0.model import Pi0

SPEC = EnvSpec(
    name="libero_spatial",
    views=("agentview", "wrist"),
    image_size=twin.SEEN_PIXELS,
    proprio_dim=twin.STATE,
    actions=assumed(twin.ACTIONS),
    max_episode_steps=20,
    instructions=twin.INSTRUCTIONS,
    init_states=1,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("published") / "pi0"
    shutil.copytree(twin.FIXTURE, made)
    save_file(twin.weights(), made / "model.safetensors")
    return made


def config(folder: Path, **keys: Any) -> Pi0Config:
    return Pi0Config(checkpoint=str(folder), chunk_size=4, denoise_steps=twin.STEPS, **keys)


def build(folder: Path, **keys: Any) -> Pi0:
    policy = build_policy(config(folder, **keys), SPEC, seed=0)
    assert isinstance(policy, Pi0)
    return policy


def observations() -> PolicyInput:
    given = twin.inputs()
    images, state, task = (torch.from_numpy(given[name]) for name in ("images", "state", "task"))
    return PolicyInput(images, state, task, torch.zeros(twin.ROWS))


def act(policy: Pi0) -> Any:
    draws = {name: torch.zeros(twin.ROWS, *n.shape) for name, n in policy.config.spec(SPEC).draws.items()}
    draws["start"] = torch.from_numpy(twin.inputs()["noise"])
    return policy.act(observations(), draws, torch.ones(twin.ROWS, dtype=torch.bool), 1.0)


def test_its_actions_are_those_of_lerobot(folder: Path) -> None:
    policy, expected = build(folder), np.load(folder / "expected.npz")
    record = {name: array.numpy() for name, array in act(policy).record.items()}
    actions = policy.decode(record)
    theirs = expected["actions"][:, :4].astype(np.float64)
    theirs[..., -1] = (1.0 - theirs[..., -1].clip(-1.0, 1.0)) / 2.0
    assert theirs.std() > 0.3, "the twin acts"
    np.testing.assert_allclose(actions, theirs, atol=2e-5)
    encoded = policy.encode(policy.action_statistics.denormalize(record["actions"]), np.random.default_rng(0))
    np.testing.assert_allclose(encoded["actions"], record["actions"], atol=1e-5)


def test_every_weight_is_placed(folder: Path) -> None:
    """A change of any tensor that lerobot has in use changes the network's."""
    ours = {name: w for name, w in build(folder).state_dict().items() if name.startswith("model.")}
    found = {array.tobytes() for name, array in twin.weights().items() if "gemma_expert.lm_head" not in name}
    assert {w.numpy().tobytes() for w in ours.values()} == found


@pytest.mark.parametrize(
    ("saved", "key", "trained"), [(True, None, False), (True, False, True), (False, True, False), (None, None, True)]
)
def test_its_config_says_whether_all_is_trained(
    folder: Path, tmp_path: Path, saved: bool | None, key: bool | None, trained: bool
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    about = json.loads((copy / "config.json").read_text())
    about.pop("train_expert_only", None)
    (copy / "config.json").write_text(json.dumps(about | ({} if saved is None else {"train_expert_only": saved})))
    policy = build(copy, train_expert_only=key)
    found = {weight.requires_grad for weight in policy.model.model.vlm.vision_tower.parameters()}
    assert found == {trained}
    assert policy.model.action_out_proj.weight.requires_grad


def test_instructions_that_a_cut_makes_equal_are_refused(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    about = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(about | {"tokenizer_max_length": 4}))
    equal = dataclasses.replace(SPEC, instructions=("pick up the bowl", "open the bowl", "pick up the drawer"))
    expected = r"reads 4 tokens of an instruction, .* cannot tell 'pick up the bowl' from 'pick up the drawer'"
    with pytest.raises(UserError, match=expected):
        check_policy(config(copy), equal)
    check_policy(config(folder), equal)
    assert not caplog.records
    check_policy(config(copy), SPEC)
    assert "and not what follows in 'pick up the bowl', 'open the drawer'" in caplog.text


def test_it_is_trained_and_saved(folder: Path, tmp_path: Path) -> None:
    policy = build(folder)
    assert is_pi0(folder)
    sizes = policy_sizes(config(folder), SPEC, 4)
    assert sizes.parameters == sum(p.numel() for p in policy.parameters())
    optimizer = torch.optim.SGD(policy.trunk_parameters(), lr=1e-2)
    actions, mask = np.zeros((twin.ROWS, 4, 7), np.float32), torch.ones(twin.ROWS, 4, dtype=torch.bool)
    before = act(policy).record["actions"]
    policy.imitation_loss(observations(), actions, mask, np.random.default_rng(0), 0.0).backward()
    optimizer.step()
    after = act(policy).record["actions"]
    assert (after - before).abs().max() > 1e-3
    save_policy(policy.config, policy, tmp_path / "saved", {"from": "a test"})
    again = build(tmp_path / "saved")
    torch.testing.assert_close(act(again).record, act(policy).record, atol=1e-5, rtol=0)
    assert (again.config.horizon_in_use, again.config.padded_dim_in_use(SPEC)) == (twin.CHUNK, twin.PADDED)


def test_it_goes_out_again(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The export has lerobot's names and dtypes, the source's other files, and the trained weights."""
    policy = build(folder)
    with torch.no_grad():
        policy.model.action_out_proj.bias.add_(1.0)
        policy.model.model.vlm.language_model.embed_tokens.weight[5].add_(1.0)
    save_policy(policy.config, policy, tmp_path / "trained", {})
    command = ["export", str(tmp_path / "trained"), "--format", "lerobot", "--output", str(tmp_path / "out")]
    assert main(command) == 2
    assert "name one that lerobot has saved: --source FOLDER" in capsys.readouterr().err
    assert main([*command, "--source", str(folder)]) == 0
    written, source = load_file(tmp_path / "out" / "model.safetensors"), twin.weights()
    assert written.keys() == source.keys()
    changed = {name for name in source if not np.array_equal(written[name], source[name])}
    tied = "model.paligemma_with_expert.paligemma.lm_head.weight"
    assert changed == {"model.action_out_proj.bias", tied}
    for path in twin.FIXTURE.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    again = build(tmp_path / "out")
    ours, theirs = policy.state_dict(), again.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), "the value head, too"


def test_the_run_observes_what_it_reads(folder: Path) -> None:
    blind = dataclasses.replace(SPEC, views=("agentview",), proprio_dim=0)
    assert keys_of_checkpoint(config(folder), blind) == {"env.wrist_camera": True, "env.proprio": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_relative_actions": True}, "use_relative_actions=true: actions relative to the state"),
        ({"normalization_mapping": {"STATE": "QUANTILES", "ACTION": "MEAN_STD"}}, "only MEAN_STD is read"),
        ({"use_peft": True}, "merge the adapters with lerobot first"),
    ],
)
def test_what_is_not_read_is_said(folder: Path, tmp_path: Path, change: dict, message: str) -> None:
    shutil.copytree(folder, tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        check_policy(config(tmp_path / "other"), SPEC)


def test_missing_files_and_tensors_are_named(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    weights = load_file(other / "model.safetensors")
    lost = "model.paligemma_with_expert.gemma_expert.model.layers.1.mlp.up_proj.weight"
    save_file(
        {k: v for k, v in weights.items() if k != lost} | {"model.more": weights[lost]}, other / "model.safetensors"
    )
    with pytest.raises(
        CheckpointError, match=r"gemma_expert.model.layers.1.mlp.up_proj.weight is missing; more is unk"
    ):
        build(other)
    (other / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"copy tokenizer.json of google/paligemma-3b-pt-224 into the folder"):
        check_policy(config(other), SPEC)
