"""Policies of the package lerobot. What needs the package is skipped without it; `scripts/check_lerobot.sh` runs it."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests import ROOT
from tests.policies.lerobot import small_gemma
from vla_rl.commands.cli import main
from vla_rl.config.run_config import RunConfig
from vla_rl.core.actions import end_effector
from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec
from vla_rl.policies.build import build_policy, check_policy, keys_of_checkpoint, policy_sizes, require_trainable
from vla_rl.policies.lerobot import build
from vla_rl.policies.lerobot.config import LeRobotConfig

SPEC = EnvSpec("fake", ("main",), 64, 5, end_effector(), 32, ("move to the red block", "move to the blue block"))
WORDS = 262  # of the tokenizer of bytes in scripts/make_lerobot_policy.py
needs_lerobot = pytest.mark.skipif(find_spec("lerobot") is None, reason="needs the package lerobot (Python 3.12)")


def there_is_lerobot(name: str) -> object:
    """In the place of ``find_spec``, which torch asks, too."""
    return name if name == "lerobot" else find_spec(name)


def saved(folder: Path, **changes: object) -> LeRobotConfig:
    """The small files of a policy that lerobot has saved, and weights of 12 numbers."""
    settings = {
        "type": "act",
        "input_features": {
            "observation.images.image": {"type": "VISUAL", "shape": [3, 64, 64]},
            "observation.images.empty_camera_0": {"type": "VISUAL", "shape": [3, 480, 640]},
            "observation.state": {"type": "STATE", "shape": [5]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [7]}},
        "chunk_size": 50,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings | changes))
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(48))
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        (folder / name).write_text("{}")
    return LeRobotConfig(checkpoint=str(folder))


def test_a_policy_that_fits_passes_without_being_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = saved(tmp_path / "policy")
    monkeypatch.setattr(build.importlib.util, "find_spec", there_is_lerobot)
    check_policy(config, SPEC)
    assert policy_sizes(config, SPEC, 4).parameters == 12
    assert keys_of_checkpoint(config, SPEC) == {"env.wrist_camera": False, "env.proprio": True}
    spec = config.spec(SPEC)
    assert (spec.record["actions"].shape, list(spec.draws)) == ((8, 7), ["seed"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_size": 4}, r"it predicts 4 actions at once \(lower policy.chunk_size=8\)"),
        ({"input_features": {}}, r"it sees 0 cameras, the run has 1 \(set env.wrist_camera\)"),
        ({"output_features": {"action": {"shape": [6]}}}, "its actions have 6 numbers, the simulator's 7"),
        ({"n_obs_steps": 2}, "it reads 2 observations at once; here it gets one"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, message: str
) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", there_is_lerobot)
    with pytest.raises(UserError, match=message):
        check_policy(saved(tmp_path / "policy", **changes), SPEC)
    for damaged in ("{", "[]", "{}"):
        (tmp_path / "policy/config.json").write_text(damaged)
        with pytest.raises(UserError, match=r"config\.json"):
            check_policy(LeRobotConfig(checkpoint=str(tmp_path / "policy")), SPEC)
    (tmp_path / "policy/policy_preprocessor.json").unlink()
    with pytest.raises(UserError, match="is no policy as lerobot saves it"):
        check_policy(LeRobotConfig(checkpoint=str(tmp_path / "policy")), SPEC)


def test_it_is_for_evaluation_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "policy")
    with pytest.raises(UserError, match="is for evaluation"):
        require_trainable(LeRobotConfig(checkpoint="x"))
    require_trainable(RunConfig().policy)
    for command, key in (("train", "policy.checkpoint"), ("sft", "sft.start_from")):
        arguments = [str(ROOT / "configs/tabletop.yaml"), "policy=lerobot", f"{key}={tmp_path / 'policy'}"]
        assert main([command, *arguments, f"log.dir={tmp_path / 'runs'}"]) == 2
        assert "/policy is for evaluation: it has no log-probabilities" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UserError, match=r"needs policy.checkpoint"):
        check_policy(LeRobotConfig(), SPEC)


def test_flow_policies_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = saved(tmp_path / "policy", type="smolvla", chunk_size=20, max_action_dim=32, num_steps=10)
    monkeypatch.setattr(build.importlib.util, "find_spec", there_is_lerobot)
    require_trainable(config)
    check_policy(config, SPEC)
    spec = config.spec(SPEC)
    assert (spec.record["chain"].shape, spec.record["actions"].shape, config.steps) == ((2, 20, 32), (8, 7), 10)
    assert policy_sizes(config, SPEC, 4).trained == 12
    saved(tmp_path / "policy", type="pi0", use_relative_actions=True)
    with pytest.raises(UserError, match="its actions are relative to the state"):
        check_policy(config, SPEC)


def make(kind: str, folder: Path) -> LeRobotConfig:
    command = [sys.executable, str(ROOT / "scripts/make_lerobot_policy.py"), kind, str(folder), "--state", "5"]
    subprocess.run(command, check=True, cwd=ROOT)
    return LeRobotConfig(checkpoint=str(folder), denoise_steps=3, random_steps="all")


def make_small(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> LeRobotConfig:
    """As ``make``; and this process can load it: the sizes of π0 and π0.5 are constants of lerobot's code."""
    config = make(kind, folder)
    if kind != "smolvla":
        module = small_gemma.modeling(kind)
        for name, part in small_gemma.small_parts(module, WORDS).items():
            monkeypatch.setattr(module, name, part)
    return config


