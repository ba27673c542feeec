"""Algorithms that clone the run's own chunks: advantage-weighted regression, success filtering, conditioning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from algos import make_algorithm
from algos.actor_critic import ActorCriticConfig
from algos.awr import AWRConfig
from algos.config import AlgorithmConfig
from algos.ppo import PPOConfig
from algos.recap import RECAPConfig
from algos.rft import RFTConfig
from tests.algos.ppo_case import AWR, Case
from tests.algos.reference_algos import gae_reference, random_super_batch, value_loss_reference
from vla_rl.core.records import SuperBatch


def reference_advantages(case: Case, config: ActorCriticConfig) -> list[float]:
    """Advantages of all chunks, from the values at the start of the update."""
    batch, found = case.batch, []
    values = batch.values if case.values is None else case.values
    for b in range(batch.num_episodes):
        rows = range(batch.offsets[b], batch.offsets[b + 1])
        rewards = [sum(float(r) for r in batch.rewards[m, : batch.num_steps[m]]) for m in rows]
        bootstraps = config.bootstrap == "truncated" and batch.truncated[b]
        end = float(batch.bootstrap_value[b]) if bootstraps else 0.0
        found += gae_reference(rewards, [float(values[m]) for m in rows], end, config.gamma, config.gae_lambda)
    return found


def reference_weights(case: Case, config: AWRConfig) -> list[float]:
    steps = case.batch.num_steps.tolist()
    total = sum(steps)
    advantages = reference_advantages(case, config)
    mean = sum(n * a for n, a in zip(steps, advantages, strict=True)) / total
    deviation = (sum(n * (a - mean) ** 2 for n, a in zip(steps, advantages, strict=True)) / total) ** 0.5 + 1e-5
    return [min(np.exp((a - mean) / deviation / config.beta), config.max_weight) for a in advantages]


@pytest.mark.parametrize("seed", range(3))
def test_weights_and_loss_equal_the_reference(seed: int) -> None:
    config = AWR
    case = Case(config, seed)
    weights = reference_weights(case, config)
    proximal = case.targets.proximal_logprobs
    exact, returns = case.algorithm.compute_advantages(case.batch, proximal, case.targets.old_values)
    assert_allclose(exact, weights, rtol=1e-10, atol=1e-10)
    case.targets = replace(case.targets, advantages=exact, returns=returns)  # not rounded to float32
    loss, _ = case.whole()
    logprobs, entropy, values = (x.detach().numpy() for x in (case.logprobs, case.entropy, case.predictions))
    policy = value = 0.0
    for m, steps in enumerate(case.batch.num_steps.tolist()):
        policy -= weights[m] * logprobs[m, :steps].sum() + config.entropy_coef * entropy[m, :steps].sum()
        value += value_loss_reference(
            values[m], returns[m], float(case.targets.old_values[m]), config.value_clip, config.huber_delta
        )
    expected = policy / case.batch.num_steps.sum() + config.value_coef * value / case.batch.num_chunks
    assert loss.item() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_success_filtered_cloning_is_the_mean_over_successful_episodes(seed: int) -> None:
    case = Case(RFTConfig(), seed)
    batch, logprobs = case.batch, case.logprobs.detach().numpy()
    batch.success[:] = np.arange(batch.num_episodes) % 3 == seed
    case.targets = case.new_targets()
    cloned = [m for b in np.flatnonzero(batch.success) for m in range(*batch.offsets[b : b + 2])]
    rows = case.algorithm.trained_chunks(case.targets)
    assert rows.tolist() == cloned
    tokens = np.concatenate([logprobs[m, : batch.num_steps[m]] for m in cloned])
    assert case.loss(rows)[0].item() == pytest.approx(-tokens.sum(axis=1).mean(), abs=1e-10)
    batch.success[:] = False
    assert case.algorithm.trained_chunks(case.new_targets()).size == 0


def _with_tasks(batch: SuperBatch) -> SuperBatch:
    by_episode = np.arange(batch.num_episodes) % 2
    return replace(batch, task=np.repeat(by_episode, np.diff(batch.offsets)).astype(np.int32))


def test_the_best_chunks_of_each_task_are_good_and_some_have_no_condition() -> None:
    config = RECAPConfig(positive_share=0.25, condition_dropout=1e-9)
    batch = _with_tasks(random_super_batch(np.random.default_rng(1), 40))
    advantages = np.random.default_rng(2).normal(size=batch.num_chunks) + 5 * batch.task
    conditions = make_algorithm(config).choose_conditions(batch, advantages)
    for task in (0, 1):
        mine = batch.task == task
        good = mine & (conditions == 1)
        assert good.sum() / mine.sum() == pytest.approx(0.25, abs=0.02)
        assert advantages[good].min() > advantages[mine & (conditions == 2)].max()
    dropped = make_algorithm(config.model_copy(update={"condition_dropout": 0.5})).choose_conditions(batch, advantages)
    assert (dropped == 0).mean() == pytest.approx(0.5, abs=0.1)
    assert np.array_equal(dropped[dropped > 0], conditions[dropped > 0])


def test_conditioned_cloning_is_the_mean_of_all_chunks() -> None:
    config = RECAPConfig(value_coef=0.0)
    case = Case(config)
    loss, _ = case.whole()
    executed = case.batch.step_mask
    assert loss.item() == pytest.approx(-case.logprobs.detach().numpy()[executed].sum() / executed.sum(), abs=1e-10)
    advantages = case.algorithm.compute_advantages(case.batch, case.batch.logprobs, case.targets.old_values)[0]
    assert_allclose(advantages, reference_advantages(case, config), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("value_clip", "bad_weight"), [(0.2, 1.0), (None, 0.25)])
@pytest.mark.parametrize("seed", range(2))
def test_conditioned_cloning_with_values_equals_the_reference(
    seed: int, value_clip: float | None, bad_weight: float
) -> None:
    """The loss of half of the chunks, as of a minibatch: every chunk is cloned, few of them train the value."""
    config = RECAPConfig(
        bad_weight=bad_weight,
        value_coef=0.7,
        value_clip=value_clip,
        huber_delta=0.8,
        gamma=0.9,
        bootstrap="truncated",
    )
    case = Case(config, seed, episodes=12)
    old = case.targets.old_values.astype(float)
    returns = np.array(reference_advantages(case, config)) + old
    assert_allclose(case.targets.returns, returns, rtol=1e-5, atol=1e-5)
    case.targets = replace(case.targets, returns=returns)  # not rounded to float32
    logprobs, values = (x.detach().numpy() for x in (case.logprobs, case.predictions))
    rows = np.random.default_rng(seed).permutation(case.batch.num_chunks)[: case.batch.num_chunks // 2]
    policy = value = 0.0
    steps = valued = 0
    for m in rows.tolist():
        for k in range(case.batch.num_steps[m]):
            policy -= sum(logprobs[m, k].tolist()) * (bad_weight if case.targets.condition[m] == 2 else 1.0)
            steps += 1
        if case.targets.condition[m] == 0:
            value += value_loss_reference(values[m], returns[m], old[m], value_clip, config.huber_delta)
            valued += 1
    assert 0 < valued < len(rows) / 2
    loss, sums = case.loss(rows)
    assert sums["policy_loss"].item() == pytest.approx(policy, abs=1e-10)
    assert sums["value_loss"].item() == pytest.approx(value, abs=1e-10)
    assert loss.item() == pytest.approx(policy / steps + 0.7 * value / valued, abs=1e-10)


def test_the_best_chunks_of_each_task_are_good_also_where_many_are_equal() -> None:
    case = Case(RECAPConfig(positive_share=0.3, condition_dropout=1e-9), episodes=40)
    batch, tied = case.batch, np.zeros(case.batch.num_chunks)
    tied[:2] = 1.0
    batch.task[batch.num_chunks // 2 :] = 1
    first = batch.task == 0
    conditions = case.algorithm.choose_conditions(batch, np.where(first, tied, 0.0))
    assert conditions[first].tolist().count(1) == round(0.3 * first.sum()), "ties are drawn by lot"
    assert (conditions[:2] == 1).all()
    assert not conditions[~first].any(), "nothing is known of a task whose chunks are all equal"


@pytest.mark.parametrize("config", [PPOConfig(), AWRConfig(), RECAPConfig()])
def test_without_a_difference_nothing_is_better(config: AlgorithmConfig) -> None:
    case = Case(config, episodes=12)
    case.batch.rewards[:] = 0.0
    targets = case.new_targets()
    assert not targets.advantages.any()
    assert not case.algorithm.moves_policy(targets, 0)
    case.batch.rewards[0, 0] = 1.0
    assert case.algorithm.moves_policy(case.new_targets(), 0)


def test_values_never_see_how_the_episode_went_on() -> None:
    """A condition tells the return, so a chunk under one trains no value, and ratios are compared within one prompt."""
    case = Case(RECAPConfig(positive_share=0.4, value_clip=None), episodes=30)
    conditions = case.targets.condition
    assert set(conditions.tolist()) == {0, 1, 2}
    loss, sums = case.whole()
    values = case.gradients(loss)[2].numpy()
    executed = case.batch.num_steps > 0
    assert np.array_equal(values != 0, (conditions == 0) & executed)
    log_ratios = (case.logprobs.detach().numpy() - case.batch.logprobs).sum(axis=2)
    good = case.batch.step_mask & (conditions == 1)[:, None]
    expected = (np.exp(log_ratios) - 1 - log_ratios)[good].mean()
    metrics = case.algorithm.finish_metrics({name: float(x) for name, x in sums.items()}, case.targets)
    assert metrics["approx_kl"] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match=r"kl_coef=0\.1.*set kl_coef=0"):
        RECAPConfig(kl_coef=0.1)
    with pytest.raises(ValueError, match="condition_dropout"):
        RECAPConfig(condition_dropout=0.0)


@pytest.mark.parametrize("config", [PPOConfig(bc_coef=0.3), RECAPConfig(bc_coef=0.3, value_warmup=1)])
def test_the_anchor_is_the_mean_over_cloned_tokens(config: AlgorithmConfig) -> None:
    """Shares of two micro-batches sum to it; while only values are trained, it is 0."""
    rng = np.random.default_rng(0)
    logprobs, num_steps = -rng.random((5, 3, 2)), np.array([3, 1, 2, 0, 3])
    expected = -config.bc_coef * np.mean(
        [x for row, n in zip(logprobs, num_steps, strict=True) for x in row[:n].ravel()]
    )
    algorithm, steps = make_algorithm(config), int(num_steps.sum())
    for version, wanted in ((1, expected), (0, 0.0 if getattr(config, "value_warmup", 0) else expected)):
        parts = [
            algorithm.cloning_loss(torch.tensor(logprobs[part]), torch.tensor(num_steps[part]), steps, version)[0]
            for part in (slice(0, 2), slice(2, 5))
        ]
        assert sum(parts).item() == pytest.approx(wanted, abs=1e-12)


def test_prompts_name_every_task_under_every_condition() -> None:
    config, plain = RECAPConfig(condition_dropout=0.4), AWRConfig()
    assert config.prompts(("push", "pull")) == (
        *("push", "pull"),
        *("push advantage: positive", "pull advantage: positive"),
        *("push advantage: negative", "pull advantage: negative"),
    )
    assert plain.prompts(("push",)) == ("push",)
    late = RECAPConfig(condition_after=3)
    assert [late.acting_condition(version) for version in (0, 2, 3)] == [0, 0, 1]
    assert (config.acting_condition(0), plain.acting_condition(9)) == (1, 0)
    draws = np.array([0.3, 0.5, 0.89, 0.91])
    assert config.demonstration_conditions(draws).tolist() == [0, 1, 1, 1]
    assert config.warm_start_conditions(draws).tolist() == [0, 1, 1, 2], "it has met all conditions"
    assert not plain.warm_start_conditions(draws).any()
