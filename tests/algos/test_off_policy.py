"""Targets and losses of off-policy control, against loops in plain float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from algos import make_algorithm
from algos.best_of_n import BestOfN, BestOfNConfig
from algos.off_policy import Acted, GradientAlgorithm
from algos.rlpd import RLPDConfig
from algos.sac import SACConfig
from algos.td3_bc import TD3BCConfig
from algos.td_losses import (
    alpha_loss,
    best_candidate,
    bin_targets,
    chunk_return,
    conservative_loss,
    excess_loss,
    hl_gauss_loss,
    imagined_loss,
    return_of_chunks,
    td3_bc_loss,
    td_aim,
    td_loss,
)

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


@pytest.mark.parametrize("chunks", [1, 3])
def test_chunks_in_a_row_earn_as_their_steps_one_by_one(chunks: int) -> None:
    rng, gamma = np.random.default_rng(chunks), 0.9
    rewards, num_steps = rng.normal(size=(N, chunks, K)), rng.integers(1, K + 1, (N, chunks))
    num_steps[0, 1:] = 0  # an episode that ends
    earned, discount = return_of_chunks(torch.from_numpy(rewards), torch.from_numpy(num_steps), gamma)
    for i in range(N):
        steps = [rewards[i, c, k] for c in range(chunks) for k in range(num_steps[i, c])]
        assert earned[i].item() == pytest.approx(sum(gamma**k * r for k, r in enumerate(steps)), abs=1e-10)
        assert discount[i].item() == pytest.approx(gamma ** len(steps), abs=1e-10)


def test_losses_of_the_critic_equal_loops() -> None:
    rng = np.random.default_rng(0)
    q, aim, other = rng.normal(size=(N, M)), rng.normal(size=N), rng.normal(size=(N, 5, M))
    squares = sum((q[i, m] - aim[i]) ** 2 for i in range(N) for m in range(M)) / N
    levels = [[math.log(sum(math.exp(x) for x in other[i, :, m]) / 5) for m in range(M)] for i in range(N)]
    conservative = sum(levels[i][m] - q[i, m] for i in range(N) for m in range(M)) / N
    assert td_loss(torch.from_numpy(q), torch.from_numpy(aim)).item() == pytest.approx(squares, abs=1e-10)
    assert conservative_loss(torch.from_numpy(q), torch.from_numpy(other)).item() == pytest.approx(conservative, 1e-6)
    algorithm = make_algorithm(TD3BCConfig(cql_coef=0.3))
    assert isinstance(algorithm, GradientAlgorithm)
    both = algorithm.critic_loss(torch.tensor(2.0), *map(torch.from_numpy, (q, other)))
    assert both.item() == pytest.approx(2 + 0.3 * conservative, abs=1e-6)


def test_the_loss_on_imagined_chunks_compares_those_of_one_state() -> None:
    rng = np.random.default_rng(5)
    q, gains = rng.normal(size=(N, 3, M)), rng.normal(size=(N, 3))
    expected = 0.0
    for i in range(N):
        for m in range(M):
            mean = sum(q[i, :, m]) / 3
            expected += sum((q[i, b, m] - mean - gains[i, b]) ** 2 for b in range(3)) / (3 * N)
    assert imagined_loss(torch.from_numpy(q), torch.from_numpy(gains)).item() == pytest.approx(expected, abs=1e-10)
    higher = q + rng.normal(size=(N, 1, M))
    assert imagined_loss(torch.from_numpy(higher), torch.from_numpy(gains)).item() == pytest.approx(expected, abs=1e-10)


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


def test_an_actor_is_brought_back_from_beyond_the_limits() -> None:
    rng = np.random.default_rng(6)
    means, low, high = rng.normal(size=(N, K, A)), rng.uniform(-1, -0.5, (K, A)), rng.uniform(0.5, 1, (K, A))
    beyond = [max(0.0, low[k, a] - means[i, k, a]) + max(0.0, means[i, k, a] - high[k, a])
              for i in range(N) for k in range(K) for a in range(A)]  # fmt: skip
    given = torch.from_numpy(means).requires_grad_()
    loss = excess_loss(given, torch.from_numpy(low), torch.from_numpy(high))
    assert loss.item() == pytest.approx(sum(x**2 for x in beyond) / N, abs=1e-10)
    loss.backward()
    assert torch.equal(given.grad != 0, torch.tensor(beyond).reshape(N, K, A) > 0), "what is within stays"
    inwards = given.grad[means > high]
    assert len(inwards)
    assert (inwards > 0).all()


@pytest.mark.parametrize("in_aim", [False, True])
def test_the_soft_actor_follows_the_critic_and_its_entropy(in_aim: bool) -> None:
    rng = np.random.default_rng(2)
    q, means, entropy, recorded = rng.normal(size=N), *(rng.normal(size=(N, K, A)) for _ in range(3))
    executed = np.arange(K) < rng.integers(1, K, N)[:, None]
    counted = [(i, k) for i in range(N) for k in range(K) if executed[i, k]]
    distance = np.mean([(means[at] - recorded[at]) ** 2 for at in counted])
    scale = 1.0 if in_aim else np.abs(q).mean()
    expected = -q.mean() / scale - 0.2 * np.mean([entropy[at] for at in counted]) + 0.7 * distance
    algorithm = make_algorithm(SACConfig(cloning=0.7, entropy_in_aim=in_aim))
    assert isinstance(algorithm, GradientAlgorithm)
    given = [torch.from_numpy(x).requires_grad_(x.dtype != bool) for x in (q, means, entropy, recorded, executed)]
    loss = algorithm.actor_loss(Acted(*given), 0.2)
    assert loss.item() == pytest.approx(expected, abs=1e-10)
    loss.backward()
    assert not any(given[i].grad[~torch.from_numpy(executed)].any() for i in (1, 2)), (
        "what was not executed is left out"
    )
    rated = torch.from_numpy(rng.normal(size=(N, M)))
    after = algorithm.values_after(rated, given[2].detach(), 0.2)
    mean = torch.from_numpy(np.array([0.2 * np.mean(entropy[i]) for i in range(N)]))
    assert torch.allclose(after - rated, in_aim * mean[:, None].expand(N, M), atol=1e-10)


def test_soft_chunks_are_drawn_from_mean_and_deviation() -> None:
    """And the rating moves both of them."""
    rng = np.random.default_rng(3)
    algorithm = make_algorithm(SACConfig())
    assert isinstance(algorithm, GradientAlgorithm)
    means, deviations, noise = (torch.from_numpy(rng.uniform(0.1, 1, (N, K, A))) for _ in range(3))
    for x in (means, deviations):
        x.requires_grad_()
    for draw in (algorithm.chunks, algorithm.chunks_near, algorithm.chunks_after):
        chunk = draw(means, deviations, noise)
        at = 2, 1, 0
        expected = means[at].item() + deviations[at].item() * noise[at].item()
        assert chunk[at].item() == pytest.approx(expected, abs=1e-10)
    chunk.sum().backward()
    assert torch.equal(deviations.grad, noise)
    assert torch.equal(means.grad, torch.ones_like(means))


def test_the_weight_of_the_entropy_grows_while_there_is_too_little_of_it() -> None:
    log = torch.tensor(math.log(0.3), dtype=torch.float64, requires_grad=True)
    loss = alpha_loss(log, entropy=-0.5, target=0.2)
    assert loss.item() == pytest.approx(0.3 * (-0.5 - 0.2), abs=1e-10)
    loss.backward()
    assert log.grad.item() == pytest.approx(0.3 * -0.7, abs=1e-10), "a step down the loss raises it"
    with pytest.raises(ValueError, match="alpha=0 cannot be tuned"):
        SACConfig(alpha=0.0, target_entropy=-1.0)


def test_rlpd_needs_demonstrations() -> None:
    config = RLPDConfig(demos=("a.hdf5",))
    assert (config.critics, config.critic_subset, config.demo_share, config.entropy_in_aim) == (10, 2, 0.5, False)
    for wrong in ({}, {"demos": ("a.hdf5",), "demo_share": 0.0}):
        with pytest.raises(ValueError, match=r"name their files in algo\.demos"):
            RLPDConfig(**wrong)


def test_the_choosing_critic_learns_ratings_and_their_expectile() -> None:
    rng = np.random.default_rng(4)
    target_q, values = rng.normal(size=(N, M)), rng.normal(size=N)
    better = [min(target_q[i]) - values[i] for i in range(N)]
    expected = sum((0.8 if u > 0 else 0.2) * u**2 for u in better) / N
    algorithm = make_algorithm(BestOfNConfig(expectile=0.8))
    assert isinstance(algorithm, BestOfN)
    given = [torch.from_numpy(x).requires_grad_() for x in (target_q, values)]
    loss = algorithm.critic_loss(torch.tensor(2.0, dtype=torch.float64), *given)
    assert loss.item() == pytest.approx(2 + expected, abs=1e-10)
    loss.backward()
    assert given[0].grad is None


def test_the_choice_is_the_best_by_the_least_rating_and_its_steps_are_cloned() -> None:
    rng = np.random.default_rng(5)
    rated, executed, success = rng.normal(size=(40, 3, M)), rng.normal(size=(40, M)) + 0.5, rng.random(40) < 0.5
    choice = best_candidate(*map(torch.from_numpy, (rated, executed, success)))
    for i in range(40):
        least = [min(rated[i, j]) for j in range(3)] + [min(executed[i]) if success[i] else -math.inf]
        assert choice[i] == least.index(max(least))
    assert (choice == 3).any()
    logprobs, counted = rng.normal(size=(N, K, A)), rng.random((N, K)) < 0.5
    expected = -np.mean([logprobs[i, k] for i in range(N) for k in range(K) if counted[i, k]])
    algorithm = make_algorithm(BestOfNConfig())
    assert isinstance(algorithm, BestOfN)
    assert algorithm.actor_loss(*map(torch.from_numpy, (logprobs, counted))).item() == pytest.approx(
        expected, abs=1e-10
    )


def test_ratings_of_bins_learn_a_smoothed_aim() -> None:
    """Cross-entropy with a normal distribution of 0.75 bins, cut off at the ends (arXiv:2403.03950)."""
    rng = np.random.default_rng(6)
    edges, width = np.linspace(-0.5, 1.5, 11), 0.2
    logits, aim = rng.normal(size=(N, M, 10)), np.array([-0.7, -0.5, 0.0, 0.33, 1.0, 1.44, 3.0])

    def below(x: float, center: float) -> float:
        return 0.5 * (1 + math.erf((x - center) / (0.75 * width * math.sqrt(2))))

    expected = 0.0
    for i in range(N):
        center = min(max(aim[i], -0.5), 1.5)
        whole = below(edges[-1], center) - below(edges[0], center)
        wanted = [(below(edges[b + 1], center) - below(edges[b], center)) / whole for b in range(10)]
        for m in range(M):
            norm = math.log(sum(math.exp(x) for x in logits[i, m]))
            expected -= sum(wanted[b] * (logits[i, m, b] - norm) for b in range(10)) / N
    given = [torch.from_numpy(x) for x in (logits, aim, edges)]
    assert hl_gauss_loss(*given).item() == pytest.approx(expected, abs=1e-10)
    middle = 0.5 * (given[2][1:] + given[2][:-1])
    assert torch.allclose(bin_targets(given[1], given[2])[3] @ middle, given[1][3], atol=1e-3), "its mean is the aim"
    with pytest.raises(ValueError, match="must enclose"):
        TD3BCConfig(q_min=0.1)
