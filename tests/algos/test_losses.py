"""algos.losses against hand-computed cases, a slow reference, finite differences and the edges of every clip."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor

from algos.losses import (
    LossTerms,
    RatioLevel,
    behaviour_weights,
    clipped_surrogate,
    clipped_value_loss,
    element_mask,
    gaussian_surrogate,
    k3_divergence,
    log_ratio,
    pool,
    token_mask,
    total_loss,
    weighted_surrogate,
)
from tests.algos.reference_algos import elements_of, huber_reference, value_loss_reference

LEVELS: tuple[RatioLevel, ...] = get_args(RatioLevel)
F64 = torch.float64
NUM_STEPS = torch.tensor([3, 1, 2, 0])
SHAPE = (4, 3, 2)  # n, K, A


def tensor(*numbers: float, grad: bool = False) -> Tensor:
    return torch.tensor(numbers, dtype=F64, requires_grad=grad)


def normal(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return x.requires_grad_(grad)


# --- elements ---------------------------------------------------------------------------------------------------------


def test_masks_by_hand() -> None:
    tokens = token_mask(torch.tensor([2, 0]), chunk_size=3, action_dim=2)
    assert tokens.tolist() == [[[True] * 2, [True] * 2, [False] * 2], [[False] * 2] * 3]
    assert element_mask(tokens, "token").tolist() == tokens.tolist()
    assert element_mask(tokens, "action").tolist() == [[True, True, False], [False] * 3]
    assert element_mask(tokens, "chunk").tolist() == [True, False]


def test_pool_by_hand() -> None:
    per_token = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]]])
    tokens = token_mask(torch.tensor([2]), 3, 2)
    assert pool(per_token, tokens, "token").tolist() == [[[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]]
    assert pool(per_token, tokens, "action").tolist() == [[3.0, 7.0, 0.0]]
    assert pool(per_token, tokens, "chunk").tolist() == [10.0]


@pytest.mark.parametrize("level", LEVELS)
def test_log_ratio_sums_over_the_tokens_of_each_element(level: RatioLevel) -> None:
    new, old = normal(*SHAPE, seed=1), normal(*SHAPE, seed=2)
    tokens = token_mask(NUM_STEPS, *SHAPE[1:])
    ratios = log_ratio(new, old, tokens, level)[element_mask(tokens, level)]
    expected = [
        sum(float(new[i, k, a] - old[i, k, a]) for k, a in element)
        for i, steps in enumerate(NUM_STEPS)
        for element in elements_of(int(steps), SHAPE[2], level)
    ]
    assert_allclose(ratios.numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("garbage", [1e6, -1e6, math.inf, math.nan])
@pytest.mark.parametrize("level", LEVELS)
def test_what_lies_behind_the_end_changes_no_ratio_and_no_gradient(level: RatioLevel, garbage: float) -> None:
    tokens = token_mask(NUM_STEPS, *SHAPE[1:])
    results = []
    for fill in (0.0, garbage):
        new = torch.where(tokens, normal(*SHAPE, seed=1), tensor(fill)).requires_grad_()
        old = torch.where(tokens, normal(*SHAPE, seed=2), tensor(fill))
        advantages = torch.where(NUM_STEPS > 0, normal(4, seed=3), tensor(fill))
        mask = element_mask(tokens, level)
        loss = clipped_surrogate(log_ratio(new, old, tokens, level), advantages, mask, 0.2, 0.2)
        results.append((loss, *torch.autograd.grad(loss, new)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert torch.all(results[1][1][~tokens] == 0)


def test_half_precision_is_raised_to_float32() -> None:
    tokens = token_mask(torch.tensor([1]), 1, 2)
    new = torch.tensor([[[-1.0, -2.0]]], dtype=torch.bfloat16)
    old = torch.tensor([[[-1.001, -2.0]]])
    assert log_ratio(new, old, tokens, "action").dtype == torch.float32
    assert log_ratio(new, old, tokens, "action").item() == pytest.approx(0.001, rel=1e-4)


def test_extreme_ratios_stay_finite() -> None:
    tokens = token_mask(torch.tensor([1, 1]), 1, 1)
    new = torch.tensor([[[500.0]], [[-500.0]]], requires_grad=True)
    ratios = log_ratio(new, torch.zeros(2, 1, 1), tokens, "chunk")
    for sign in (1.0, -1.0):
        weights = behaviour_weights(ratios, None, None, None)
        loss = clipped_surrogate(ratios, sign * torch.ones(2), torch.ones(2, dtype=torch.bool), 0.2, 0.2, weights)
        (gradient,) = torch.autograd.grad(loss, new, retain_graph=True)
        assert torch.isfinite(loss)
        assert torch.all(torch.isfinite(gradient))


# --- clipped surrogate ------------------------------------------------------------------------------------------------

# (ratio, advantage) -> loss, gradient with respect to the log-ratio; limits 1 - 0.2 and 1 + 0.28
SURROGATE_CASES = [
    (1.0, 2.0, -2.0, -2.0),  # at the start of an update: the plain policy gradient
    (1.1, 1.0, -1.1, -1.1),  # within the limits
    (1.5, 1.0, -1.28, 0.0),  # a good action already much likelier: stop
    (1.5, -1.0, 1.5, 1.5),  # a bad action much likelier: pull back, without limit
    (0.5, -1.0, 0.8, 0.0),  # a bad action already much less likely: stop
    (0.5, 1.0, -0.5, -0.5),  # a good action much less likely: pull back
    (1.5, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), SURROGATE_CASES)
def test_surrogate_and_its_gradient_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    log_ratios = tensor(math.log(ratio), grad=True)
    result = clipped_surrogate(log_ratios, tensor(advantage), torch.tensor([True]), clip_low=0.2, clip_high=0.28)
    assert result.item() == pytest.approx(loss, abs=1e-12)
    (found,) = torch.autograd.grad(result, log_ratios)
    assert found.item() == pytest.approx(gradient, abs=1e-12)
    assert (found.item() == 0.0) == (gradient == 0.0)


@pytest.mark.parametrize("side", ["low", "high"])
def test_gradient_vanishes_exactly_when_a_limit_is_crossed(side: str) -> None:
    limit, advantage = (0.8, -1.0) if side == "low" else (1.28, 1.0)
    outwards = -1e-9 if side == "low" else 1e-9
    log_ratios = tensor(math.log(limit) - outwards, math.log(limit) + outwards, grad=True)
    mask = torch.ones(2, dtype=torch.bool)
    loss = clipped_surrogate(log_ratios, tensor(advantage, advantage), mask, 0.2, 0.28)
    (gradient,) = torch.autograd.grad(loss, log_ratios)
    assert gradient[0].item() == pytest.approx(-limit * advantage, rel=1e-6)
    assert gradient[1].item() == 0.0
    wrong_way = clipped_surrogate(log_ratios, tensor(-advantage, -advantage), mask, 0.2, 0.28)
    (gradient,) = torch.autograd.grad(wrong_way, log_ratios)
    assert_allclose(gradient.numpy(), limit * advantage, rtol=1e-6)


def test_weights_scale_each_element_and_carry_no_gradient() -> None:
    log_ratios, mask = tensor(0.1, -0.1, grad=True), torch.tensor([True, True])
    weights = tensor(2.0, 0.5, grad=True)
    # -(2 * e^0.1 * 1 + 0.5 * e^-0.1 * 3)
    loss = clipped_surrogate(log_ratios, tensor(1.0, 3.0), mask, 0.2, 0.2, weights)
    assert loss.item() == pytest.approx(-2 * math.exp(0.1) - 1.5 * math.exp(-0.1))
    loss.backward()
    assert weights.grad is None
    assert log_ratios.grad is not None
    assert_allclose(log_ratios.grad.numpy(), [-2 * math.exp(0.1), -1.5 * math.exp(-0.1)])


def test_truncated_weights_by_hand() -> None:
    logs = tensor(math.log(0.5), 0.0, math.log(4.0))
    for limits, expected in {
        (None, None, None): [0.5, 1.0, 4.0],
        (2.0, None, None): [0.5, 1.0, 2.0],
        (None, None, 2.0): [0.5, 1.0, 0.0],  # AReaL's and RLinf's mask has no lower limit
        (None, 0.6, None): [0.0, 1.0, 4.0],
        (3.0, 0.6, 5.0): [0.0, 1.0, 3.0],
    }.items():
        assert_allclose(behaviour_weights(logs, *limits).numpy(), expected, rtol=1e-14)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck_of_the_surrogate(level: RatioLevel, weighted: bool) -> None:
    tokens = token_mask(NUM_STEPS, *SHAPE[1:])
    old, advantages = normal(*SHAPE, seed=2), normal(4, seed=3)
    mask = element_mask(tokens, level)
    weights = log_ratio(normal(*SHAPE, seed=4), old, tokens, level).exp() if weighted else None

    def loss(new: Tensor) -> Tensor:
        return clipped_surrogate(log_ratio(new, old, tokens, level), advantages, mask, 0.2, 0.3, weights)

    assert torch.autograd.gradcheck(loss, (normal(*SHAPE, seed=1, grad=True),))


def categorical(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1)


def test_behaviour_weights_make_stale_data_give_the_on_policy_gradient() -> None:
    """With every token enumerated, weighted as often as the *behaviour* policy draws it."""
    behaviour, proximal = categorical(normal(5, seed=1)), categorical(normal(5, seed=2))
    advantages, mask = normal(5, seed=3), torch.ones(5, dtype=torch.bool)
    logits = normal(5, seed=2, grad=True)
    weights = behaviour_weights(proximal - behaviour, None, None, None) * behaviour.exp()
    loss = clipped_surrogate(categorical(logits) - proximal, advantages, mask, 0.2, 0.2, weights)
    (stale,) = torch.autograd.grad(loss, logits)
    expected_advantage = (categorical(logits).exp() * advantages).sum()
    (on_policy,) = torch.autograd.grad(-expected_advantage, logits)
    assert_allclose(stale.numpy(), on_policy.numpy(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_step_makes_good_actions_likelier_and_bad_ones_less_likely(sign: float) -> None:
    logits = normal(2, 3, 2, 8, seed=1, grad=True)
    chosen = torch.full((2, 3, 2, 1), 5)
    tokens = token_mask(torch.tensor([3, 2]), 3, 2)

    def logprobs() -> Tensor:
        return categorical(logits).gather(-1, chosen).squeeze(-1)

    before = logprobs().detach()
    loss = clipped_surrogate(
        log_ratio(logprobs(), before, tokens, "action"), tensor(sign, sign), element_mask(tokens, "action"), 0.2, 0.2
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    logits.data -= 0.1 * gradient
    change = logprobs().detach() - before
    assert torch.all(sign * change[tokens] > 0)
    assert torch.all(change[~tokens] == 0)


# --- value loss -------------------------------------------------------------------------------------------------------

# value, return, old value -> loss and gradient; clip 0.2, delta 1
VALUE_CASES = [
    (0.5, 1.0, 0.5, 0.125, -0.5),  # not yet moved: 0.5 * 0.5^2
    (0.8, 1.0, 0.5, 0.045, 0.0),  # moved 0.3 towards the return, counted as 0.2: 0.5 * 0.3^2, and no further pull
    (0.2, 1.0, 0.5, 0.32, -0.8),  # moved away: full loss, full pull
    (4.0, 1.0, 4.0, 2.5, 1.0),  # beyond delta: 1 * (3 - 0.5)
    (-2.0, 1.0, -2.0, 2.5, -1.0),
]


@pytest.mark.parametrize(("value", "target", "old", "loss", "gradient"), VALUE_CASES)
def test_value_loss_and_its_gradient_by_hand(
    value: float, target: float, old: float, loss: float, gradient: float
) -> None:
    values = tensor(value, grad=True)
    result = clipped_value_loss(values, tensor(target), tensor(old), torch.tensor([True]), 0.2, huber_delta=1.0)
    assert result.item() == pytest.approx(loss, abs=1e-12)
    (found,) = torch.autograd.grad(result, values)
    assert found.item() == pytest.approx(gradient, abs=1e-12)
    assert (found.item() == 0.0) == (gradient == 0.0)


def test_unclipped_value_loss_ignores_old_values() -> None:
    values, target, mask = tensor(0.8, grad=True), tensor(1.0), torch.tensor([True])
    losses = [clipped_value_loss(values, target, tensor(old), mask, None, 1.0) for old in (0.5, math.nan)]
    assert [x.item() for x in losses] == [pytest.approx(0.02)] * 2


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("delta", [0.5, 10.0])
def test_value_loss_equals_the_reference_and_its_finite_differences(clip: float | None, delta: float) -> None:
    values, returns, old = normal(40, seed=1, grad=True), normal(40, seed=2), normal(40, seed=3)
    mask = torch.arange(40) % 3 > 0
    expected = sum(
        value_loss_reference(float(v), float(g), float(o), clip, delta)
        for v, g, o, counted in zip(values.detach(), returns, old, mask, strict=True)
        if counted
    )
    assert clipped_value_loss(values, returns, old, mask, clip, delta).item() == pytest.approx(expected, abs=1e-10)
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, returns, old, mask, clip, delta), (values,))


def test_padding_rows_change_no_value_loss_and_no_gradient() -> None:
    mask = torch.tensor([True, False])
    values = tensor(0.5, math.nan, grad=True)
    loss = clipped_value_loss(values, tensor(1.0, math.inf), tensor(0.5, math.nan), mask, 0.2, 10.0)
    assert loss.item() == huber_reference(-0.5, 10.0)
    assert torch.autograd.grad(loss, values)[0].tolist() == [-0.5, 0.0]


# --- total ------------------------------------------------------------------------------------------------------------


def test_total_loss_by_hand() -> None:
    policy, value, entropy, kl = (tensor(x).sum() for x in (6.0, 8.0, 3.0, 2.4))
    # 6/12 + 0.5 * 8/4 - 0.1 * 3/12 + 0.2 * 2.4/12
    coefficients = {"policy_coef": 1.0, "value_coef": 0.5, "entropy_coef": 0.1, "kl_coef": 0.2}
    total = total_loss(LossTerms(policy, value, entropy, kl), elements=12, value_chunks=4, **coefficients)
    assert total.item() == pytest.approx(0.5 + 1.0 - 0.025 + 0.04)


def test_k3_divergence_by_hand() -> None:
    """0 where the policies agree, never negative, and its gradient draws pi towards the reference."""
    logprobs = torch.log(tensor(0.5, 0.25, 0.1)).reshape(3, 1, 1).requires_grad_()
    reference = torch.log(tensor(0.5, 0.5, 0.9)).reshape(3, 1, 1)
    tokens = torch.tensor([True, True, False]).reshape(3, 1, 1)
    found = k3_divergence(logprobs, reference, tokens)
    assert found.tolist() == pytest.approx([0.0, 2 - 1 - math.log(2), 0.0])
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert gradient.flatten().tolist() == pytest.approx([0.0, -1.0, 0.0])


def test_the_weighted_divergence_and_its_gradient_are_exact_for_any_behaviour_policy() -> None:
    """With every token enumerated, as often as the *behaviour* policy draws it."""
    behaviour, reference = categorical(normal(5, seed=1)), categorical(normal(5, seed=2))
    logits = normal(5, seed=3, grad=True)
    tokens = torch.ones(5, 1, 1, dtype=torch.bool)

    def estimate(weighted: bool) -> Tensor:
        at = [x.reshape(5, 1, 1) for x in (categorical(logits), reference, behaviour)]
        return (behaviour.exp() * k3_divergence(*at[:2], tokens, at[2] if weighted else None)).sum()

    exact = (categorical(logits).exp() * (categorical(logits) - reference)).sum()
    (expected,) = torch.autograd.grad(exact, logits)
    found = estimate(weighted=True)
    assert found.item() == pytest.approx(exact.item(), abs=1e-12)
    assert_allclose(torch.autograd.grad(found, logits)[0].numpy(), expected.numpy(), atol=1e-12)
    plain = torch.autograd.grad(estimate(weighted=False), logits)[0]
    assert (plain - expected).abs().max() > 0.01


def test_cispo_keeps_the_gradient_of_every_element_and_limits_its_weight() -> None:
    log_ratios = tensor(math.log(2.0), math.log(0.5), 0.1, grad=True)
    mask = torch.ones(3, dtype=torch.bool)
    weighted_surrogate(log_ratios, tensor(1.0, 3.0, -1.0), mask, 0.2, 0.3).backward()
    assert log_ratios.grad is not None
    assert log_ratios.grad.tolist() == pytest.approx([-1.3, -0.8 * 3.0, math.exp(0.1)])


def test_a_geometric_mean_divides_by_the_executed_tokens() -> None:
    tokens = token_mask(torch.tensor([3, 1]), 3, 2)
    ratio = log_ratio(torch.full((2, 3, 2), 0.6), torch.zeros(2, 3, 2), tokens, "chunk", mean=True)
    assert ratio.tolist() == pytest.approx([0.6, 0.6])


def test_gipo_weighs_most_where_the_log_ratio_is_sigma_squared() -> None:
    """Its trust weight is 61 % at a log-ratio of sigma; the gradient is that times the ratio."""
    sigma = 0.5
    log_ratios = torch.linspace(-1.0, 1.0, 401, dtype=F64).requires_grad_()
    gaussian_surrogate(log_ratios, -torch.ones(401, dtype=F64), torch.ones(401, dtype=torch.bool), sigma).backward()
    assert log_ratios.grad is not None
    assert log_ratios[log_ratios.grad.argmax()].item() == pytest.approx(sigma**2)
    at_sigma = log_ratios.grad[300] / log_ratios.detach()[300].exp()
    assert at_sigma.item() == pytest.approx(math.exp(-0.5))
