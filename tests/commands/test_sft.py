import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from envs import make_env
from envs.base.demonstrations import collect, read_demonstrations
from envs.tabletop.config import TabletopConfig
from vla_rl.commands.cli import main
from vla_rl.commands.demonstrations import demonstration_episode
from vla_rl.commands.sft import _with, clone, sft_command, shift_images
from vla_rl.config.run_config import RunConfig
from vla_rl.core.devices.settings import set_up_torch
from vla_rl.core.errors import UserError
from vla_rl.core.files import new_folder
from vla_rl.core.machine import GIB, Gpu, Machine
from vla_rl.policies.build import build_policy
from vla_rl.policies.openvla_oft.checkpoint import load_policy
from vla_rl.policies.openvla_oft.initialize import make_policy
from vla_rl.policies.openvla_oft.tokens import smoothed_cross_entropy
from vla_rl.replay.schedule import training_episode


def test_loss_is_cross_entropy_of_executed_steps_only():
    logits = torch.randn(2, 3, 4, 256, dtype=torch.float64)
    tokens = torch.randint(0, 256, (2, 3, 4), dtype=torch.uint8)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    expected = []
    for n, k in ((0, 0), (0, 1), (1, 0)):
        for a in range(4):
            row = logits[n, k, a]
            expected.append(torch.logsumexp(row, 0) - row[int(tokens[n, k, a])])
    assert smoothed_cross_entropy(logits, tokens, mask, 0.0).item() == pytest.approx(
        torch.stack(expected).mean().item()
    )


def test_smoothed_targets_prefer_near_bins():
    tokens = torch.full((1, 1, 1), 100, dtype=torch.uint8)
    mask = torch.ones(1, 1, dtype=torch.bool)

    def loss(peak: int, smoothing: float) -> float:
        logits = torch.zeros(1, 1, 1, 256)
        logits[..., peak] = 5.0
        return smoothed_cross_entropy(logits, tokens, mask, smoothing).item()

    assert loss(100, 2.0) < loss(101, 2.0) < loss(104, 2.0) < loss(150, 2.0)
    assert loss(101, 0.0) == pytest.approx(loss(150, 0.0))
    assert loss(100, 1e-3) == pytest.approx(loss(100, 0.0), rel=1e-5)


def test_shifts_move_all_views_alike_and_repeat_edges():
    image = np.arange(8 * 8, dtype=np.uint8).reshape(8, 8)
    images = np.stack([image, image + 100])[None, :, :, :, None].repeat(3, axis=-1)
    shifted = shift_images(images, np.random.default_rng(1), 2)
    assert shifted.shape == images.shape
    assert (shifted[0, 1].astype(int) - shifted[0, 0] == 100).all()
    assert set(shifted[0, 0].ravel().tolist()) <= set(image.ravel().tolist())
    assert shift_images(images, np.random.default_rng(1), 0) is images


def test_demonstrations_and_training_share_no_placement():
    training = {training_episode(i, 0, 0).seed for i in range(1000)}
    assert not training & {demonstration_episode(i, 1, 0).seed for i in range(1000)}


def test_the_checkpoint_to_start_from_is_the_last_override() -> None:
    assert _with(["policy=pi0"], "b") == ["policy=pi0", 'policy.checkpoint="b"']
    assert list(_with({"policy.checkpoint": "a", "policy": "pi0"}, None)) == ["policy", "policy.checkpoint"]
    assert _with({"policy.checkpoint": "a"}, None) == {"policy.checkpoint": None}


def test_commands_of_the_same_second_have_folders_of_their_own(tmp_path):
    folders = [new_folder(tmp_path / "runs", "demos") for _ in range(3)]
    assert [folder.name for folder in folders] == ["demos", "demos-2", "demos-3"]
    assert all(folder.is_dir() for folder in folders)


