"""Implicit Q-learning against an independent reference in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from algos import make_algorithm
from algos.iql import IQL as Algorithm
from tests.algos.ppo_case import IQL, Case
from tests.algos.reference_algos import returns_reference


@pytest.mark.parametrize("seed", range(3))
def test_weights_and_returns_equal_the_reference(seed: int) -> None:
    case = Case(IQL, seed)
    batch, values, q = case.batch, case.values, case.q
    assert values is not None
    assert q is not None
    weights, returns = case.algorithm.compute_advantages(batch, batch.logprobs, values, q)
    for m, row in enumerate(q.astype(float)):
        expected = np.exp(IQL.beta * (min(row) - float(values[m])))
        assert weights[m] == pytest.approx(min(expected, IQL.max_weight), rel=1e-10)
    assert np.isclose(weights, IQL.max_weight).any(), "the limit is part of the comparison"
    for b in range(batch.num_episodes):
        rows = range(batch.offsets[b], batch.offsets[b + 1])
        rewards = [sum(float(r) for r in batch.rewards[m, : batch.num_steps[m]]) for m in rows]
        assert returns[list(rows)] == pytest.approx(returns_reference(rewards, 0.0, IQL.gamma), abs=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_the_policys_loss_equals_the_reference(seed: int) -> None:
    case = Case(IQL, seed)
    weights, _ = case.algorithm.compute_advantages(case.batch, case.batch.logprobs, *_of(case))
    case.targets = replace(case.targets, advantages=weights)  # not rounded to float32
    logprobs, steps = case.logprobs.detach().numpy(), case.batch.num_steps.tolist()
    expected = -sum(w * logprobs[m, :n].sum() for m, (w, n) in enumerate(zip(weights, steps, strict=True)))
    assert case.whole()[0].item() == pytest.approx(expected / sum(steps), abs=1e-10)


def test_the_critics_loss_equals_the_reference() -> None:
    rng = np.random.default_rng(0)
    q, target_q = rng.normal(size=(2, 7, 3))
    values, next_values, rewards = rng.normal(size=(3, 7))
    expected = 0.0
    for i in range(7):
        aim, u = rewards[i] + IQL.gamma * next_values[i], min(target_q[i]) - values[i]
        expected += sum(0.5 * (rating - aim) ** 2 for rating in q[i])
        expected += (IQL.expectile if u > 0 else 1 - IQL.expectile) * u**2
    given = [torch.tensor(x, requires_grad=True) for x in (q, target_q, values, next_values, rewards)]
    loss = _algorithm().critic_loss(*given)
    assert loss.item() == pytest.approx(expected / 7, abs=1e-10)
    loss.backward()
    assert given[1].grad is None, "the target network and V(s') are constants"
    assert given[3].grad is None


def test_the_value_is_the_expectile_of_the_ratings() -> None:
    """Where the weighted distances above and below balance: of many outcomes, nearer to the better ones."""
    outcomes = torch.randn(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    value, zeros = torch.zeros(1, dtype=torch.float64, requires_grad=True), torch.zeros_like(outcomes)
    optimizer = torch.optim.SGD([value], lr=0.4)
    for _ in range(200):
        optimizer.zero_grad()
        _algorithm().critic_loss(zeros[:, None], outcomes[:, None], value.expand(2000), zeros, zeros).backward()
        optimizer.step()
    above = (outcomes - value.detach()).clamp(min=0).sum()
    below = (value.detach() - outcomes).clamp(min=0).sum()
    assert (IQL.expectile * above).item() == pytest.approx(((1 - IQL.expectile) * below).item(), rel=1e-6)
    assert value.item() > 0.3


def _algorithm() -> Algorithm:
    algorithm = make_algorithm(IQL)
    assert isinstance(algorithm, Algorithm)
    return algorithm


def _of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    assert case.values is not None
    assert case.q is not None
    return case.values, case.q
