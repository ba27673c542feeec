"""The stochastic sampler against the distribution that it must keep."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vla_rl.policies.base import flow

MEAN, STD = 0.7, 0.3  # of the actions: one normal distribution, for which the velocity is known


def exact_velocity(x: Tensor, time: Tensor) -> Tensor:
    """E[noise - actions | x_t = x], for actions from N(MEAN, STD^2) and x_t = t noise + (1 - t) actions."""
    t = time[:, None, None]
    variance = t**2 + (1 - t) ** 2 * STD**2
    centered = x - (1 - t) * MEAN
    actions = MEAN + (1 - t) * STD**2 / variance * centered
    noise = t / variance * centered
    return noise - actions


@pytest.mark.parametrize("level", [0.0001, 0.5, 1.0])
def test_random_steps_keep_the_distribution_of_the_deterministic_ones(level: float) -> None:
    steps, generator = 200, torch.Generator().manual_seed(0)
    x = torch.randn(4000, 2, 3, generator=generator)
    for number in range(steps):
        time, length = flow.step_times(steps, torch.full((len(x),), number), 1)
        velocity = exact_velocity(x, time[:, 0])
        mean, deviation = flow.sde_step(x, velocity, time[:, 0], length, level)
        x = mean + deviation * torch.randn(x.shape, generator=generator)
    assert x.mean().item() == pytest.approx(MEAN, abs=0.02)
    assert x.std().item() == pytest.approx(STD, abs=0.02)


@pytest.mark.parametrize("steps", [4, 200])
def test_replacing_noise_adds_none_however_long_the_steps(steps: int) -> None:
    """All data are one action, so that predictions are exact: what differs from it at t' is noise of deviation t'."""
    assert noise_left(flow.cps_step, steps) == pytest.approx([1 - (n + 1) / steps for n in range(steps)], abs=0.02)
    assert noise_left(flow.sde_step, 4)[-1] > 0.15, (
        "with few steps, the stochastic equation leaves noise in the actions"
    )


def noise_left(step: Callable[..., tuple[Tensor, Tensor]], steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    x, left = torch.randn(4000, 2, 3, generator=generator), []
    for number in range(steps):
        time, length = flow.step_times(steps, torch.full((len(x),), number), 1)
        mean, deviation = step(x, (x - MEAN) / time[:, :1, None], time[:, 0], length, 0.7)
        x = mean + deviation * torch.randn(x.shape, generator=generator)
        left.append((x - (1 - float(time[0, 0]) + length) * MEAN).std().item())
    return left


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_last_step_replaces_nothing(share: float) -> None:
    time, length = flow.step_times(4, torch.full((2,), 3), 1)
    x, velocity = torch.randn(2, 1, 5), torch.randn(2, 1, 5)
    mean, deviation = flow.cps_step(x, velocity, time[:, 0], length, share)
    assert deviation.abs().max() == 0
    torch.testing.assert_close(mean, flow.ode_step(x, velocity, length))


def test_without_noise_a_random_step_is_the_deterministic_one() -> None:
    x, velocity = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    for number in range(4):
        time, length = flow.step_times(4, torch.full((3,), number), 1)
        for step in (flow.sde_step, flow.cps_step):
            mean, deviation = step(x, velocity, time[:, 0], length, 0.0)
            torch.testing.assert_close(mean, flow.ode_step(x, velocity, length))
            assert deviation.abs().max() == 0


def test_the_first_step_is_finite() -> None:
    time, length = flow.step_times(4, torch.zeros(2, dtype=torch.long), 1)
    assert time.tolist() == [[1.0], [1.0]]
    mean, deviation = flow.sde_step(torch.randn(2, 1, 1), torch.randn(2, 1, 1), time[:, 0], length, 0.5)
    assert mean.isfinite().all()
    assert deviation.flatten().tolist() == pytest.approx([0.5 * math.sqrt(1 / 0.25) * 0.5] * 2)


def test_density_and_entropy_are_those_of_the_normal_distribution() -> None:
    mean, deviation = torch.randn(5, 2, 3), torch.rand(5, 2, 3) + 0.1
    x = torch.randn(5, 2, 3)
    expected = torch.distributions.Normal(mean, deviation)
    torch.testing.assert_close(flow.gaussian_logprob(x, mean, deviation), expected.log_prob(x))
    torch.testing.assert_close(flow.gaussian_entropy(deviation), expected.entropy())
