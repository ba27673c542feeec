"""The critic of off-policy algorithms: what it learns, and that a resumed one goes on alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from algos import make_algorithm
from algos.critic import CriticAlgorithm
from algos.iql import IQLConfig
from tests.learner.learner_tools import SPEC, config, make_learner, parameters, random_batch
from tests.runtime_fakes import trajectory
from vla_rl.core.records import SuperBatch
from vla_rl.learner.critic import CriticTrainer
from vla_rl.replay.schedule import training_episode
from vla_rl.replay.super_batch import collate

STEPS = {"critic_steps": 150, "critic_batch": 64, "critic_lr": 3e-3, "target_rate": 0.05}


def trainer(**keys: float) -> CriticTrainer:
    algorithm = make_algorithm(IQLConfig.model_validate({"gamma": 0.9} | STEPS | keys))
    assert isinstance(algorithm, CriticAlgorithm)
    return CriticTrainer(algorithm, seed=0, device=torch.device("cpu"))


def two_step_task() -> tuple[SuperBatch, np.ndarray, np.ndarray]:
    """Episodes of two chunks. The first chunk does not matter; the second one succeeds if its actions are high."""
    played = [trajectory(training_episode(i, 0, 0), 2, success=i % 2 == 0) for i in range(40)]
    batch = collate(played, 0, SPEC.max_episode_steps)
    actions = np.full(batch.logprobs.shape, -0.2, np.float32)
    actions[1::2] = np.where(batch.success, 0.7, -0.8)[:, None, None]
    features = np.zeros((batch.num_chunks, 3), np.float32)
    features[1::2, 0] = 1.0
    return batch, features, actions


def test_it_learns_which_chunk_is_better_and_what_a_state_is_worth() -> None:
    batch, *seen = two_step_task()
    critic = trainer(expectile=0.9)
    losses = [critic.train(replace(batch, policy_version=v), *seen)["critic_loss"] for v in range(4)]
    assert losses[-1] < 0.1 * losses[0]
    q, values = critic.rate(batch, *seen)
    assert q.shape == (80, 2)
    good, bad = q[1::2][batch.success].min(), q[1::2][~batch.success].max()
    assert good > 0.9
    assert bad < 0.1
    assert 0.8 < values[1::2].mean() < 1.0, "near the best chunk that was played, by the expectile"
    np.testing.assert_allclose(q[::2], 0.9 * values[1::2].mean(), atol=0.1)  # one discounted step earlier


def test_a_resumed_critic_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    batch, *seen = two_step_task()
    straight, resumed = trainer(), trainer()
    straight.save(tmp_path / "nothing.safetensors")
    assert not (tmp_path / "nothing.safetensors").exists(), "there is nothing to save before the first update"
    straight.train(batch, *seen)
    straight.save(tmp_path / "critic.safetensors")
    resumed.load(tmp_path / "critic.safetensors")
    later = replace(batch, policy_version=1)
    for critic in (straight, resumed):
        critic.train(later, *seen)
    for ours, theirs in zip(straight.rate(later, *seen), resumed.rate(later, *seen), strict=True):
        assert np.array_equal(ours, theirs)


def test_a_learner_with_a_critic_resumes_bit_exactly(tmp_path: Path) -> None:
    groups = {
        "algo": {"name": "iql", "critic_steps": 5, "minibatches": 2},
        "policy": {"size": "nano", "chunk_size": 4},
    }
    straight = make_learner(config(**groups))
    before = parameters(straight)
    metrics = straight.update(random_batch(0))
    assert metrics["learner/critic_loss"] > 0
    assert all(np.array_equal(before[name], x) for name, x in parameters(straight).items()), "only the critic learns"
    straight.save(tmp_path)
    resumed = make_learner(config(**groups))
    resumed.load(tmp_path)
    for learner in (straight, resumed):
        learner.update(random_batch(1, policy_version=1))
    ours, theirs = parameters(straight), parameters(resumed)
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert any(not np.array_equal(ours[name], before[name]) for name in ours)


def test_a_loss_that_is_not_finite_trains_nothing() -> None:
    batch, features, actions = two_step_task()
    critic = trainer()
    critic.train(batch, features, actions)
    before = critic.rate(batch, features, actions)
    critic.train(replace(batch, rewards=np.full_like(batch.rewards, np.nan)), features, actions)
    assert all(np.array_equal(a, b) for a, b in zip(before, critic.rate(batch, features, actions), strict=True))