@pytest.mark.slow
def test_cloning_the_tabletop_expert(tmp_path):
    """Collect with the real expert in two processes, train a little, load the checkpoint: the loss has halved."""
    config = RunConfig.model_validate(
        {
            "env": {"name": "tabletop", "tasks": ["reach"]},
            "policy": {"name": "openvla_oft", "chunk_size": 4},
            "sft": {"demo_episodes": 20, "updates": 40, "batch": 16, "threads": 2, "output": str(tmp_path / "policy")},
            "log": {"dir": str(tmp_path)},
        }
    )
    torch.set_num_threads(2)
    figures = clone(config, Console(quiet=True))
    assert figures["demonstrations"] == 20
    assert figures["final_loss"] < 0.75 * np.log(256)
    assert figures["passes"] == pytest.approx(40 * 16 / figures["steps"], abs=0.051)
    policy = load_policy(tmp_path / "policy")
    files = sorted(tmp_path.glob("demos-*/part*.hdf5"))
    assert len(files) == 2
    instructions = json.loads((tmp_path / "policy/metadata.json").read_text())["instructions"]
    demos = read_demonstrations(files, instructions=instructions, views=("top",), image_size=64, proprio=5)
    assert np.allclose(policy.codec.bounds.q99[0], np.quantile(demos.actions[:, 0], 0.99), atol=1e-5)


def test_adapters_in_bf16_are_cloned_by_the_same_code(tmp_path):
    """In micro-batches, with checkpointed activations; what a small machine runs of a large policy's warm start."""
    env = make_env(TabletopConfig(tasks=("reach",)), 1)
    collect(env, [demonstration_episode(i, 1, 0) for i in range(2)], tmp_path / "demos.hdf5", noise=0.0)
    env.close()
    losses = {}
    for name, learner in {
        "whole": {},
        "parts": {"micro_batch": 2, "activation_checkpointing": True},
        "bf16": {"precision": "bf16"},
    }.items():
        config = RunConfig.model_validate(
            {
                "env": {"name": "tabletop", "tasks": ["reach"]},
                "policy": {"name": "openvla_oft", "size": "nano", "chunk_size": 4, "lora": {"rank": 4}},
                "learner": learner,
                "sft": {
                    "demos": [str(tmp_path / "demos.hdf5")],
                    "updates": 3,
                    "batch": 4,
                    "threads": 1,
                    "lr": 1e-2,
                    "output": str(tmp_path / name),
                },
            }
        )
        losses[name] = clone(config, Console(quiet=True))["final_loss"]
    assert losses["parts"] == pytest.approx(losses["whole"], abs=2e-3)
    assert losses["bf16"] == pytest.approx(losses["whole"], rel=0.05)
    trained = load_policy(tmp_path / "bf16")
    assert not trained.adapted, "merged"
    assert {weight.dtype for weight in trained.parameters()} == {torch.bfloat16}
    words = json.loads((tmp_path / "bf16/metadata.json").read_text())["instructions"]
    start = make_policy(trained.architecture, words, trained.codec, trained.proprio_bounds, dtype=torch.bfloat16)
    moved = {n for n, w in trained.state_dict().items() if not torch.equal(w, start.state_dict()[n])}
    assert "language_model.layers.0.self_attn.q_proj.weight" in moved
    assert not {name for name in moved if "norm" in name or "embed" in name}, "only linear layers have adapters"


