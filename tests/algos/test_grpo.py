"""algos.grpo: advantages within groups, averages, and the settings that make it RLOO, Dr. GRPO or REINFORCE++."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from algos import make_algorithm
from algos.advantages import episode_returns, group_advantages
from algos.config import PolicyGradientConfig
from algos.grpo import GRPOConfig
from tests.algos.peer_layouts import exact_case
from tests.algos.ppo_case import GROUPED, GRPO_CONFIGS, SEED, Case, describe_config
from tests.algos.reference_algos import elements_of, random_super_batch

BASELINES, SCALES = st.sampled_from(["mean", "leave_one_out"]), st.sampled_from(["group", "batch", "none"])


def reference_advantages(returns: list[float], group: list[int], baseline: str, scale: str) -> list[float]:
    differences = []
    for i, g in enumerate(group):
        others = [r for j, r in enumerate(returns) if group[j] == g and (baseline == "mean" or j != i)]
        differences.append(returns[i] - sum(others) / len(others))
    deviations = []
    for g in group:
        match scale:
            case "group":
                deviations.append(np.std([r for j, r in enumerate(returns) if group[j] == g], ddof=1) + 1e-6)
            case "batch":
                deviations.append(np.sqrt(np.mean(np.square(differences))) + 1e-6)
            case _:
                deviations.append(1.0)
    return [d / s for d, s in zip(differences, deviations, strict=True)]


@settings(max_examples=60, deadline=None)
@given(seed=SEED, sizes=st.lists(st.integers(2, 6), min_size=1, max_size=5), baseline=BASELINES, scale=SCALES)
def test_advantages_equal_the_reference_in_any_order(seed: int, sizes: list[int], baseline: Any, scale: Any) -> None:
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(rng.permutation(100)[: len(sizes)], sizes))
    returns = rng.choice([0.0, 1.0, 0.3], len(group))
    found = group_advantages(returns, group, baseline=baseline, scale=scale)
    expected = reference_advantages(returns.tolist(), group.tolist(), baseline, scale)
    assert_allclose(found, expected, rtol=1e-10, atol=1e-10)
    order = rng.permutation(len(group))
    assert_allclose(group_advantages(returns[order], group[order], baseline=baseline, scale=scale), found[order])
    for g in set(group.tolist()):
        assert found[group == g].sum() == pytest.approx(0.0, abs=1e-9)


def test_a_group_of_equals_teaches_nothing() -> None:
    group = np.array([3, 3, 3, 8, 8, 8])
    for scale in ("group", "batch", "none"):
        advantages = group_advantages(
            np.array([0.1, 0.1, 0.1, 0.0, 0.0, 1.0]), group, baseline="leave_one_out", scale=scale
        )
        assert np.abs(advantages[:3]).max() < 1e-9
        assert advantages[5] > 0 > advantages[3]


def test_published_values_of_one_success_in_eight() -> None:
    """Mean 1/8, unbiased deviation sqrt(1/8): 7/8 over it for the success."""
    returns, group = np.eye(1, 8)[0], np.zeros(8, int)
    assert group_advantages(returns, group, baseline="mean", scale="group")[0] == pytest.approx(7 / 8**0.5, rel=1e-5)
    assert group_advantages(returns, group, baseline="leave_one_out", scale="none").tolist() == pytest.approx(
        [1.0] + [-1 / 7] * 7
    )


def test_an_episode_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="group 5 has one episode"):
        group_advantages(np.ones(3), np.array([2, 2, 5]), baseline="mean", scale="none")


def test_returns_are_sums_of_executed_rewards() -> None:
    batch = random_super_batch(np.random.default_rng(2), 6)
    expected = [
        sum(batch.rewards[m, : batch.num_steps[m]].sum() for m in range(first, last))
        for first, last in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    ]
    assert_allclose(episode_returns(batch.rewards, batch.num_steps, batch.offsets), expected, rtol=1e-6)


@pytest.mark.parametrize("average", ["elements", "episodes", "constant"])
@pytest.mark.parametrize("config", GRPO_CONFIGS, ids=describe_config)
def test_the_loss_is_the_average_that_was_asked_for(config: GRPOConfig, average: Any) -> None:
    """From per-element losses that are computed one by one, with the advantage of the whole episode.

    Divergence and entropy are part of an element's loss, so each average is over them, too. The time limit cuts the
    last chunk of the longest episode short, and that chunk counts.
    """
    config = config.model_copy(update={"average": average})
    case = exact_case(config, seed=4)
    case.batch = batch = replace(case.batch, max_episode_steps=29)
    case.targets = replace(case.targets, weights=case.algorithm.element_weights(batch))
    reference = case.targets.reference_logprobs
    entropies = case.entropy.detach().numpy()
    returns = episode_returns(batch.rewards, batch.num_steps, batch.offsets)
    advantages = reference_advantages(returns.tolist(), batch.group.tolist(), config.baseline, config.scale)
    logprobs, proximal = case.logprobs.detach().numpy(), case.targets.proximal_logprobs.astype(float)
    episodes = []
    for b, advantage in enumerate(advantages):
        losses = []
        for m in range(batch.offsets[b], batch.offsets[b + 1]):
            for element in elements_of(int(batch.num_steps[m]), batch.logprobs.shape[2], config.ratio_level):
                at = tuple(np.array([(m, k, a) for k, a in element]).T)
                ratio = np.exp((logprobs[at] - proximal[at]).sum())
                weight = np.exp((proximal[at] - batch.logprobs[at].astype(float)).sum())
                weight = min(weight, config.importance_cap or np.inf)
                clipped = np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
                loss = -weight * min(ratio * advantage, clipped * advantage) - config.entropy_coef * entropies[at].sum()
                if reference is not None:
                    odds = np.exp(reference[at].astype(float) - logprobs[at])
                    loss += config.kl_coef * (odds - 1 - np.log(odds)).sum()
                losses.append(loss)
        episodes.append(losses)
    longest = sum(len(elements_of(n, batch.logprobs.shape[2], config.ratio_level)) for n in 9 * [3] + [2])
    expected = {
        "elements": np.mean(np.concatenate(episodes)),
        "episodes": np.mean([np.mean(losses) for losses in episodes]),
        "constant": np.sum(np.concatenate(episodes)) / len(episodes) / longest,
    }[average]
    total, _ = case.whole()
    assert total.item() == pytest.approx(expected, abs=1e-10)
    value_gradient = case.gradients(total)[2]
    assert value_gradient.abs().max() == 0.0


CHANGES: dict[str, Any] = {  # what is not shared with PPO, where the other keys are tested
    "baseline": "leave_one_out",
    "scale": "group",
    "average": "episodes",
}
OF_THE_STORE = {"group_size", "success_low", "success_high", "max_filtered"}


@pytest.mark.parametrize("key", CHANGES)
def test_every_key_of_the_loss_is_read(key: str) -> None:
    base = GROUPED.model_copy(update={"proximal": "recomputed", "scale": "none"})
    case, other = Case(base), Case(base)
    other.algorithm = make_algorithm(base.model_copy(update={key: CHANGES[key]}))
    other.targets = other.new_targets()
    assert other.whole()[0].item() != pytest.approx(case.whole()[0].item(), abs=1e-6)


def test_every_key_is_covered() -> None:
    assert set(GRPOConfig.model_fields) == set(PolicyGradientConfig.model_fields) | set(CHANGES) | OF_THE_STORE
    rules = GRPOConfig(group_size=4, success_low=0.2, success_high=0.7, max_filtered=9).groups
    assert (rules.size, rules.success_low, rules.success_high, rules.max_filtered) == (4, 0.2, 0.7, 9)


def test_the_value_head_is_left_out_of_the_figures() -> None:
    case = Case(GROUPED)
    metrics = case.algorithm.finish_metrics({k: float(v) for k, v in case.whole()[1].items()}, case.targets)
    assert metrics["value_loss"] == 0.0
    assert "explained_variance" not in metrics


def test_order_of_episodes_does_not_matter() -> None:
    """Targets of a batch whose groups are interleaved equal those of the batch sorted by group, row by row."""
    batch = random_super_batch(np.random.default_rng(3), 6)
    lengths = np.diff(batch.offsets)
    by_chunk = np.repeat(np.arange(6), lengths)
    mixed = replace(batch, group=batch.group[[0, 2, 4, 1, 3, 5]])
    config = GRPOConfig(group_size=2, average="episodes")
    targets = make_algorithm(config).targets(mixed)
    returns = episode_returns(batch.rewards, batch.num_steps, batch.offsets)
    expected = np.array(reference_advantages(returns.tolist(), mixed.group.tolist(), "mean", "group"))
    steps = np.add.reduceat(batch.num_steps, batch.offsets[:-1])
    assert_allclose(targets.advantages, expected[by_chunk], rtol=1e-5)
    assert_allclose(targets.weights, (steps.mean() / steps)[by_chunk], rtol=1e-6)
