"""algos.advantages against hand-computed cases, a slow reference and what must hold for any episodes."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from algos.advantages import (
    chunk_log_ratios,
    chunk_rewards,
    explained_variance,
    gae,
    normalize,
    returns_differ,
    vtrace,
)
from tests.algos.reference_algos import batch_gae_reference, random_super_batch, returns_reference, vtrace_reference

DISCOUNT = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.01, 0.999))
SEED = st.integers(0, 2**32 - 1)


def test_chunk_rewards_by_hand() -> None:
    rewards = np.array([[1.0, 2.0, 3.0], [0.5, 99.0, np.nan]], np.float32)
    assert_array_equal(chunk_rewards(rewards, np.array([3, 1])), [6.0, 0.5])


def test_gae_by_hand() -> None:
    # Episode 0 terminates: deltas 0 + 0.9*0.4 - 0.5 = -0.14 and 1 + 0.9*0 - 0.4 = 0.6; A_0 = -0.14 + 0.9*0.5*0.6.
    # Episode 1 is truncated in front of a state worth 2: its only delta is 0.1 + 0.9*2 - 0.3 = 1.6.
    advantages, returns = gae(
        rewards=np.array([0.0, 1.0, 0.1]),
        values=np.array([0.5, 0.4, 0.3]),
        offsets=np.array([0, 2, 3]),
        bootstrap_value=np.array([77.0, 2.0]),
        bootstrap_mask=np.array([False, True]),
        gamma=0.9,
        lam=0.5,
    )
    assert_allclose(advantages, [0.13, 0.6, 1.6], rtol=1e-14)
    assert_allclose(returns, [0.63, 1.0, 1.9], rtol=1e-14)


@settings(max_examples=60, deadline=None)
@given(seed=SEED, episodes=st.integers(1, 12), gamma=DISCOUNT, lam=DISCOUNT)
def test_gae_equals_the_mean_of_n_step_returns(seed: int, episodes: int, gamma: float, lam: float) -> None:
    batch = random_super_batch(np.random.default_rng(seed), episodes)
    rewards = chunk_rewards(batch.rewards, batch.num_steps)
    advantages, returns = gae(rewards, batch.values, batch.offsets, batch.bootstrap_value, batch.truncated, gamma, lam)
    assert advantages.dtype == returns.dtype == np.float64
    assert_allclose(advantages, batch_gae_reference(batch, gamma, lam), rtol=0, atol=1e-12)
    assert_allclose(returns, advantages + batch.values, rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(seed=SEED, episodes=st.integers(1, 12), gamma=DISCOUNT)
def test_returns_of_gae_at_lambda_one_equal_their_definition(seed: int, episodes: int, gamma: float) -> None:
    batch = random_super_batch(np.random.default_rng(seed), episodes)
    rewards = chunk_rewards(batch.rewards, batch.num_steps)
    ends = (batch.offsets, batch.bootstrap_value, batch.truncated)
    returns = gae(rewards, batch.values, *ends, gamma, 1.0)[1]
    for b, (start, end) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True)):
        bootstrap = float(batch.bootstrap_value[b]) if batch.truncated[b] else 0.0
        expected = returns_reference([float(r) for r in rewards[start:end]], bootstrap, gamma)
        assert_allclose(returns[start:end], expected, rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(seed=SEED, episodes=st.integers(2, 12), gamma=DISCOUNT, lam=DISCOUNT)
def test_the_order_of_episodes_does_not_matter(seed: int, episodes: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    batch = random_super_batch(rng, episodes)
    rewards = chunk_rewards(batch.rewards, batch.num_steps)
    order = rng.permutation(episodes)
    rows = np.concatenate([np.arange(batch.offsets[b], batch.offsets[b + 1]) for b in order])
    offsets = np.concatenate([[0], np.cumsum(np.diff(batch.offsets)[order])])
    straight, _ = gae(rewards, batch.values, batch.offsets, batch.bootstrap_value, batch.truncated, gamma, lam)
    shuffled, _ = gae(
        rewards[rows], batch.values[rows], offsets, batch.bootstrap_value[order], batch.truncated[order], gamma, lam
    )
    assert_array_equal(shuffled, straight[rows])


@settings(max_examples=40, deadline=None)
@given(seed=SEED, episodes=st.integers(1, 8), gamma=DISCOUNT, lam=DISCOUNT)
def test_truncation_adds_exactly_the_discounted_bootstrap(seed: int, episodes: int, gamma: float, lam: float) -> None:
    batch = random_super_batch(np.random.default_rng(seed), episodes)
    args = (chunk_rewards(batch.rewards, batch.num_steps), batch.values, batch.offsets, batch.bootstrap_value)
    terminated, _ = gae(*args, np.zeros(episodes, bool), gamma, lam)
    truncated, _ = gae(*args, np.ones(episodes, bool), gamma, lam)
    for b, (start, end) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True)):
        until_end = np.arange(end - start)[::-1]
        bootstrap = (gamma * lam) ** until_end * gamma * float(batch.bootstrap_value[b])
        assert_allclose(truncated[start:end] - terminated[start:end], bootstrap, rtol=0, atol=1e-12)


def test_gae_takes_time_in_the_length_of_episodes_not_in_their_number() -> None:
    rng = np.random.default_rng(0)
    episodes, length = 20_000, 50
    offsets = np.arange(episodes + 1) * length
    rewards = rng.normal(size=episodes * length)
    start = time.perf_counter()
    gae(rewards, rewards, offsets, np.zeros(episodes), np.zeros(episodes, bool), 0.99, 0.95)
    assert time.perf_counter() - start < 2.0  # 0.05 s on one CPU core


def test_normalize_by_hand() -> None:
    # mean 2, variance ((-1)^2 + 0 + 1^2) / 3
    assert_allclose(normalize(np.array([1.0, 2.0, 3.0])), [-1.2247449, 0.0, 1.2247449], atol=2e-5)
    # weight 3 counts the first entry three times: mean 2, variance (3*1 + 1*9) / 4 = 3
    weighted = normalize(np.array([1.0, 5.0, 1000.0]), np.array([3, 1, 0]))
    assert_allclose(weighted[:2], [-0.5773503, 1.7320508], atol=2e-5)


@settings(max_examples=40, deadline=None)
@given(seed=SEED, size=st.integers(2, 50), shift=st.floats(-100, 100), scale=st.floats(0.1, 100))
def test_normalize_ignores_shift_and_scale(seed: int, size: int, shift: float, scale: float) -> None:
    rng = np.random.default_rng(seed)
    x, weights = rng.normal(size=size), rng.integers(1, 5, size)
    repeated = np.repeat(x, weights)
    assert_allclose(normalize(x, weights), normalize(repeated)[np.cumsum(weights) - 1], rtol=0, atol=1e-10)
    y = normalize(scale * x + shift, weights)
    assert abs(np.average(y, weights=weights)) < 1e-7
    spread = np.sqrt(np.average((x - np.average(x, weights=weights)) ** 2, weights=weights))
    assert_allclose(np.sqrt(np.average(y**2, weights=weights)), 1.0, atol=2e-5 / (scale * spread))


def test_normalize_of_equal_advantages_is_zero() -> None:
    assert_array_equal(normalize(np.full(5, 0.25)), np.zeros(5))
    assert np.abs(normalize(0.1 + 1e-8 * np.arange(5))).max() < 0.01  # rounding is not blown up to a signal


def test_normalize_leaves_what_varies_less_than_returns_do() -> None:
    noise = np.array([1e-3, -1e-3, 1e-3, -1e-3])
    assert_allclose(normalize(noise, spread=0.5), noise / 0.05, rtol=1e-3)
    assert_allclose(normalize(noise, spread=1e-3), np.sign(noise), rtol=0.02)
    assert_array_equal(normalize(noise, spread=0.0), np.zeros(4))


def test_outcomes_that_are_alike_judge_no_value() -> None:
    """Of the new episodes alone: older ones are in the batch for another time."""
    batch = random_super_batch(np.random.default_rng(0), 4)
    batch.rewards[:] = 0.0
    batch.rewards[batch.offsets[1:] - 1, 0] = 1.0, 1.0, 1.0, 0.0
    assert returns_differ(batch)
    assert not returns_differ(replace(batch, new_episodes=3))
    batch.rewards[:] = 0.0
    assert not returns_differ(batch)


def test_explained_variance_by_hand() -> None:
    returns = np.array([0.0, 1.0, 2.0, 3.0])  # variance 1.25
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns, np.full(4, 9.0)) == 0.0
    # residuals 0, 0, 1, 1: variance 0.25
    assert explained_variance(returns, np.array([0.0, 1.0, 1.0, 2.0])) == pytest.approx(1 - 0.25 / 1.25)
    assert explained_variance(np.ones(4), returns) is None
    assert explained_variance(np.ones(0), np.ones(0)) is None


BOUNDS = np.array([0, 2, 3])
GOOD = np.zeros(3)


@pytest.mark.parametrize("offsets", [[0, 3], [0, 2, 4], [1, 2, 3], [0, 0, 3], [0, 2, 1, 3], [3], []])
def test_offsets_that_do_not_fit_are_refused(offsets: list[int]) -> None:
    ends = (np.zeros(2), np.zeros(2, bool))
    with pytest.raises(ValueError, match=r"offsets .* do not divide|one entry per episode"):
        gae(GOOD, GOOD, np.array(offsets), *ends, 0.9, 0.9)


def test_bad_numbers_are_refused_by_name() -> None:
    poisoned = np.array([0.0, np.nan, 0.0])
    ends = (BOUNDS, np.zeros(2), np.array([False, True]))
    with pytest.raises(ValueError, match=r"rewards\[1\] is nan"):
        gae(poisoned, GOOD, *ends, 0.9, 0.9)
    with pytest.raises(ValueError, match=r"values\[1\] is nan"):
        gae(GOOD, poisoned, *ends, 0.9, 0.9)
    with pytest.raises(ValueError, match=r"bootstrap_value\[1\] is inf"):
        gae(GOOD, GOOD, BOUNDS, np.array([np.inf, np.inf]), ends[2], 0.9, 0.9)
    with pytest.raises(ValueError, match="bootstrap_value has shape"):
        gae(GOOD, GOOD, BOUNDS, np.zeros(3), ends[2], 0.9, 0.9)
    with pytest.raises(ValueError, match="do not divide arrays of shapes"):
        gae(GOOD, np.zeros(4), *ends, 0.9, 0.9)
    with pytest.raises(ValueError, match="non-negative weight"):
        normalize(GOOD, np.zeros(3))


# --- v-trace ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seed=SEED, episodes=st.integers(1, 6), gamma=DISCOUNT, lam=DISCOUNT, cap=st.sampled_from([0.5, 1.0, 2.0]))
def test_vtrace_equals_its_definition(seed: int, episodes: int, gamma: float, lam: float, cap: float) -> None:
    rng = np.random.default_rng(seed)
    batch = random_super_batch(rng, episodes)
    rewards, log_weights = rng.normal(size=batch.num_chunks), rng.normal(size=batch.num_chunks)
    ends = batch.offsets, batch.bootstrap_value, batch.truncated
    advantages, returns = vtrace(rewards, batch.values, log_weights, *ends, gamma, lam, cap)
    for b, (first, last) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True)):
        expected = vtrace_reference(
            rewards[first:last].tolist(),
            batch.values[first:last].tolist(),
            np.exp(log_weights[first:last]).tolist(),
            float(batch.bootstrap_value[b]) if batch.truncated[b] else 0.0,
            gamma,
            lam,
            cap,
        )
        assert_allclose(advantages[first:last], expected[0], atol=1e-10)
        assert_allclose(returns[first:last], expected[1], atol=1e-10)


def test_vtrace_of_fresh_data_is_gae() -> None:
    batch = random_super_batch(np.random.default_rng(1), 5)
    rewards, ends = np.random.default_rng(2).normal(size=batch.num_chunks), (batch.offsets, batch.bootstrap_value)
    found = vtrace(rewards, batch.values, np.zeros(batch.num_chunks), *ends, batch.truncated, 0.9, 0.8, 1.0)
    expected = gae(rewards, batch.values, *ends, batch.truncated, 0.9, 0.8)
    assert_allclose(found, expected, atol=1e-12)


def test_chunk_log_ratios_add_executed_tokens_only() -> None:
    batch = random_super_batch(np.random.default_rng(3), 4)
    other = batch.logprobs + np.float32(0.25)
    expected = 0.25 * batch.num_steps * batch.logprobs.shape[2]
    assert_allclose(chunk_log_ratios(other, batch.logprobs, batch.num_steps), expected, rtol=1e-5)