def test_fine_tuning_continues_from_a_checkpoint(tmp_path):
    """The command's own way from ``sft.start_from``: weights and statistics are the checkpoint's, not new ones."""
    env = make_env(TabletopConfig(tasks=("reach",)), 1)
    collect(env, [demonstration_episode(0, 1, 0)], tmp_path / "demos.hdf5", noise=0.0)
    env.close()
    file = tmp_path / "run.yaml"
    file.write_text(
        "env: {name: tabletop}\npolicy: {name: openvla_oft, size: nano, chunk_size: 4}\ntrain: {eval_episodes: 0}\n"
        f"sft: {{demos: ['{tmp_path}/demos.hdf5'], updates: 2, batch: 4, lr: 1.0e-9, output: '{tmp_path}/first'}}\n"
    )

    def sft(*overrides: str) -> int:
        return sft_command(argparse.Namespace(config=file, overrides=[*overrides, "sft.threads=1"], json=None))

    assert sft("seed=5") == 0
    assert sft(f"sft.start_from={tmp_path}/first", f"sft.output={tmp_path}/second") == 0
    assert sft(f"sft.output={tmp_path}/other") == 0
    kept = (tmp_path / "first" / "model.safetensors").read_bytes()
    assert sft() == 0
    assert (tmp_path / "first-2").is_dir(), "a checkpoint that is there is not replaced"
    assert (tmp_path / "first" / "model.safetensors").read_bytes() == kept
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", "metadata.json"):
        (tmp_path / "run" / name).touch()
    for kept_too in (tmp_path, tmp_path / "run"):
        with pytest.raises(UserError, match=r"sft.overwrite=true sft.output=.*: that is no checkpoint, and would be l"):
            sft("sft.overwrite=true", f"sft.output={kept_too}")
    assert (tmp_path / "run/config.yaml").exists()
    assert sft("sft.overwrite=true") == 0
    assert (tmp_path / "first" / "model.safetensors").read_bytes() != kept
    assert sft(f"sft.output={tmp_path}/first", "seed=5", "sft.overwrite=true") == 0
    name = "language_model.layers.0.self_attn.q_proj.weight"
    first, second, other = (load_policy(tmp_path / run).state_dict()[name] for run in ("first", "second", "other"))
    assert torch.allclose(first, second, atol=1e-6)
    assert not torch.allclose(first, other, atol=1e-3)
    with pytest.raises(UserError, match="nowhere"):
        sft("sft.start_from=nowhere")
    env = make_env(TabletopConfig(tasks=("pick_place",)), 1)
    collect(env, [demonstration_episode(0, 1, 0)], tmp_path / "lifting.hdf5", noise=0.0)
    env.close()
    lifting = f"sft.start_from={tmp_path}/first", f"sft.demos=[{tmp_path}/lifting.hdf5]", "env.tasks=[pick_place]"
    with pytest.raises(UserError, match=r"cannot express .* in dimension \d"):
        sft(*lifting)
    assert sft(*lifting, f"sft.output={tmp_path}/lifts", "sft.new_statistics=true") == 0
    before, after = (load_policy(tmp_path / run) for run in ("first", "lifts"))
    assert torch.allclose(before.state_dict()[name], after.state_dict()[name], atol=1e-6), "of start_from"
    assert not before.tells_apart(["put it", "lift it"])
    assert after.tells_apart(["put it on the plate", "move it on the plate"]), "new words are learned"
    raised = 2
    assert before.codec.bounds.q99[raised] < 0.1 < after.codec.bounds.q99[raised]


@pytest.mark.parametrize(
    ("gpus", "precision", "device", "dtype"),
    [(1, "bf16", "cuda", torch.bfloat16), (1, "fp32", "cuda", torch.float32), (0, "bf16", "cpu", torch.bfloat16)],
)
def test_cloning_is_on_the_gpu_where_there_is_one(
    gpus: int, precision: str, device: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the dtype of ``learner.precision``; here the policy goes to the cores whatever was asked for."""
    machine = Machine(cpus=2, memory=64 * GIB, gpus=(Gpu("any", 24 * GIB),) * gpus)
    asked: list[Any] = []

    def build(*args: Any, **keys: Any) -> Any:
        asked.extend((keys["device"], keys["dtype"]))
        return build_policy(*args, **keys | {"device": "cpu"})

    monkeypatch.setattr(Machine, "detect", lambda: machine)
    monkeypatch.setattr("vla_rl.policies.build.build_policy", build)

    def set_up(device: str, threads: int, matmul: str) -> None:
        asked.append(device)
        set_up_torch("cpu", threads)

    monkeypatch.setattr("vla_rl.core.devices.settings.set_up_torch", set_up)
    env = make_env(TabletopConfig(tasks=("reach",)), 1)
    collect(env, [demonstration_episode(0, 1, 0)], tmp_path / "demos.hdf5", noise=0.0)
    env.close()
    file = tmp_path / "run.yaml"
    file.write_text(
        f"env: {{name: tabletop}}\npolicy: {{size: nano, chunk_size: 4}}\nlearner: {{precision: {precision}}}\n"
        f"sft: {{demos: ['{tmp_path}/demos.hdf5'], updates: 1, batch: 2, output: '{tmp_path}/sft'}}\n"
    )
    assert main(["sft", str(file), "train.eval_episodes=0", "sft.threads=1"]) == 0
    assert asked == [device, device, dtype]
    assert {weight.dtype for weight in load_policy(tmp_path / "sft").parameters()} == {dtype}
