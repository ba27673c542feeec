"""Algorithms as the learner uses them: losses that add up, metrics that merge, masks and padding that hold."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor

from algos import make_algorithm
from algos.advantages import explained_variance
from algos.denominators import LossDenominators
from algos.losses import RatioLevel, log_ratio, token_mask
from algos.ppo import PPOConfig
from algos.surrogate import proximal_logprobs
from tests.algos.ppo_case import (
    CONFIGS,
    DECOUPLED,
    INTERPOLATED,
    LEVELS,
    PLAIN,
    PPO_CONFIGS,
    SEED,
    VTRACE,
    Case,
    describe_config,
    summed,
)
from tests.algos.reference_algos import ppo_reference, random_super_batch
from vla_rl.core.records import SuperBatch


@pytest.mark.parametrize("config", PPO_CONFIGS, ids=describe_config)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_metrics_equal_the_reference(config: PPOConfig, seed: int) -> None:
    case = Case(config, seed)
    loss, sums = case.whole()
    outputs = (x.detach().numpy() for x in (case.logprobs, case.entropy, case.predictions))
    expected = ppo_reference(config, case.rows(slice(None)), *outputs, case.batch.offsets.tolist())
    limit = 1e-6 if config.importance_level == "episode" else 1e-10  # an episode's weight is float32
    assert loss.item() == pytest.approx(expected.loss(config), abs=limit)
    metrics = case.algorithm.finish_metrics(summed([sums]), case.targets)
    elements = expected.elements
    for name, value in {
        "policy_loss": expected.policy / elements,
        "value_loss": expected.value / expected.chunks,
        "entropy": expected.entropy / expected.tokens,
        "reference_kl": expected.kl / expected.tokens,
        "approx_kl": expected.k3 / elements,
        "approx_kl_k1": expected.k1 / elements,
        "clip_fraction": expected.clipped / elements,
        "ratio_mean": expected.ratio / elements,
        "ess": expected.importance**2 / (elements * expected.importance_sq),
    }.items():
        assert metrics[name] == pytest.approx(value, abs=limit), name
    assert math.log(metrics["ratio_max"]) == pytest.approx(math.log(expected.largest), rel=0.07)
    assert metrics["explained_variance"] == explained_variance(case.targets.returns, case.targets.old_values)
    assert ("behaviour_weight_cut" in metrics) == (config.proximal != "behaviour")


@settings(max_examples=25, deadline=None)
@given(seed=SEED, config=st.sampled_from(CONFIGS), ranks=st.integers(1, 4), data=st.data())
def test_ranks_and_micro_batches_do_not_change_loss_gradient_or_metrics(
    seed: int, config: PPOConfig, ranks: int, data: st.DataObject
) -> None:
    case = Case(config, seed)
    whole, whole_sums = case.whole()
    order = np.random.default_rng(seed).permutation(case.batch.num_chunks)
    denominators = LossDenominators.of(case.batch.num_steps, case.targets.trains_value)
    shares, sums = [], []
    for rank in range(ranks):
        size = data.draw(st.integers(1, 9), label=f"micro-batch of rank {rank}")
        mine = order[rank::ranks]
        for start in range(0, len(mine), size):
            share, part = case.loss(mine[start : start + size], denominators)
            shares.append(share)
            sums.append(part)
    total = torch.stack(shares).sum()
    assert total.item() == pytest.approx(whole.item(), abs=1e-12)
    for split, together in zip(case.gradients(total), case.gradients(whole), strict=True):
        assert_allclose(split.numpy(), together.numpy(), rtol=0, atol=1e-12)
    merged = case.algorithm.finish_metrics(summed(sums), case.targets)
    expected = case.algorithm.finish_metrics(summed([whole_sums]), case.targets)
    assert merged == pytest.approx(expected, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(seed=SEED, config=st.sampled_from(CONFIGS), garbage=st.sampled_from([0.0, 1e4, -1e4, math.inf, math.nan]))
def test_what_lies_behind_the_end_never_matters(seed: int, config: PPOConfig, garbage: float) -> None:
    clean, dirty = Case(config, seed), Case(config, seed)
    behind = ~clean.batch.step_mask
    dirty.batch.logprobs[behind] = garbage
    dirty.batch.rewards[behind] = garbage
    if dirty.proximal is not None:
        dirty.proximal[behind] = garbage
    if dirty.reference is not None:
        dirty.reference[behind] = garbage
    dirty.targets = dirty.new_targets()
    for leaf in (dirty.logprobs, dirty.entropy):
        leaf.data[torch.as_tensor(behind)] = garbage
    assert_array_equal(dirty.targets.advantages, clean.targets.advantages)
    (loss, sums), (expected, expected_sums) = dirty.whole(), clean.whole()
    assert loss.item() == expected.item()
    assert summed([sums]) == summed([expected_sums])
    for found, wanted in zip(dirty.gradients(loss), clean.gradients(expected), strict=True):
        assert torch.equal(found, wanted)
        assert torch.all(torch.isfinite(found))


@pytest.mark.parametrize("config", CONFIGS, ids=describe_config)
def test_rows_without_steps_are_padding(config: PPOConfig) -> None:
    case = Case(config)
    denominators = LossDenominators.of(case.batch.num_steps, case.targets.trains_value)
    rows = case.rows(slice(None))
    padding = replace(rows, num_steps=torch.zeros_like(rows.num_steps), advantages=rows.advantages * math.nan)
    outputs = case.logprobs, case.entropy, case.predictions
    loss, sums = case.algorithm.loss(*outputs, padding, denominators, 0)
    assert loss.item() == 0.0
    assert set(summed([sums]).values()) == {0.0}
    assert all(torch.all(gradient == 0) for gradient in case.gradients(loss))


def test_counts_skip_padding() -> None:
    num_steps = np.array([8, 3, 0, 5], np.int32)
    denominators = LossDenominators.of(num_steps)
    assert denominators == LossDenominators(chunks=3, steps=16, value_chunks=3)
    assert [denominators.elements(level, action_dim=7) for level in LEVELS] == [112, 16, 3]


@pytest.mark.parametrize("level", LEVELS)
def test_decoupled_with_equal_policies_is_plain_ppo_exactly(level: RatioLevel) -> None:
    plain = Case(PLAIN.model_copy(update={"ratio_level": level}))
    for cap in (None, 1.0, 5.0):
        config = plain.algorithm.config.model_copy(update={"proximal": "recomputed", "importance_cap": cap})
        decoupled = Case(config)
        decoupled.batch, decoupled.logprobs = plain.batch, plain.logprobs
        decoupled.entropy, decoupled.predictions = plain.entropy, plain.predictions
        decoupled.targets = decoupled.algorithm.targets(plain.batch, plain.batch.logprobs.copy(), plain.batch.values)
        loss, expected = decoupled.whole()[0], plain.whole()[0]
        assert loss.item() == expected.item()
        for found, wanted in zip(decoupled.gradients(loss), plain.gradients(expected), strict=True):
            assert torch.equal(found, wanted)


def test_the_entropy_bonus_decays() -> None:
    config = PPOConfig(entropy_coef=0.4, entropy_decay=4)
    assert [config.entropy_coef_at(i) for i in (0, 1, 4, 9)] == pytest.approx([0.4, 0.3, 0.0, 0.0])
    case = Case(config)
    gradients = [case.gradients(case.whole(policy_version=i)[0])[1].abs().max() for i in (0, 2, 4)]
    assert gradients[1] == gradients[0] / 2
    assert gradients[2] == 0.0


def test_vtrace_limits_the_policys_weights_too() -> None:
    """Its gradient is weighted by min(cap, pi / pi_behaviour) of the chunk, as in equation 4 of its section 4.2."""
    assert (VTRACE.weight_level, VTRACE.weight_cap) == ("chunk", 1.0)
    chosen = PPOConfig(proximal="recomputed", estimator="vtrace", importance_level="action", importance_cap=3.0)
    assert (chosen.weight_level, chosen.weight_cap) == ("action", 3.0)
    assert (DECOUPLED.weight_level, DECOUPLED.weight_cap) == ("action", 1.5)


def test_all_levels_agree_for_one_token_a_chunk() -> None:
    results = []
    for level in LEVELS:
        case = Case(PLAIN.model_copy(update={"ratio_level": level}), chunk_size=1, action_dim=1)
        loss, _ = case.whole()
        results.append((loss.item(), *(g.flatten().tolist() for g in case.gradients(loss))))
    assert results[0] == results[1] == results[2]


def test_value_warmup_trains_the_value_head_only() -> None:
    case = Case(PLAIN.model_copy(update={"value_warmup": 3}))
    policy, entropy, values = case.gradients(case.whole(policy_version=2)[0])
    assert torch.all(policy == 0)
    assert torch.all(entropy == 0)
    assert torch.any(values != 0)
    policy, entropy, values_after = case.gradients(case.whole(policy_version=3)[0])
    assert torch.any(policy != 0)
    assert torch.any(entropy != 0)
    assert torch.equal(values, values_after)


@pytest.mark.parametrize("config", CONFIGS, ids=describe_config)
def test_gradcheck_of_the_whole_loss(config: PPOConfig) -> None:
    if getattr(config, "objective", "") in ("gipo", "cispo") or getattr(config, "proximal", "") == "interpolated":
        pytest.skip("holds a part of the loss constant that follows the policy: see the next test")
    case = Case(config, episodes=2, longest=2)
    denominators, rows = LossDenominators.of(case.batch.num_steps, case.targets.trains_value), case.rows(slice(None))

    def loss(logprobs: Tensor, entropy: Tensor, values: Tensor) -> Tensor:
        return case.algorithm.loss(logprobs, entropy, values, rows, denominators, 0)[0]

    assert torch.autograd.gradcheck(loss, (case.logprobs, case.entropy, case.predictions))


@pytest.mark.parametrize("config", [c for c in PPO_CONFIGS if c.objective == "gipo"], ids=lambda c: c.ratio_level)
def test_gradient_of_gipo_is_the_policy_gradient_times_the_trust(config: PPOConfig) -> None:
    config = config.model_copy(update={"value_coef": 0.0, "clip_low": 0.99, "clip_high": 1e6})
    case = Case(config)
    (found, *_) = case.gradients(case.whole()[0])
    case.algorithm = make_algorithm(config.model_copy(update={"objective": "clip"}))
    (unlimited, *_) = case.gradients(case.whole()[0])
    rows = case.rows(slice(None))
    tokens = token_mask(rows.num_steps, *case.logprobs.shape[1:])
    log_r = log_ratio(case.logprobs.detach(), rows.behaviour_logprobs, tokens, config.ratio_level)
    trust = torch.exp(-0.5 * (log_r / config.gipo_sigma) ** 2)
    assert_allclose(found, unlimited * trust.reshape(*trust.shape, *(1,) * (3 - trust.dim())), atol=1e-12)


def test_interpolation_lies_between_the_one_that_acted_and_the_one_in_training() -> None:
    """Fresh data have the former, and the older they are, the nearer the latter; it is a constant to the gradient."""
    case = Case(INTERPOLATED)
    rows = case.rows(slice(None))
    found = proximal_logprobs(INTERPOLATED, case.logprobs, rows)
    assert not found.requires_grad
    fresh, oldest = rows.staleness == 0, rows.staleness == 4
    assert_array_equal(found[fresh], rows.behaviour_logprobs[fresh])
    way = (found - rows.behaviour_logprobs)[oldest] / (case.logprobs.detach() - rows.behaviour_logprobs)[oldest]
    assert_allclose(way, 0.8, atol=1e-9)


def test_float32_is_close_to_float64() -> None:
    case = Case(DECOUPLED, episodes=30)
    everything = slice(None)
    outputs = (case.logprobs.float(), case.entropy.float(), case.predictions.float())
    denominators = LossDenominators.of(case.batch.num_steps, case.targets.trains_value)
    single, _ = case.algorithm.loss(*outputs, case.targets.rows(everything), denominators, 0)
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(case.whole()[0].item(), abs=1e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=describe_config)
def test_loss_stays_on_its_device_and_never_waits_for_it(config: PPOConfig) -> None:
    """Tensors of the meta device mix with no others, and reading one back raises."""
    case = Case(config)
    denominators = LossDenominators.of(case.batch.num_steps, case.targets.trains_value)
    outputs = [x.detach().to("meta").requires_grad_() for x in (case.logprobs, case.entropy, case.predictions)]
    rows = case.targets.rows(slice(None), "meta")
    loss, sums = case.algorithm.loss(outputs[0], outputs[1], outputs[2], rows, denominators, 0)
    loss.backward()
    assert {x.device.type for x in (loss, *sums.values())} == {"meta"}
    assert {x.shape for x in (loss, *sums.values())} == {torch.Size([])}
    assert not any(x.requires_grad for x in sums.values())


def test_repeated_updates_on_stale_data_find_the_best_token() -> None:
    """A bandit with 6 tokens whose data come from a policy that is never refreshed."""
    generator = torch.Generator().manual_seed(0)
    behaviour = torch.log_softmax(torch.randn(6, generator=generator), 0)
    tokens = torch.multinomial(behaviour.exp(), 512, replacement=True, generator=generator)
    reward = (tokens == 2).numpy().astype(np.float32)
    batch = bandit_batch(reward, behaviour[tokens].numpy())
    algorithm = make_algorithm(PPOConfig(proximal="recomputed", importance_cap=5.0, gamma=1.0))
    logits = behaviour.clone().requires_grad_()
    optimizer = torch.optim.SGD([logits], lr=1.0)
    for iteration in range(60):
        proximal = torch.log_softmax(logits.detach(), 0)[tokens].reshape(-1, 1, 1).numpy()
        targets = algorithm.targets(batch, proximal, batch.values)
        new = torch.log_softmax(logits, 0)[tokens].reshape(-1, 1, 1)
        denominators = LossDenominators.of(batch.num_steps)
        everything = targets.rows(slice(None))
        loss, _ = algorithm.loss(new, torch.zeros_like(new), torch.zeros(512), everything, denominators, iteration)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert behaviour.exp()[2] < 0.2
    assert torch.softmax(logits.detach(), 0)[2] > 0.9


def bandit_batch(reward: np.ndarray, logprobs: np.ndarray) -> SuperBatch:
    """Episodes of one chunk of one token."""
    size = len(reward)
    template = random_super_batch(np.random.default_rng(0), size, longest=1, chunk_size=1, action_dim=1)
    return replace(
        template,
        rewards=reward[:, None],
        logprobs=logprobs.reshape(-1, 1, 1),
        values=np.zeros(size, np.float32),
        terminated=np.ones(size, bool),
        truncated=np.zeros(size, bool),
    )
