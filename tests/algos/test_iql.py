"""algos.iql against slow references, and its critic in the policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from algos.iql import IQLConfig
from algos.losses import expectile_loss
from tests.algos.ppo_case import IQL, Case
from tests.algos.reference_algos import gae_reference


def reference_critic_targets(case: Case, config: IQLConfig) -> list[float]:
    """Lambda-returns from the values before the update."""
    batch, targets = case.batch, []
    assert case.values is not None
    for b in range(batch.num_episodes):
        rows = range(batch.offsets[b], batch.offsets[b + 1])
        rewards = [sum(float(r) for r in batch.rewards[m, : batch.num_steps[m]]) for m in rows]
        values = [float(case.values[m]) for m in rows]
        end = float(batch.bootstrap_value[b]) if batch.truncated[b] else 0.0
        advantages = gae_reference(rewards, values, end, config.gamma, config.gae_lambda)
        targets += [a + v for a, v in zip(advantages, values, strict=True)]
    return targets


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_targets_equal_the_reference(lam: float) -> None:
    config = IQL.model_copy(update={"gae_lambda": lam})
    case = Case(config)
    assert case.values is not None
    assert case.q is not None
    found = case.algorithm.critic_targets(case.batch, case.values)
    assert_allclose(found, reference_critic_targets(case, config), rtol=1e-10, atol=1e-10)
    if lam == 0.0:  # r + gamma V(s'), as published
        rewards = [float(case.batch.rewards[0, : case.batch.num_steps[0]].astype(np.float64).sum())]
        inner = case.batch.offsets[1] > 1
        following = float(case.values[1]) if inner else case.batch.truncated[0] * float(case.batch.bootstrap_value[0])
        assert found[0] == pytest.approx(rewards[0] + config.gamma * following, abs=1e-10)
    weights, least = case.algorithm.compute_advantages(case.batch, case.batch.logprobs, case.values, case.q)
    for m, row in enumerate(case.q.astype(float)):
        assert least[m] == min(row)
        expected = np.exp(config.beta * (min(row) - float(case.values[m])))
        assert weights[m] == pytest.approx(min(expected, config.max_weight), rel=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_equals_the_reference(seed: int) -> None:
    case = Case(IQL, seed)
    batch, values, q = case.batch, case.values, case.q
    assert values is not None
    assert q is not None
    assert case.ratings is not None
    weights, least = case.algorithm.compute_advantages(batch, batch.logprobs, values, q)
    targets = reference_critic_targets(case, IQL)
    exact = {"advantages": weights, "returns": least, "critic_targets": np.array(targets)}
    case.targets = replace(case.targets, **exact)  # not rounded to float32
    logprobs, predictions, ratings = (x.detach().numpy() for x in (case.logprobs, case.predictions, case.ratings))
    policy = value = 0.0
    for m, steps in enumerate(batch.num_steps.tolist()):
        policy -= weights[m] * logprobs[m, :steps].sum()
        u = least[m] - predictions[m]
        value += (IQL.expectile if u > 0 else 1 - IQL.expectile) * u**2
        value += sum(0.5 * (rating - targets[m]) ** 2 for rating in ratings[m])
    expected = policy / batch.num_steps.sum() + IQL.value_coef * value / batch.num_chunks
    assert case.whole()[0].item() == pytest.approx(expected, abs=1e-10)


def test_the_expectile_loss_finds_the_expectile() -> None:
    """Where the weighted distances above and below balance: of many outcomes, nearer to the better ones."""
    outcomes = torch.randn(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    value = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([value], lr=2e-4)
    for _ in range(200):
        optimizer.zero_grad()
        expectile_loss(value.expand(2000), outcomes, torch.ones(2000, dtype=torch.bool), 0.9).backward()
        optimizer.step()
    above = (outcomes - value.detach()).clamp(min=0).sum()
    below = (value.detach() - outcomes).clamp(min=0).sum()
    assert (0.9 * above).item() == pytest.approx((0.1 * below).item(), rel=1e-6)
    assert value.item() > 0.5


def test_a_critic_rates_the_chunk_in_the_state_and_leaves_the_policy_alone() -> None:
    from tests.policies.policy_helpers import inputs, make, nano
    from vla_rl.policies.openvla_oft.lora import merged_state

    plain, policy = make(nano()), make(nano())
    policy.add_critic(3, seed=0)
    seen = inputs(policy.architecture)
    shape = 3, policy.architecture.chunk_size, policy.architecture.action_dim
    tokens = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    output = policy(*seen, 1.0, True, tokens)
    assert output.q is not None
    assert output.q.shape == (3, 3)
    assert torch.equal(output.logits, plain(*seen, 1.0).logits)
    assert (output.q[:, 0] - output.q[:, 1]).abs().min() > 1e-6, "members differ"
    other = policy(*seen, 1.0, True, 255 - tokens).q
    assert (other - output.q).abs().min() > 1e-6
    output.q.sum().backward()
    assert all(p.grad is None for p in policy.trunk_parameters())
    assert set(policy.acting_parameters()) == set(plain.trained_parameters())
    assert set(merged_state(policy)) == set(plain.state_dict()), "it is not part of a checkpoint"
    assert plain(*seen, 1.0, True, tokens).q is None
