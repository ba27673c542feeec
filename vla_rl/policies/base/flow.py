"""Flow matching as a stochastic sampler: pure functions of tensors.

Time t runs from 1 (noise) to 0 (actions), and ``x_t = t noise + (1 - t) actions``. The network predicts the velocity
``v = noise - actions``, hence ``actions = x_t - t v`` and ``noise = x_t + (1 - t) v``.
"""

import math

import torch
from torch import Tensor


def step_times(steps: int, first: Tensor, count: int) -> tuple[Tensor, float]:
    """Times [N, count] at which the denoising steps ``first``, ``first + 1``, ... [N] of ``steps`` start, and their
    length."""
    number = first.unsqueeze(1) + torch.arange(count, device=first.device)
    return 1.0 - number.float() / steps, 1.0 / steps


def ode_step(x: Tensor, velocity: Tensor, length: float) -> Tensor:
    """One deterministic (Euler) step towards the actions; shapes [N, K, A]."""
    return x - length * velocity


def sde_step(x: Tensor, velocity: Tensor, time: Tensor, length: float, level: float) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of one step of the stochastic equation with the same marginals (Flow-SDE).

        mean = (1 - t') actions + (t' - sigma^2 d / (2 t)) noise,  t' = t - d
        deviation = sigma sqrt(d),  sigma = level sqrt(t / (1 - t))

    This is the Euler-Maruyama step of Flow-GRPO (arXiv:2505.05470, equation 9), which πRL (arXiv:2510.25889) uses for
    actions. ``1 - t`` is at least d: at t = 1, sigma would be infinite.

    Args:
        x, velocity: [N, K, A].
        time: [N], t at the step's start.
        length: d.
        level: scale of the noise.

    Returns the mean [N, K, A] and the deviation [N, 1, 1].
    """
    t = time[:, None, None]
    sigma = level * (t / (1.0 - t).clamp(min=length)).sqrt()
    actions, noise = x - t * velocity, x + (1.0 - t) * velocity
    later = t - length
    mean = (1.0 - later) * actions + (later - sigma**2 * length / (2.0 * t)) * noise
    return mean, sigma * math.sqrt(length)


def cps_step(x: Tensor, velocity: Tensor, time: Tensor, length: float, share: float) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of one step that replaces a part of the noise, but adds none (Flow-CPS).

        mean = (1 - t') actions + t' cos(share pi / 2) noise,  t' = t - d
        deviation = t' sin(share pi / 2)

    Coefficients-preserving sampling (arXiv:2509.05952): whatever the share and however long the steps, the noise that
    is left has the size that the network expects at t'. ``sde_step`` leaves more with few steps. The last step,
    to t' = 0, is deterministic.

    Args:
        share: of the noise that is replaced, from 0 (none, an Euler step) to 1 (all: only the predicted actions stay).

    The rest is as for ``sde_step``.
    """
    t = time[:, None, None]
    later, angle = t - length, 0.5 * math.pi * share
    actions, noise = x - t * velocity, x + (1.0 - t) * velocity
    return (1.0 - later) * actions + later * math.cos(angle) * noise, later * math.sin(angle)


def gaussian_logprob(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Log-density of each number of ``x`` under independent normal distributions."""
    z = (x - mean) / deviation
    return -0.5 * z**2 - deviation.log() - 0.5 * math.log(2.0 * math.pi)


def gaussian_entropy(deviation: Tensor) -> Tensor:
    """Entropy of normal distributions, nats."""
    return deviation.log() + 0.5 * math.log(2.0 * math.pi * math.e)
