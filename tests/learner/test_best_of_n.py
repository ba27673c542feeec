"""Choosing among chunks and cloning the choice, for policies of every kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.learner.learner_tools import random_batch
from tests.learner.test_off_policy import SPEC, made, some_states, weights
from tests.runtime_fakes import A, K
from vla_rl.core.records import SuperBatch
from vla_rl.learner.choice_learner import ChoiceLearner
from vla_rl.replay.memory import Transitions

CHOICE = "algo.candidates=3", "algo.critic_reads=features", "algo.updates_per_step=0.12", "algo.critic_warmup=2"
KINDS = {
    "gaussian": [],
    "tokens": ['policy={"name": "openvla_oft", "size": "nano", "chunk_size": 4}'],
    "regression": ['policy={"name": "openvla_oft", "size": "nano", "chunk_size": 4, "head": "l1"}'],
    "flow": ['policy={"name": "pi0", "chunk_size": 4, "denoise_steps": 2, "random_steps": "last"}'],
}


def choosing(kind: str, *changes: str) -> ChoiceLearner:
    learner = made(*CHOICE, *KINDS[kind], *changes, algo="best_of_n")
    assert isinstance(learner, ChoiceLearner)
    return learner


def acted(learner: ChoiceLearner, seed: int = 0, version: int = 0) -> SuperBatch:
    batch = random_batch(seed, episodes=6, policy_version=version)
    rng = np.random.default_rng(seed)
    actions = rng.uniform(-1, 1, (batch.num_chunks, K, A)).astype(np.float32)
    return replace(batch, record=learner.policy.encode(actions, rng))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_policy_clones_the_choice_and_resumes_exactly(tmp_path: Path, kind: str) -> None:
    learner, again = choosing(kind), choosing(kind)
    before = weights(learner)
    learner.update(acted(learner))
    learner.save(tmp_path)
    again.load(tmp_path)
    ends = [x.update(acted(learner, 1, version=1)) for x in (learner, again)]
    assert ends[0] == ends[1]
    assert ends[0]["learner/optimizer_steps"] > 0
    assert ends[0]["learner/choice_gain"] > 0
    assert np.isfinite(ends[0]["learner/explained_variance"])
    assert all(np.array_equal(x, weights(again)[name]) for name, x in weights(learner).items())
    moved = {name for name, x in weights(learner).items() if not np.array_equal(before[name], x)}
    assert moved
    assert not any(name.startswith("value_head") for name in moved)


def test_a_batch_in_parts_makes_the_same_choice_and_step() -> None:
    whole, parts = choosing("tokens"), choosing("tokens", "algo.micro_batch=3")
    one, other = (learner.update(acted(learner)) for learner in (whole, parts))
    assert one["learner/optimizer_steps"] > 0
    for name in one:
        assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    assert all(np.allclose(x, weights(parts)[name], atol=2e-5) for name, x in weights(whole).items())


def transitions(learner: ChoiceLearner, success: bool) -> Transitions:
    """One state, 16 times; executed chunks are at one end of the range, of which one step was executed."""
    seen, task = some_states(1)
    seen = type(seen)(
        *(np.repeat(getattr(seen, name), 16, axis=0) for name in ("images", "proprio", "elapsed", "state"))
    )
    record = learner.policy.encode(np.full((16, K, A), 0.9, np.float32), np.random.default_rng(0))
    actions, steps = learner.policy.normalized_actions(record), np.ones((16, 1), np.int32)
    flags = np.zeros(16, bool), np.full(16, success)
    return Transitions(
        seen, seen, np.repeat(task, 16), actions, np.zeros((16, 1, K), np.float32), steps, *flags, record
    )


def rated_by_their_mean(learner: ChoiceLearner, monkeypatch: pytest.MonkeyPatch, sign: float = 1.0) -> None:
    critic = learner._made(32, K * A).online
    monkeypatch.setattr(critic, "rate", lambda state, x: sign * x.mean(dim=(1, 2))[:, None])
    monkeypatch.setattr(critic, "state", lambda seen, given: given)


@pytest.mark.parametrize(("kind", "steps"), [("gaussian", 20), ("tokens", 8)])
def test_what_the_critic_prefers_becomes_likely(kind: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A critic that rates chunks by their mean, with either sign; no chunk was executed in a success."""
    found = {}
    for sign in (1.0, -1.0):
        learner = choosing(kind, "learner.lr=1e-2", "algo.candidates=8")
        rated_by_their_mean(learner, monkeypatch, sign)
        t = transitions(learner, success=False)
        metrics = [learner._actor_step(t, np.random.default_rng(step)) for step in range(steps)]
        assert metrics[0]["choice_gain"] > 0
        assert metrics[0]["chosen_executed"] == 0
        found[sign] = sign * metrics[-1]["actor_q"]
    assert found[1.0] > found[-1.0] + 0.1


def test_an_executed_chunk_of_a_success_may_be_the_choice_as_far_as_it_was_executed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = []
    for tail in (0.9, 100.0):
        learner = choosing("gaussian")
        rated_by_their_mean(learner, monkeypatch)
        t = transitions(learner, success=True)
        t.record["actions"] = t.record["actions"].copy()
        t.record["actions"][:, 1:] = tail
        metrics = learner._actor_step(t, np.random.default_rng(0))
        assert metrics["chosen_executed"] == 1
        losses.append(metrics["actor_loss"])
    assert losses[0] == losses[1]


def test_chunks_are_drawn_as_in_inference() -> None:
    learner = choosing("tokens")
    seen, task = some_states(3)
    drawn = learner._drawn_chunks(learner._seen(seen, task), np.random.default_rng(0))
    again = learner._drawn_chunks(learner._seen(seen, task), np.random.default_rng(1))
    spec = learner.config.policy.spec(SPEC)
    assert drawn.keys() == spec.record.keys()
    assert drawn["tokens"].shape == (3, *spec.record["tokens"].shape)
    assert drawn["tokens"].dtype == np.dtype(spec.record["tokens"].dtype)
    assert (drawn["tokens"] != again["tokens"]).any()
    assert learner.policy.training
    assert torch.is_grad_enabled()
