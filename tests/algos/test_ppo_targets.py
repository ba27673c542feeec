"""algos.ppo before the first loss: targets of a super-batch, keys of the config, errors."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from algos import make_algorithm
from algos.algorithm import Algorithm
from algos.denominators import LossDenominators, RatioLevel
from algos.ppo import PPOConfig
from algos.targets import Targets
from tests.algos.ppo_case import ANCHORED, DECOUPLED, LEVELS, PLAIN, SEED, Case
from tests.algos.reference_algos import batch_gae_reference, random_super_batch


@settings(max_examples=25, deadline=None)
@given(seed=SEED, level=st.sampled_from(LEVELS), normalized=st.booleans())
def test_targets_equal_the_reference(seed: int, level: RatioLevel, normalized: bool) -> None:
    config = PPOConfig(
        bootstrap="truncated", ratio_level=level, normalize_advantages=normalized, gamma=0.97, gae_lambda=0.9
    )
    batch = random_super_batch(np.random.default_rng(seed), 7)
    targets = make_algorithm(config).targets(batch)
    raw = np.array(batch_gae_reference(batch, 0.97, 0.9))
    assert_allclose(targets.returns, raw + batch.values, rtol=1e-6, atol=1e-6)
    per_chunk = np.ones_like(batch.num_steps) if level == "chunk" else batch.num_steps
    elements = np.repeat(raw, per_chunk)
    expected = (raw - elements.mean()) / (elements.std() + 1e-5) if normalized else raw
    assert_allclose(targets.advantages, expected, rtol=1e-5, atol=1e-5)
    assert targets.advantages.dtype == targets.returns.dtype == np.float32
    assert targets.proximal_logprobs is targets.behaviour_logprobs is batch.logprobs
    assert_array_equal(targets.old_values, batch.values)


@settings(max_examples=25, deadline=None)
@given(seed=SEED, level=st.sampled_from(LEVELS))
def test_advantages_are_scaled_within_each_task(seed: int, level: RatioLevel) -> None:
    """A loop over chunks, in float64."""
    rng = np.random.default_rng(seed)
    config = PPOConfig(ratio_level=level, advantage_scale="task")
    batch = random_super_batch(rng, 9)
    task = np.repeat(rng.integers(0, 3, 9), np.diff(batch.offsets))
    batch = replace(batch, task=task, rewards=batch.rewards.astype(float), values=batch.values.astype(float))
    raw = np.array(batch_gae_reference(replace(batch, truncated=np.zeros(9, bool)), 0.99, 0.95))
    returns = []
    for b in range(9):
        earned = [batch.rewards[m, : batch.num_steps[m]].sum() for m in range(*batch.offsets[b : b + 2])]
        returns.append(sum(0.99**t * r for t, r in enumerate(earned)))
    floor = 0.1 * np.std(returns)
    expected = np.zeros(batch.num_chunks)
    for m, task in enumerate(batch.task):
        elements = [
            a
            for a, t, steps in zip(raw, batch.task, batch.num_steps, strict=True)
            for _ in range(1 if level == "chunk" else steps)
            if t == task
        ]
        expected[m] = (raw[m] - np.mean(elements)) / (max(np.std(elements), floor) + 1e-5)
    found, _ = make_algorithm(config).compute_advantages(batch, batch.logprobs, batch.values)
    assert_allclose(found, expected, rtol=0, atol=1e-10)


def test_a_scale_that_nothing_reads_is_refused() -> None:
    with pytest.raises(ValueError, match="advantage_scale=task says within what advantages are normalized, and"):
        PPOConfig.model_validate({"advantage_scale": "task", "normalize_advantages": False})


def test_values_alone_can_be_recomputed() -> None:
    """Ratios stay those to the policy that acted."""
    case, plain = Case(PPOConfig(values="recomputed")), Case(PPOConfig())
    assert case.algorithm.needs_recompute
    assert case.proximal is not None
    assert case.values is not None
    assert np.abs(case.proximal - case.batch.logprobs).max() > 0.01
    assert_array_equal(case.targets.proximal_logprobs, case.batch.logprobs)
    assert_array_equal(case.targets.old_values, case.values)
    expected = plain.algorithm.targets(replace(case.batch, values=case.values))
    assert_array_equal(case.targets.advantages, expected.advantages)
    assert_array_equal(case.targets.returns, expected.returns)
    assert not PPOConfig(values="recomputed").takes_stale_data, "nothing corrects the ratios"


def test_recomputed_numbers_replace_the_recorded_ones() -> None:
    case = Case(DECOUPLED)
    assert case.algorithm.needs_recompute
    assert case.proximal is not None
    assert case.values is not None
    assert_array_equal(case.targets.proximal_logprobs, case.proximal)
    assert_array_equal(case.targets.behaviour_logprobs, case.batch.logprobs)
    assert_array_equal(case.targets.old_values, case.values)
    same_values = replace(case.batch, values=case.values)
    assert_array_equal(case.targets.advantages, make_algorithm(PPOConfig()).targets(same_values).advantages)


def test_bootstrap_never_makes_a_time_limit_a_failure_and_always_an_end_a_time_limit() -> None:
    batch = random_super_batch(np.random.default_rng(5), 8)
    assert batch.truncated.any()
    never = make_algorithm(PPOConfig(bootstrap="never", normalize_advantages=False)).targets(batch)
    ended = replace(batch, truncated=np.zeros(8, bool), terminated=np.ones(8, bool))
    truncated = PPOConfig(bootstrap="truncated", normalize_advantages=False)
    as_terminated = make_algorithm(truncated).targets(ended)
    assert_array_equal(never.returns, as_terminated.returns)
    always = make_algorithm(PPOConfig(bootstrap="always", normalize_advantages=False)).targets(batch)
    all_cut = replace(batch, truncated=np.ones(8, bool), terminated=np.zeros(8, bool))
    as_truncated = make_algorithm(truncated).targets(all_cut)
    assert_array_equal(always.returns, as_truncated.returns)
    cut = np.flatnonzero(batch.truncated)[0]
    last = batch.offsets[cut + 1] - 1
    difference = make_algorithm(truncated).targets(batch).returns[last] - never.returns[last]
    assert difference == pytest.approx(0.99 * batch.bootstrap_value[cut], rel=1e-5)


def test_the_order_of_episodes_does_not_change_targets() -> None:
    batch = random_super_batch(np.random.default_rng(3), 8)
    order = np.random.default_rng(4).permutation(8)
    rows = np.concatenate([np.arange(batch.offsets[b], batch.offsets[b + 1]) for b in order])
    per_chunk = {name: getattr(batch, name)[rows] for name in ("logprobs", "values", "rewards", "num_steps")}
    per_episode = {
        name: getattr(batch, name)[order]
        for name in ("bootstrap_value", "terminated", "truncated", "success", "episode_id")
    }
    offsets = np.concatenate([[0], np.cumsum(np.diff(batch.offsets)[order])]).astype(np.int32)
    shuffled = replace(batch, offsets=offsets, **per_chunk, **per_episode)
    algorithm = make_algorithm(PPOConfig())
    assert_allclose(algorithm.targets(shuffled).advantages, algorithm.targets(batch).advantages[rows], atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_normalized_advantages_give_zero_policy_loss_before_the_first_step(level: RatioLevel) -> None:
    case = Case(PPOConfig(ratio_level=level, value_coef=0.0))
    case.logprobs = torch.tensor(case.targets.proximal_logprobs, dtype=torch.float64)
    assert abs(case.whole()[0].item()) < 1e-6


def test_rows_are_copies_without_warnings_from_read_only_arrays() -> None:
    targets = Case(ANCHORED).targets
    given = [f.name for f in fields(Targets) if getattr(targets, f.name) is not None]
    for name in given:
        getattr(targets, name).flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = targets.rows(slice(1, 4))
        picked = targets.rows(np.array([1, 2, 3]))
    for name in given:
        assert_array_equal(getattr(rows, name).numpy(), getattr(targets, name)[1:4])
        assert torch.equal(getattr(rows, name), getattr(picked, name))
    rows.advantages.zero_()
    assert np.any(targets.advantages[1:4] != 0)


# --- config and errors ------------------------------------------------------------------------------------------------

CHANGES: dict[str, Any] = {
    "gamma": 0.5,
    "gae_lambda": 0.5,
    "bootstrap": "truncated",
    "clip_low": 0.01,
    "clip_high": 0.01,
    "ratio_level": "chunk",
    "value_clip": None,
    "huber_delta": 0.01,
    "value_coef": 2.0,
    "entropy_coef": 0.7,
    "normalize_advantages": False,
    "advantage_scale": "task",
    "values": "recomputed",
    "value_warmup": 5,
    "proximal": "behaviour",
    "importance_level": "chunk",
    "kl_coef": 0.3,
    "gipo_sigma": 0.1,
    "importance_cap": 0.5,
    "importance_low": 0.9,
    "importance_high": 1.1,
    "kl_estimate": "weighted_k3",
    "ratio_mean": True,
    "dual_clip": 1.01,
    "objective": "sapo",
    "tau_positive": 3.0,
    "tau_negative": 3.0,
    "estimator": "vtrace",
    "vtrace_cap": 0.5,
}


OF_THE_LEARNER = {"name", "epochs", "minibatches", "target_kl", "entropy_decay"}
OF_THE_LEARNER |= {"bc_coef", "bc_demos", "bc_batch", "bc_memory"}
OF_THE_LEARNER |= {"value_memory", "value_steps", "value_batch", "value_memory_lr"}


@pytest.mark.parametrize("key", CHANGES)
def test_every_key_of_the_loss_is_read(key: str) -> None:
    base = DECOUPLED.model_copy(update={"importance_cap": None})
    needs = {
        "vtrace_cap": ("estimator", "vtrace"),
        "tau_positive": ("objective", "sapo"),
        "tau_negative": ("objective", "sapo"),
        "gipo_sigma": ("objective", "gipo"),
        "kl_estimate": ("kl_coef", 0.5),
    }.get(key)
    base = base.model_copy(update=dict([needs] if needs else []))
    if key == "values":
        base = PLAIN
    case, other = Case(base), Case(base)
    other.algorithm = make_algorithm(base.model_copy(update={key: CHANGES[key]}))
    if key == "proximal":
        other.proximal = other.values = None
    if key == "advantage_scale":
        task = np.repeat(np.arange(case.batch.num_episodes) % 2, np.diff(case.batch.offsets))
        other.batch = replace(case.batch, task=task)
    if key == "values":
        other.proximal, other.values = other.batch.logprobs, other.batch.values[::-1].copy()
    if key == "kl_coef":
        other.reference = other.batch.logprobs - np.float32(0.2)
    other.targets = other.new_targets()
    assert other.whole()[0].item() != pytest.approx(case.whole()[0].item(), abs=1e-6)


def test_every_key_is_covered() -> None:
    algorithm: Algorithm = make_algorithm(PPOConfig(epochs=3, minibatches=5))
    assert (algorithm.epochs, algorithm.minibatches, algorithm.needs_recompute) == (3, 5, False)
    assert set(PPOConfig.model_fields) == set(CHANGES) | OF_THE_LEARNER


def test_numbers_of_other_weights_come_exactly_where_asked_for() -> None:
    case, anchored = Case(DECOUPLED), Case(ANCHORED)
    with pytest.raises(ValueError, match=r"logprobs were not given, and algo\.proximal needs them"):
        case.algorithm.targets(case.batch)
    with pytest.raises(ValueError, match="values were not given"):
        case.algorithm.targets(case.batch, case.proximal)
    with pytest.raises(ValueError, match=r"logprobs were given, and algo\.proximal does not use them"):
        make_algorithm(PPOConfig()).targets(case.batch, case.proximal, case.values)
    with pytest.raises(ValueError, match=r"reference_logprobs were not given, and algo\.kl_coef needs them"):
        anchored.algorithm.targets(anchored.batch)
    with pytest.raises(ValueError, match=r"reference_logprobs were given, and algo\.kl_coef does not use"):
        make_algorithm(PPOConfig()).targets(anchored.batch, reference_logprobs=anchored.reference)


def test_contradictory_batches_are_refused() -> None:
    batch = random_super_batch(np.random.default_rng(0), 4)
    algorithm = make_algorithm(PPOConfig())
    with pytest.raises(ValueError, match="episode 100 has terminated=False and truncated=False"):
        algorithm.targets(replace(batch, terminated=np.zeros(4, bool), truncated=np.zeros(4, bool)))
    with pytest.raises(ValueError, match=r"num_steps lie in 4\.\.4: must be 1\.\.3"):
        algorithm.targets(replace(batch, num_steps=np.full_like(batch.num_steps, 4)))
    logprobs = batch.logprobs.copy()
    logprobs[2, 0, 1] = -np.inf
    with pytest.raises(
        ValueError, match=r"recorded log-probabilities of 1 of \d+ chunks are not finite, first in row 2"
    ):
        algorithm.targets(replace(batch, logprobs=logprobs))
    with pytest.raises(ValueError, match="recorded log-probabilities have shape"):
        algorithm.targets(replace(batch, logprobs=logprobs[:, :1]))
    with pytest.raises(ValueError, match=r"values\[0\] is nan"):
        algorithm.targets(replace(batch, values=batch.values * np.nan))


def test_a_dual_clip_that_nothing_reads_is_refused() -> None:
    for objective in ("cispo", "sapo", "gipo"):
        with pytest.raises(ValueError, match=f"dual_clip=3.0 limits ratios of objective=clip, {objective} has its own"):
            PPOConfig.model_validate({"objective": objective, "dual_clip": 3.0})


def test_shapes_that_would_broadcast_are_refused() -> None:
    case = Case(PLAIN)
    rows, denominators = case.rows(slice(None)), LossDenominators.of(case.batch.num_steps, case.targets.trains_value)
    with pytest.raises(ValueError, match=r"values \(\d+, 1\) instead of \(\d+,\)"):
        case.algorithm.loss(case.logprobs, case.entropy, case.predictions[:, None], rows, denominators, 0)
    with pytest.raises(ValueError, match="entropy"):
        case.algorithm.loss(case.logprobs, case.entropy[:, :1], case.predictions, rows, denominators, 0)


def test_advantages_and_registry_import_without_torch() -> None:
    code = "import sys, algos, algos.advantages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