@needs_lerobot
@pytest.mark.parametrize("kind", ["smolvla", "pi0", "pi05"])
def test_a_flow_policy_is_denoised_rated_trained_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    import torch
    from safetensors.torch import load_file

    from vla_rl.policies.base.policy import PolicyInput
    from vla_rl.policies.build import save_policy

    config = make_small(kind, tmp_path / "policy", monkeypatch)
    policy = build_policy(config, SPEC, 0)
    written = load_file(tmp_path / "policy/model.safetensors")
    assert all(torch.equal(policy.model.state_dict()[name], weight) for name, weight in written.items())
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(256, size=(3, 1, 64, 64, 3), dtype=np.uint8))
    proprio = torch.from_numpy(rng.random((3, 5), np.float32))
    seen = PolicyInput(images, proprio, torch.tensor([0, 1, 1]), torch.tensor([0.0, 0.5, 0.9]))
    draws = {
        name: torch.from_numpy(np.stack([np.asarray(numbers.draw(rng)) for _ in range(3)]))
        for name, numbers in config.spec(SPEC).draws.items()
    }
    greedy = policy.act(seen, draws, torch.ones(3, dtype=torch.bool), 1.0)
    steps = "num_steps" if kind == "smolvla" else "num_inference_steps"
    setattr(policy.model.config, steps, 3)  # type: ignore[union-attr]
    batch = {
        "observation.images.image": images[:, 0].permute(0, 3, 1, 2) / 255,
        "observation.state": proprio,
        "task": [SPEC.instructions[i] for i in (0, 1, 1)],
    }
    expected = policy.model.predict_action_chunk(policy._before(batch), noise=draws["start"])  # type: ignore[operator]
    torch.testing.assert_close(greedy.record["actions"], expected[:, :8], atol=1e-4, rtol=0)
    sampled = policy.act(seen, draws, torch.zeros(3, dtype=torch.bool), 0.7)
    rated = policy(seen, sampled.record, 0.7)
    torch.testing.assert_close(rated.logprobs, sampled.logprobs, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(rated.values, sampled.values, atol=1e-4, rtol=0)
    actions = policy.decode({"actions": sampled.record["actions"].numpy()})
    again = policy.encode(actions, rng)["actions"]
    assert np.allclose(again[..., :-1], sampled.record["actions"][..., :-1].numpy(), atol=1e-4)
    loss = policy.imitation_loss(seen, actions, torch.ones(3, 8, dtype=torch.bool), rng, 0.0)
    (loss + rated.logprobs.mean() + rated.values.mean()).backward()
    moved = {name for name, p in policy.trained_parameters().items() if p.grad is not None and p.grad.abs().max() > 0}
    assert any(("lm_expert" if kind == "smolvla" else "gemma_expert.model.layers") in name for name in moved), sorted(
        moved
    )
    with torch.no_grad():
        for parameter in policy.trained_parameters().values():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
    save_policy(config, policy, tmp_path / "saved", {"by": "a test"})
    for name in ("config.json", "policy_preprocessor.json", "policy_postprocessor.json"):
        texts = [(tmp_path / folder / name).read_text().strip() for folder in ("policy", "saved")]
        assert texts[0] == texts[1]
    loaded = build_policy(config.model_copy(update={"checkpoint": str(tmp_path / "saved")}), SPEC, 1)
    ours, theirs = policy.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert load_file(tmp_path / "saved/model.safetensors").keys() == written.keys()
    heads = load_file(tmp_path / "saved/value_head.safetensors")
    assert heads
    assert all(name.startswith("value_head.") for name in heads)
    half = build.build_policy(config, SPEC, 0, dtype=torch.bfloat16)
    half.set_instructions(SPEC.instructions)
    assert "tokens of an instruction" not in caplog.text
    with pytest.raises(
        UserError, match=r"reads \d+ tokens of an instruction, by which it cannot tell .* red' from .* blue'"
    ):
        half.set_instructions(["move " * 60 + color for color in ("red", "blue")])
    sampled = half.act(seen, draws, torch.zeros(3, dtype=torch.bool), 0.7)
    torch.testing.assert_close(half(seen, sampled.record, 0.7).logprobs, sampled.logprobs, atol=1e-3, rtol=1e-4)


@needs_lerobot
@pytest.mark.parametrize("kind", ["smolvla", "pi0", "pi05"])
def test_the_expert_alone_is_trained_if_the_config_or_the_key_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    config = make_small(kind, tmp_path / "policy", monkeypatch)
    about = json.loads((tmp_path / "policy/config.json").read_text())
    for saved, key, alone in ((True, None, True), (False, True, True), (True, False, False)):
        (tmp_path / "policy/config.json").write_text(json.dumps(about | {"train_expert_only": saved}))
        chosen = config.model_copy(update={"train_expert_only": key})
        policy = build.build_policy(chosen, SPEC, 0)
        trained = {name for name in policy.trained_parameters() if name.startswith("model.")}
        assert any("expert.model.layers" in name or "lm_expert.layers" in name for name in trained)
        assert any(part in name for name in trained for part in build._VLM) != alone
        found = sum(weight.numel() for name, weight in policy.trained_parameters().items() if name in trained)
        if alone:
            assert found <= policy_sizes(chosen, SPEC, 4).trained < policy_sizes(chosen, SPEC, 4).parameters


@needs_lerobot
@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_weights_are_saved_whatever_names_the_file_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from safetensors.torch import load_file, save_file

    config = make_small(kind, tmp_path / "policy", monkeypatch)
    path = tmp_path / "policy/model.safetensors"
    weights = load_file(path)
    save_file({name.removeprefix("model."): weight for name, weight in weights.items()}, path)
    build.save_policy(build.build_policy(config, SPEC, 0), tmp_path / "saved", {})  # type: ignore[arg-type]
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert saved.keys() == weights.keys()
    assert all((saved[name] == weights[name]).all() for name in weights)


@needs_lerobot
def test_weights_that_lerobot_does_not_load_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loader of π0.5 prints a warning, and returns a model with random weights."""
    from safetensors.torch import load_file, save_file

    config = make_small("pi05", tmp_path / "policy", monkeypatch)
    path = tmp_path / "policy/model.safetensors"
    save_file({f"student.{name}": weight for name, weight in load_file(path).items()}, path)
    with pytest.raises(UserError, match=r"lerobot has loaded 0 of its \d+ tensors"):
        build_policy(config, SPEC, 0)


@needs_lerobot
def test_actions_of_others_depend_on_the_row_alone(tmp_path: Path) -> None:
    import torch

    from vla_rl.policies.base.policy import PolicyInput

    policy = build_policy(make("act", tmp_path), SPEC, 0)
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(256, size=(3, 1, 64, 64, 3), dtype=np.uint8))
    seen = PolicyInput(
        images, torch.from_numpy(rng.random((3, 5), np.float32)), torch.tensor([0, 1, 1]), torch.zeros(3)
    )
    draws = {"seed": torch.tensor([0.1, 0.2, 0.3])}
    chosen = policy.act(seen, draws, torch.ones(3, dtype=torch.bool), 1.0)
    actions = policy.decode({name: value.numpy() for name, value in chosen.record.items()})
    assert (actions.shape, actions.dtype) == ((3, 8, 7), np.float32)
    assert actions[..., -1].min() >= 0
    assert actions[..., -1].max() <= 1
    one = PolicyInput(images[1:2], seen.proprio[1:2], seen.task[1:2], seen.elapsed[1:2])
    alone = policy.act(one, {"seed": draws["seed"][1:2]}, torch.ones(1, dtype=torch.bool), 1.0).record["actions"]
    assert np.allclose(alone[0].numpy(), actions[1], atol=1e-4)
    model = policy.model.predict_action_chunk  # type: ignore[attr-defined]
    batch = {
        "observation.images.image": images[:, 0].permute(0, 3, 1, 2) / 255,
        "observation.state": seen.proprio,
        "task": [SPEC.instructions[i] for i in (0, 1, 1)],
    }
    expected = policy._after(model(policy._before(batch)))[:, :8].numpy()  # type: ignore[attr-defined]
    assert np.allclose(actions[..., :-1], expected[..., :-1], atol=1e-4)
    assert np.allclose(1 - 2 * actions[..., -1], expected[..., -1].clip(-1, 1), atol=1e-4)
    assert not list(policy.trained_parameters())
