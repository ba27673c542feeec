"""SAC on the noise of a frozen flow policy."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.learner.learner_tools import random_batch
from tests.learner.test_off_policy import SPEC, made, some_states, weights
from tests.runtime_fakes import A, K
from vla_rl.config.loading import load_config
from vla_rl.core.errors import UserError
from vla_rl.core.records import SuperBatch
from vla_rl.learner.build import make_learner
from vla_rl.learner.gradient_learner import GradientLearner
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.build import build_policy, save_policy
from vla_rl.replay.memory import Transitions

STEERED = 'policy={"name": "pi0", "chunk_size": 4, "denoise_steps": 2, "steer": {"width": 32, "initial_std": 0.5}}'


def steering(*changes: str) -> GradientLearner:
    learner = made(STEERED, "algo.target_entropy=-1", "algo.critics=2", *changes, algo="dsrl")
    assert isinstance(learner, GradientLearner)
    return learner


def acted(seed: int = 0, version: int = 0) -> SuperBatch:
    batch = random_batch(seed, episodes=6, policy_version=version)
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(batch.num_chunks, 1, A)).astype(np.float32)
    actions = rng.uniform(-1, 1, (batch.num_chunks, K, A)).astype(np.float32)
    return replace(batch, record={"noise": noise, "actions": actions})


def test_it_trains_what_chooses_the_noise_and_nothing_else(tmp_path: Path) -> None:
    """The memory keeps what the frozen policy reads of an image, and a resumed learner goes on to the bit."""
    learner, again = steering(), steering()
    before = weights(learner)
    learner.update(acted())
    (kept, *_) = learner.memory.episodes
    assert kept.actions.shape[1:] == (1, A)
    assert kept.images.dtype == np.float32
    assert kept.images.ndim == 2
    learner.save(tmp_path)
    again.load(tmp_path)
    ends = [x.update(acted(1, version=1)) for x in (learner, again)]
    assert ends[0] == ends[1]
    assert ends[0]["learner/optimizer_steps"] > 0
    assert all(np.array_equal(x, weights(again)[name]) for name, x in weights(learner).items())
    moved = {name for name, x in weights(learner).items() if not np.array_equal(before[name], x)}
    assert moved
    assert all(name.startswith("steering.") for name in moved)
    assert {name for name, _ in learner.parameters()} >= moved, "these are published"


def test_each_new_observation_passes_the_policy_once_as_the_planner_counts() -> None:
    learner, rows = steering(), list[int]()
    read = learner.policy.read

    def counted(seen: PolicyInput) -> Any:
        rows.append(len(seen.images))
        return read(seen)

    learner.policy.read = counted
    batch = acted()
    learner.update(batch)
    work = learner.algorithm.config.work(K)
    assert (work.epochs, work.critic_passes) == (0, 0)
    observations = sum(len(e.images) for e in learner.memory.episodes)
    assert batch.num_chunks <= observations <= batch.num_chunks + batch.num_episodes
    assert sum(rows) == work.extra_passes * observations


def test_the_noise_follows_the_critic(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for sign in (1.0, -1.0):
        learner = steering("learner.lr=1e-2", "algo.alpha=0.01")
        critic = learner._made(learner.policy.value_head[0].in_features, A).online
        monkeypatch.setattr(critic, "rate", lambda state, x, sign=sign: sign * x.mean(dim=(1, 2))[:, None])
        seen, task = some_states(4)
        record = {"noise": np.zeros((4, 1, A), np.float32), "actions": np.zeros((4, K, A), np.float32)}
        rest = np.zeros((4, 1, K), np.float32), np.full((4, 1), K, np.int32), np.zeros(4, bool), np.zeros(4, bool)
        t = Transitions(seen, seen, task, record["noise"], *rest, record)
        for step in range(15):
            learner._actor_step(t, np.random.default_rng(step))
        found[sign] = learner._choices(learner._seen(seen, task), record).means.mean().item()
    assert found[1.0] > 0.3
    assert found[-1.0] < -0.3


def test_other_algorithms_refuse_a_folder_with_such_a_network(tmp_path: Path) -> None:
    config = load_config(None, [STEERED, "algo=dsrl", "env=tabletop"])
    save_policy(config.policy, build_policy(config.policy, SPEC, 0), tmp_path / "policy", {})
    changes = 'policy={"name": "pi0", "chunk_size": 4}', f"policy.checkpoint={tmp_path}/policy"
    config = load_config(None, [*changes, "algo=ppo", "env=tabletop"])
    policy = build_policy(config.policy, SPEC, 0)
    ranks: Any = {"rank": 0, "world_size": 1, "device": "cpu", "lease": nullcontext}
    with pytest.raises(UserError, match=r"has a network that chooses its noise, which algo\.name=ppo does not train"):
        make_learner(config, policy, SPEC, **ranks)
