"""A whole run with a world model: two ledgers, one super-batch, and a resume."""

import json
from pathlib import Path

import pytest

from tests.commands.test_train import _balanced, _metrics
from tests.metrics_page import undocumented
from vla_rl.commands.checkpoints import Checkpoints
from vla_rl.commands.cli import main
from vla_rl.commands.train import train
from vla_rl.config.loading import load_config

pytestmark = pytest.mark.slow


def _imagined_balanced(m: dict) -> bool:
    ended = sum(m[f"episodes/imagined_{name}"] for name in ("trained", "unused", "lost", "waiting"))
    return m["episodes/imagined_delivered"] == ended


def test_the_policy_practises_in_a_world_model_and_a_resume_continues_both_ledgers(tmp_path: Path):
    config = load_config(
        None,
        [
            "env=tabletop",
            "env.max_episode_steps=16",
            "policy.size=nano",
            "policy.chunk_size=4",
            "algo=world_model",
            "world_model.warmup_episodes=4",
            "world_model.branches=3",
            "world_model.audit_chunks=64",
            "world_model.horizon=2",
            "world_model.horizon_gap=100",
            "world_model.frame_width=4",
            "world_model.frame_samples_per_chunk=2",
            "train.iterations=6",
            "train.batch_episodes=4",
            "train.checkpoint_every=3",
            "train.eval_episodes=0",
            "placement.env_workers=1",
            f"log.dir={tmp_path}",
            "log.name=run",
        ],
    )
    assert config.algo.name == "ppo"
    assert train(config) == 0
    run = tmp_path / "run"
    metrics = _metrics(run)
    assert all(_balanced(m) and _imagined_balanced(m) for m in metrics)
    last = metrics[-1]
    assert last["world_model/version"] > 0
    assert last["world_model/archive_episodes"] >= 4
    folder = Checkpoints(run / "checkpoints", keep=2).newest() / "world_model"
    state = json.loads((folder / "state.json").read_text())
    assert state["trainer"]["version"] > 0
    assert train(config.with_values({"train.iterations": 12}), resume=run) == 0
    after = _metrics(run)
    assert after[-1]["iteration"] == 12
    assert all(_balanced(m) and _imagined_balanced(m) for m in after)
    assert main(["world-model", str(run), "--output", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert (tmp_path / "x_futures.png").stat().st_size > 10_000
    assert after[-1]["world_model/depth1_predictions"] > 0
    assert after[-1]["world_model/loss_frames"] > 0
    assert after[-1]["episodes/imagined_delivered"] > 0
    assert max(m["throughput/imagined_per_s"] for m in after) > 0
    assert not undocumented(set().union(*after)), "docs/metrics.md"
    assert after[-1]["world_model/version"] > state["trainer"]["version"]
    assert after[-1]["episodes/imagined_delivered"] >= last["episodes/imagined_delivered"]


def test_the_critic_of_off_policy_learning_practises_too(tmp_path: Path):
    settings = [
        "algo=td3_bc",
        "policy=gaussian",
        "policy.chunk_size=4",
        "policy.channels=4",
        "policy.width=32",
        "env=tabletop",
    ]
    settings += ["env.max_episode_steps=16", "algo.critic_reads=state", "algo.batch=32", "algo.critic_warmup=8"]
    settings += ["world_model={warmup_episodes: 4, audit_chunks: 64}", "train.iterations=6", "train.batch_episodes=4"]
    settings += ["train.eval_episodes=0", "placement.env_workers=1", f"log.dir={tmp_path}", "log.name=run"]
    assert train(load_config(None, settings)) == 0
    metrics = _metrics(tmp_path / "run")
    assert all(_balanced(m) and _imagined_balanced(m) for m in metrics)
    assert metrics[-1]["episodes/imagined_trained"] > 0
    assert metrics[-1]["learner/imagined_loss"] > 0
    assert metrics[-1]["learner/optimizer_steps"] > 0
    assert not undocumented(set().union(*metrics)), "docs/metrics.md"
