"""A resume whose keys do not fit what the checkpoint holds: refused before any process starts, and nothing changes."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algos import make_algorithm
from envs import env_spec
from tests.commands.test_run_folder import contents
from tests.learner.test_critic import two_step_task
from tests.runtime_fakes import trajectory
from vla_rl.commands import train as train_module
from vla_rl.commands.checkpoints import Checkpoints
from vla_rl.commands.cli import main
from vla_rl.commands.metadata import metadata
from vla_rl.config.loading import dump_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.files import write_json
from vla_rl.policies import build
from vla_rl.replay.schedule import training_episode
from vla_rl.replay.trajectory_file import save_trajectories

ENV = {"name": "tabletop", "image_size": 48}


def write_checkpoint(config: RunConfig, folder: Path, iteration: int) -> None:
    """What a run of ``config`` saves, with one waiting episode, a critic and anchors."""
    import torch

    from vla_rl.core.tensor_files import save_tensors
    from vla_rl.learner.anchors import AnchorRows, Anchors
    from vla_rl.learner.critic import CriticTrainer
    from vla_rl.policies.build import build_policy, save_policy

    spec = env_spec(config.env)
    layout = config.policy.spec(spec)
    (folder / "learner/state").mkdir(parents=True)
    policy = build_policy(config.policy, spec, config.seed)
    save_policy(config.policy, policy, folder / "policy", metadata(config, spec, ["vla-rl"]))
    trained = {f"{name}:weight": p.detach() for name, p in policy.trained_parameters().items()}
    save_tensors(trained, folder / "learner/state/0-of-1.safetensors")
    record = {name: np.zeros((3, *part.shape), part.dtype) for name, part in layout.record.items()}
    images, proprio = np.zeros((3, 1, 48, 48, 3), np.uint8), np.zeros((3, spec.proprio_dim), np.float32)
    waiting = replace(trajectory(training_episode(0, 0, 0)), images=images, proprio=proprio, record=record)
    save_trajectories(folder / "trajectories.npz", [waiting])
    rows = AnchorRows(images, proprio, np.zeros(3, np.int32), np.full(3, 4, np.int32), record)
    anchors = Anchors(memory=1)
    anchors._kept.add([rows])
    anchors.save(folder / "learner/anchors.npz")
    critic = CriticTrainer(make_algorithm(config.algo), 0, torch.device("cpu"))  # type: ignore[arg-type]
    batch, features, actions = two_step_task()
    critic.train(batch, features, actions)
    critic.save(folder / "learner/critic.safetensors")
    write_json(folder / "state.json", {"policy_version": iteration, "seconds": 1.0, "store": {}})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of IQL with checkpoints of the iterations 1 and 2."""
    path = tmp_path_factory.mktemp("runs") / "run"
    algo: dict[str, Any] = {"name": "iql", "critic_steps": 1}
    policy = {"name": "openvla_oft", "size": "nano", "chunk_size": 4}
    values = {"env": ENV, "policy": policy, "algo": algo, "log": {"dir": str(path.parent), "name": "run"}}
    config = RunConfig.model_validate(values)
    path.mkdir()
    (path / "config.yaml").write_text(dump_config(config))
    (path / "metrics.jsonl").write_text("".join(f'{{"iteration": {i}}}\n' for i in range(3)))
    checkpoints = Checkpoints(path / "checkpoints", 2)
    with checkpoints.write(1) as folder:
        write_checkpoint(config, folder, 1)
    with checkpoints.write(2) as folder:
        shutil.copytree(
            path / "checkpoints/000001", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("files.json")
        )
    return path


@pytest.mark.parametrize(
    ("target", "keys", "expected"),
    [
        ("", ["policy.size=tiny"], "with policy.size=tiny, the policy trains other weights"),
        ("@1", ["policy.lora.rank=4"], "the policy trains other weights"),
        ("@1", ["policy.chunk_size=8"], r"record.tokens is \[8, 7\] uint8 of each chunk, and \[4, 7\] uint8 in traj"),
        ("", ["env.image_size=32"], r"images is \[1, 32, 32, 3\] uint8 of each chunk, and \[1, 48, 48, 3\] uint8 in"),
        ("@1", ["policy.head=l1"], r"record.actions is \[4, 7\] float32 of each chunk, and no part in trajectories"),
        ("@1", ["env.tasks=[push]"], "the tasks are 4 others than the 4 that the run counts successes of"),
        ("", ["env=workload", "env.image_size=48"], "the tasks are 2 others than the 4"),
        ("@1", ["algo.critics=3"], "the critic is 3 networks that rate 28 numbers, and 2 that rate 28"),
        ("@1", ["algo=ppo", "world_model={}"], "the run gets a world model, and .* has none"),
        ("@1", ["train.iterations=0"], "train.iterations=0"),
        ("@7", [], "no complete checkpoint of iteration 7; there are: 1, 2"),
    ],
)
def test_a_refused_resume_leaves_the_run_equal_to_the_byte(
    run: Path, target: str, keys: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(run)
    assert main(["train", "--resume", f"{run}{target}", *keys]) == 2
    assert re.search(expected, capsys.readouterr().err)
    assert contents(run) == before


@pytest.mark.parametrize("keys", [[], ["train.iterations=9"], ["policy.temperature=1.5"], ["algo.gamma=0.9"]])
def test_keys_that_fit_are_taken(run: Path, keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple] = []
    monkeypatch.setattr(train_module, "_run", lambda *arguments: begun.append(arguments))
    before = contents(run)
    assert main(["train", "--resume", f"{run}@1", *keys]) == 0
    assert len(begun) == 1
    assert contents(run) == before, "the run has not begun yet"


def test_a_run_that_began_with_a_checkpoint_is_compared_without_reading_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, warm := tmp_path / "warm")
    text = (run / "config.yaml").read_text()
    assert text.count("  checkpoint: null") == 1
    began_with = warm / "checkpoints/000001/policy"
    (warm / "config.yaml").write_text(text.replace("  checkpoint: null", f"  checkpoint: {began_with}"))
    monkeypatch.setattr(build, "build_policy", None)
    before = contents(warm)
    assert main(["train", "--resume", str(warm), "policy.lora.rank=4"]) == 2
    assert re.search(
        r"the policy trains [\d,]+ numbers, and [\d,]+ in .*/000002/learner/state", capsys.readouterr().err
    )
    assert contents(warm) == before


def test_a_run_whose_config_an_earlier_version_has_spoilt_can_be_corrected(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(run, spoilt)
    text = (run / "config.yaml").read_text()
    (spoilt / "config.yaml").write_text(
        text.replace("chunk_size: 4", "chunk_size: 8").replace("size: nano", "size: tiny")
    )
    begun: list[tuple] = []
    monkeypatch.setattr(train_module, "_run", lambda *arguments: begun.append(arguments))
    assert main(["train", "--resume", str(spoilt), "policy.chunk_size=4", "policy.size=nano"]) == 0
    assert len(begun) == 1
