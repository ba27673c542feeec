"""Cloned chunks besides an update: where they come from, what they do, and that a resumed run clones the same."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from tests.learner.learner_tools import SPEC, config, make_learner, parameters, random_batch
from tests.runtime_fakes import trajectory
from vla_rl.core.records import EXPERT, EXPERT_STEPS, SuperBatch, take_rows
from vla_rl.learner.anchors import AnchorRows, Anchors
from vla_rl.learner.learner import Learner
from vla_rl.replay.schedule import training_episode
from vla_rl.replay.super_batch import collate


def observe(anchors: Anchors, batch: SuperBatch) -> None:
    """Of successful episodes, as by most algorithms."""
    anchors.observe(batch, np.repeat(batch.success, np.diff(batch.offsets)))


def batch_of(successes: list[bool], first: int = 0) -> SuperBatch:
    """Episodes of 1, 2, ... chunks; tokens tell their number."""
    played = [trajectory(training_episode(first + i, 0, 0), i + 1, success=s) for i, s in enumerate(successes)]
    return collate(played, 0, SPEC.max_episode_steps)


def learner_with(anchors: Anchors | None, **groups: dict) -> Learner:
    plain = make_learner(config(**groups))
    plain._anchors = anchors
    return plain


def test_the_memory_keeps_the_last_successful_episodes() -> None:
    anchors = Anchors(memory=2)
    assert anchors.draw(3, seed=0, policy_version=0, step=0) is None
    observe(anchors, batch_of([True, False, True]))
    observe(anchors, batch_of([False, True], first=10))
    drawn = anchors.draw(200, seed=0, policy_version=0, step=0)
    assert drawn is not None
    numbers, counts = np.unique(drawn.record["tokens"][:, 0, 0], return_counts=True)
    assert numbers.tolist() == [2, 11], "episode 0 has made room; failures are never kept"
    assert counts / 200 == pytest.approx([3 / 5, 2 / 5], abs=0.1), "all chunks alike"
    assert (drawn.num_steps == 4).all()
    assert drawn.images[:, 0, 0, 0, 0].tolist() == drawn.record["tokens"][:, 0, 0].tolist()


def test_half_comes_from_demonstrations_which_the_disk_does_not_hold(tmp_path: Path) -> None:
    batch = batch_of([True, True], first=40)
    chunks = np.arange(batch.num_chunks)
    rest = batch.task[chunks], batch.num_steps[chunks], {"tokens": batch.record["tokens"]}
    shown = AnchorRows(batch.images[batch.obs_row[chunks]], batch.proprio[batch.obs_row[chunks]], *rest)
    anchors, loaded = Anchors(shown, memory=9), Anchors(shown, memory=9)
    drawn = anchors.draw(20, 0, 0, 0)
    assert drawn is not None
    assert (drawn.record["tokens"] >= 40).all(), "alone while there is nothing else"
    observe(anchors, batch_of([True] * 4))
    anchors.save(tmp_path / "anchors.npz")
    loaded.load(tmp_path / "anchors.npz")
    for source in (anchors, loaded):
        drawn = source.draw(21, 0, 0, 0)
        assert drawn is not None
        assert np.count_nonzero(drawn.record["tokens"][:, 0, 0] >= 40) == 11
    frozen = Anchors(shown)
    observe(frozen, batch_of([True] * 4))
    drawn = frozen.draw(20, 0, 0, 0)
    assert drawn is not None
    assert (drawn.record["tokens"] >= 40).all(), "without a memory, nothing of the run is kept"


def test_draws_depend_on_seed_version_and_step_alone_and_survive_the_disk(tmp_path: Path) -> None:
    anchors, loaded = Anchors(memory=9), Anchors(memory=9)
    anchors.save(tmp_path / "none.npz")
    loaded.load(tmp_path / "none.npz")
    assert loaded.draw(3, 0, 0, 0) is None
    observe(anchors, batch_of([True] * 4))
    anchors.save(tmp_path / "some.npz")
    loaded.load(tmp_path / "some.npz")
    kinds = {}
    for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        drawn, again = anchors.draw(50, *key), loaded.draw(50, *key)
        assert drawn is not None
        assert again is not None
        for field in fields(AnchorRows):
            ours, theirs = getattr(drawn, field.name), getattr(again, field.name)
            assert (
                np.array_equal(ours["tokens"], theirs["tokens"]) if field.name == "record" else (ours == theirs).all()
            )
        kinds[key] = tuple(drawn.record["tokens"][:, 0, 0].tolist())
    assert len(set(kinds.values())) == 4


def test_cloning_raises_the_probability_of_the_anchors_and_adds_to_the_gradient() -> None:
    batch = random_batch()
    rows = np.arange(3)
    seen = batch.obs_row[rows]
    steps = batch.num_steps[rows]
    kept = AnchorRows(batch.images[seen], batch.proprio[seen], batch.task[rows], steps, take_rows(batch.record, rows))
    losses = []
    settings = {"learner": {"micro_batch": 5, "lr": 1e-3}, "policy": {"size": "nano", "chunk_size": 4}}
    learner = learner_with(
        Anchors(kept), algo={"name": "ppo", "bc_coef": 1.0, "bc_batch": 12, "minibatches": 2}, **settings
    )
    for version in range(12):
        metrics = learner.update(replace(batch, policy_version=version))
        losses.append(metrics["learner/cloning_loss"])
    assert losses[0] > np.log(256), "random tokens under random weights"
    assert losses[-1] < 0.8 * losses[0]


def test_micro_batches_do_not_change_what_is_cloned() -> None:
    found = []
    for micro_batch in (64, 5):
        anchors = Anchors(memory=9)
        settings = {"learner": {"micro_batch": micro_batch, "lr": 1e-3}, "policy": {"size": "nano", "chunk_size": 4}}
        learner = learner_with(anchors, algo={"name": "ppo", "bc_coef": 0.5, "bc_batch": 13}, **settings)
        batch = random_batch()
        batch.success[:] = True
        metrics = learner.update(batch)
        found.append((parameters(learner), metrics["learner/cloning_loss"]))
    (a, loss_a), (b, loss_b) = found
    assert loss_a == pytest.approx(loss_b, rel=1e-5)
    assert max(np.abs(a[name] - b[name]).max() for name in a) < 1e-3


def test_a_resumed_learner_clones_what_the_other_would_have(tmp_path: Path) -> None:
    settings = {"algo": {"name": "ppo", "bc_coef": 0.5, "bc_batch": 8}, "policy": {"size": "nano", "chunk_size": 4}}
    straight = learner_with(Anchors(memory=9), **settings)
    first = random_batch(0)
    first.success[:] = True
    straight.update(first)
    straight.save(tmp_path)
    resumed = learner_with(Anchors(memory=9), **settings)
    resumed.load(tmp_path)
    for learner in (straight, resumed):
        learner.update(random_batch(1, policy_version=1))
    ours, theirs = parameters(straight), parameters(resumed)
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_the_experts_actions_take_the_place_of_the_policys() -> None:
    """In the policy's own terms: what is trained decodes to what the expert did."""
    learner, batch = make_learner(config(algo={"name": "dagger", "epochs": 1})), random_batch()
    shown = np.arange(batch.num_chunks) % 2 == 0
    actions = np.random.default_rng(0).uniform(-0.9, 0.9, (batch.num_chunks, 4, 7)).astype(np.float32)
    batch.record[EXPERT] = np.where(shown[:, None, None], actions, np.float32(0))
    batch.record[EXPERT_STEPS] = batch.num_steps * shown
    before = batch.record["tokens"].copy()
    seen = learner._as_shown(batch).record
    assert np.array_equal(batch.record["tokens"], before), "the batch is shared with other ranks"
    assert np.array_equal(seen["tokens"][~shown], before[~shown])
    decoded = learner.policy.decode({"tokens": seen["tokens"]})
    assert np.abs(decoded - actions)[shown].max() < 0.01
    metrics = learner.update(batch)
    assert metrics["learner/optimizer_steps"] == learner.algorithm.minibatches
    assert "learner/update_kl" not in metrics, "its estimate holds for what the policy has drawn"
    rated = learner._passes.evaluate(learner._engine, learner._as_shown(batch)).logprobs.mean(axis=(1, 2))
    assert rated[shown].mean() > rated[~shown].mean(), "it is cloned, the rest is not"
