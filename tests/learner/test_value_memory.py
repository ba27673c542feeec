"""The value head learns from old episodes: their returns, its steps, any ZeRO stage, and an exact resume."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from algos import make_algorithm
from algos.actor_critic import ClippedValue
from algos.ppo import PPOConfig
from tests.learner.learner_tools import SPEC, config, make_learner, parameters, random_batch, run_ranks
from tests.runtime_fakes import trajectory
from vla_rl.core.records import SuperBatch
from vla_rl.learner.value_memory import ValueMemory
from vla_rl.policies.base.value_head import ValueHead
from vla_rl.replay.schedule import training_episode
from vla_rl.replay.super_batch import collate

KEYS = {"name": "ppo", "minibatches": 2, "value_memory": 8, "value_steps": 5, "value_batch": 16}


WARM = KEYS | {"value_warmup": 1}  # the head learns alone in the first update


def memory(features: int = 6, **keys: Any) -> ValueMemory:
    algorithm = make_algorithm(PPOConfig.model_validate(KEYS | keys))
    assert isinstance(algorithm, ClippedValue)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = ValueHead(features, 16, 8)
        for parameter in (*head[-1].parameters(), head.time):
            torch.nn.init.normal_(parameter)
    return ValueMemory(algorithm, head, seed=0, device=torch.device("cpu"))


def seen(batch: SuperBatch, features: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (batch.num_chunks, features), (batch.num_episodes, features)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)  # type: ignore[return-value]


def returns_by_definition(
    rewards: list[float], values: list[float], after: float, gamma: float, lam: float
) -> list[float]:
    """The mean of n-step returns with weights (1 - λ) λ^(n - 1), the longest one with what is left."""
    found, known = [], [*values, after]
    for t in range(len(rewards)):
        left, total = len(rewards) - t, 0.0
        for n in range(1, left + 1):
            earned = sum(gamma**k * rewards[t + k] for k in range(n)) + gamma**n * known[t + n]
            total += (lam ** (n - 1) * (1 - lam) if n < left else lam ** (n - 1)) * earned
        found.append(total)
    return found


@pytest.mark.parametrize("bootstrap", ["never", "truncated", "always"])
@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_returns_are_those_of_the_definition_under_the_head_as_it_is(bootstrap: str, lam: float) -> None:
    kept = memory(bootstrap=bootstrap, gae_lambda=lam, gamma=0.9)
    batch = random_batch(episodes=7)
    features, ends = seen(batch)
    kept.observe(batch, features, ends, reads_time=True)
    exact, expected = copy.deepcopy(kept.head).double(), []
    for b in range(7):
        rows = slice(batch.offsets[b], batch.offsets[b + 1])
        rewards = [
            float(r[:n].sum(dtype=np.float64)) for r, n in zip(batch.rewards[rows], batch.num_steps[rows], strict=True)
        ]
        with torch.no_grad():
            at = torch.from_numpy(batch.elapsed[batch.obs_row[rows]]).double()
            values = exact(torch.from_numpy(features[rows]).double(), at).tolist()
            then = torch.from_numpy(batch.elapsed[batch.final_obs_row[b : b + 1]]).double()
            after = exact(torch.from_numpy(ends[b : b + 1]).double(), then).item()
        goes_on = batch.final_obs_row[b] >= 0 and (
            bootstrap == "always" or (bootstrap == "truncated" and batch.truncated[b])
        )
        expected += returns_by_definition(rewards, values, after if goes_on else 0.0, 0.9, lam)
        exact_returns = kept._algorithm.lambda_returns(
            np.array(rewards), np.array(values), np.array([0, len(rewards)]), np.array([after]), np.array([goes_on])
        )
        np.testing.assert_allclose(exact_returns, expected[-len(rewards) :], rtol=0, atol=1e-10)
    np.testing.assert_allclose(kept.returns(), expected, rtol=0, atol=1e-5)


def test_the_first_layer_reads_standardized_features_and_values_stay() -> None:
    kept, batch = memory(value_memory_lr=1e-30), random_batch()
    features, ends = seen(batch)
    features = 40 + features * np.array([1e-6, 0.1, 1, 1, 5, 5], np.float32)
    kept.observe(batch, features, ends, reads_time=True)
    state, elapsed = torch.from_numpy(features), torch.from_numpy(batch.elapsed[batch.obs_row])
    mean, deviation = kept._scale()
    with torch.no_grad():
        values = kept.head(state, elapsed)
        kept._read(mean, deviation)
        scaled = (state - mean) / deviation
        assert (kept.head(scaled, elapsed) - values).abs().max() < 1e-3 * values.abs().max()
        kept._read(-mean / deviation, 1 / deviation)
    deviations = scaled.std(dim=0, correction=0)
    assert torch.allclose(deviations[2:], torch.ones(4), atol=1e-3)
    assert deviations[0] < 1e-3, "what hardly moves is not blown up"
    kept.train(0)  # at a rate near 0
    with torch.no_grad():
        assert (kept.head(state, elapsed) - values).abs().max() < 1e-3 * values.abs().max()


def test_it_learns_what_old_episodes_returned() -> None:
    """From features of an offset and a scale that plain steps at this rate would not cope with."""
    kept = memory(features=3, value_memory=60, value_steps=60, value_batch=64, value_memory_lr=3e-3)
    explained = []
    for version in range(3):
        played = [trajectory(training_episode(i, 0, 0), 2, success=i % 2 == 0) for i in range(40)]
        batch = collate(played, version, SPEC.max_episode_steps)
        features = np.full((batch.num_chunks, 3), 30.0, np.float32)
        features[:, 1] += 0.02 * np.repeat(batch.success, 2)
        kept.observe(batch, features, None, reads_time=False)
        metrics = kept.train(version)
        explained.append(metrics["value_memory_explained"])
    assert metrics["value_memory_episodes"] == 60, "the newest ones"
    assert explained[-1] > 0.95
    state = torch.tensor([[30.0, 30.0, 30.0], [30.0, 30.02, 30.0]])
    with torch.no_grad():
        bad, good = kept.head(state, torch.zeros(2)).tolist()
    assert abs(bad) < 0.1
    assert good > 0.9


def test_an_episode_is_kept_once() -> None:
    kept, batch = memory(), random_batch(episodes=6)
    kept.observe(replace(batch, new_episodes=2), *seen(batch), reads_time=False)
    assert len(kept._kept.episodes) == 2
    assert all(not e.elapsed.any() for e in kept._kept.episodes), "a head that does not read the time gets none"
    for version in range(1, 4):
        kept.observe(random_batch(version), *seen(random_batch(version)), reads_time=True)
    assert len(kept._kept.episodes) == 8


def test_a_loss_that_is_not_finite_trains_nothing() -> None:
    kept, batch = memory(), random_batch()
    features, ends = seen(batch)
    kept.observe(batch, features, ends, reads_time=True)
    before = [p.detach().clone() for p in kept.head.parameters()]
    for e in kept._kept.episodes:
        e.elapsed[:] = np.nan
    kept.returns = lambda: np.zeros(batch.num_chunks)  # type: ignore[method-assign]
    kept.train(0)
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(before, kept.head.parameters(), strict=True))


@pytest.mark.parametrize(
    ("settings", "warmup"),
    [
        ({}, 0),
        ({"precision": "bf16"}, 1),
        ({"precision": "bf16", "zero_stage": 1}, 0),
        ({"zero_stage": 2}, 1),
        ({"zero_stage": 3}, 0),
    ],
)
def test_the_learners_head_is_the_one_that_old_episodes_have_trained(
    settings: dict[str, Any], warmup: int, tmp_path: Path
) -> None:
    """The trunk is what it would be without; a resumed run goes on to the bit."""
    settings, algo = {"ema": 0.9} | settings, KEYS | {"value_warmup": warmup}
    straight = make_learner(config(algo=algo, learner=settings))
    metrics = straight.update(random_batch(0))
    assert metrics["learner/value_memory_episodes"] == 5
    assert np.isfinite(metrics["learner/value_memory_loss"])
    trained = straight._values.head.state_dict()
    close = 1e-7 if settings.get("precision") != "bf16" else 1e-2
    found = parameters(straight)
    for name, value in trained.items():
        np.testing.assert_allclose(found[f"value_head.{name}"], value.numpy(), rtol=close, atol=close)
    without = make_learner(config(algo=algo | {"value_memory": 0, "values": "recomputed"}, learner=settings))
    without.update(random_batch(0))
    apart = {n for n, x in parameters(without).items() if not np.array_equal(x, found[n])}
    assert apart
    assert all(name.startswith("value_head.") for name in apart)

    straight.save(tmp_path)
    resumed = make_learner(config(algo=algo, learner=settings))
    resumed.load(tmp_path)
    figures = [learner.update(random_batch(1, policy_version=1)) for learner in (straight, resumed)]
    assert figures[0] == figures[1]
    ours, theirs = parameters(straight), parameters(resumed)
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert figures[0]["learner/value_memory_episodes"] == 8


def test_new_episodes_are_rated_before_the_head_learns_from_them() -> None:
    learner = make_learner(config(algo=KEYS | {"value_warmup": 2, "bootstrap": "truncated"}))
    learner.update(random_batch(0))
    batch = random_batch(1, policy_version=1)
    rated = learner._passes.evaluate(learner._engine, batch)
    _, targets, _ = learner._targets(batch)
    np.testing.assert_array_equal(targets.old_values, rated.values)
    kept = learner._values._kept.episodes
    assert {e.continues for e in kept} == {True, False}
    np.testing.assert_array_equal(kept[-1].features[0], rated.features[batch.offsets[-2]])


def test_a_super_batch_that_is_not_finite_is_not_kept() -> None:
    learner, batch = make_learner(config(algo=KEYS)), random_batch()
    batch.rewards[0] = np.nan
    assert learner.update(batch)["learner/skipped_steps"] == 2
    assert learner.update(random_batch(1))["learner/value_memory_episodes"] == 5


def _on_rank(rank: int, world_size: int, port: int, zero_stage: int) -> dict[str, Any]:
    settings = {"ranks": world_size, "zero_stage": zero_stage, "micro_batch": 3}
    learner = make_learner(config(algo=WARM, learner=settings), rank, world_size, port)
    metrics = [learner.update(random_batch(seed, policy_version=seed)) for seed in range(2)]
    return {"parameters": parameters(learner), "metrics": metrics}


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_two_ranks_have_one_value_head(zero_stage: int) -> None:
    alone = make_learner(config(algo=WARM))
    metrics = [alone.update(random_batch(seed, policy_version=seed)) for seed in range(2)]
    first, second = run_ranks(_on_rank, 2, zero_stage)
    assert first["metrics"] == second["metrics"]
    for name, value in parameters(alone).items():
        np.testing.assert_array_equal(first["parameters"][name], second["parameters"][name])
        if name.startswith("value_head."):
            np.testing.assert_allclose(first["parameters"][name], value, atol=1e-3)
    for ours, theirs in zip(metrics, first["metrics"], strict=True):
        assert ours["learner/value_memory_loss"] == pytest.approx(theirs["learner/value_memory_loss"], rel=1e-3)
