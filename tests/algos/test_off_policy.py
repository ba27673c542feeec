"""Targets and losses of off-policy control, against loops in plain float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from algos import make_algorithm
from algos.off_policy import OffPolicyAlgorithm
from algos.td3_bc import TD3BCConfig
from algos.td_losses import chunk_return, conservative_loss, td3_bc_loss, td_aim, td_loss

N, K, A, M = 7, 4, 3, 2


@pytest.mark.parametrize("seed", range(3))
def test_the_aim_is_the_discounted_reward_of_executed_steps_and_the_least_rating_after(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rewards, num_steps = rng.normal(size=(N, K)), rng.integers(1, K + 1, N)
    next_q, continues, gamma = rng.normal(size=(N, M)), rng.random(N) < 0.5, 0.9
    earned, discount = chunk_return(torch.from_numpy(rewards), torch.from_numpy(num_steps), gamma)
    aim = td_aim(earned, discount, torch.from_numpy(next_q), torch.from_numpy(continues))
    for i in range(N):
        expected = sum(gamma**k * rewards[i, k] for k in range(num_steps[i]))
        expected += gamma ** num_steps[i] * min(next_q[i]) if continues[i] else 0.0
        assert aim[i].item() == pytest.approx(expected, abs=1e-10)


def test_losses_of_the_critic_equal_loops() -> None:
    rng = np.random.default_rng(0)
    q, aim, other = rng.normal(size=(N, M)), rng.normal(size=N), rng.normal(size=(N, 5, M))
    squares = sum((q[i, m] - aim[i]) ** 2 for i in range(N) for m in range(M)) / N
    levels = [[math.log(sum(math.exp(x) for x in other[i, :, m]) / 5) for m in range(M)] for i in range(N)]
    conservative = sum(levels[i][m] - q[i, m] for i in range(N) for m in range(M)) / N
    assert td_loss(torch.from_numpy(q), torch.from_numpy(aim)).item() == pytest.approx(squares, abs=1e-10)
    assert conservative_loss(torch.from_numpy(q), torch.from_numpy(other)).item() == pytest.approx(conservative, 1e-6)
    algorithm = make_algorithm(TD3BCConfig(cql_coef=0.3))
    assert isinstance(algorithm, OffPolicyAlgorithm)
    both = algorithm.critic_loss(*map(torch.from_numpy, (q, aim, other)))
    assert both.item() == pytest.approx(squares + 0.3 * conservative, abs=1e-6)


def test_the_actor_follows_the_critic_and_stays_near_executed_actions() -> None:
    rng = np.random.default_rng(1)
    q, actions, recorded = rng.normal(size=N), rng.normal(size=(N, K, A)), rng.normal(size=(N, K, A))
    executed = np.arange(K) < rng.integers(1, K + 1, N)[:, None]
    distance = np.mean([(actions[i, k] - recorded[i, k]) ** 2 for i in range(N) for k in range(K) if executed[i, k]])
    expected = -q.mean() / np.abs(q).mean() + 0.7 * distance
    given = [torch.from_numpy(x).requires_grad_(x.dtype != bool) for x in (q, actions, recorded, executed)]
    loss = td3_bc_loss(*given, cloning=0.7)
    assert loss.item() == pytest.approx(expected, abs=1e-10)
    loss.backward()
    assert torch.allclose(given[0].grad, torch.full((N,), -1 / N / np.abs(q).mean(), dtype=torch.float64))
    assert not given[1].grad[~torch.from_numpy(executed)].any(), "what was not executed is not cloned"
    small = td3_bc_loss(0.01 * given[0], *given[1:], cloning=0.7).item()
    assert small == pytest.approx(-0.01 * q.mean() / 0.2 + 0.7 * distance, abs=1e-10), "noise around 0 stays small"
