"""Policy-gradient losses as pure functions of flat tensors, in float32 or better.

Shapes: n chunks of K steps of A tokens. The first ``num_steps[i]`` steps of chunk i were executed; the others never
count, whatever they hold. A row with ``num_steps`` 0 is padding.

Every loss is returned as a *sum*. The learner divides by counts of the whole optimizer step, which it knows before the
first backward pass (``algos.denominators``), so that neither the micro-batch size nor the number of ranks changes a
gradient.

An *element* is what one probability ratio covers: a token, an action (the A tokens of one step) or a chunk (the tokens
of all executed steps). Tensors at a level have the shape [n, K, A], [n, K] or [n].

The argument ``tokens`` is everywhere bool [n, K, A], the executed tokens; a loss is a scalar.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from algos.config import RatioLevel
from algos.targets import RowTargets

# exp(20) is 5e8: far beyond any useful ratio, and finite in float32 even when squared.
LOG_RATIO_LIMIT = 20.0
_COVERED = {"action": (2,), "chunk": (1, 2)}  # dimensions of [n, K, A] that one element covers


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Sums over some rows, as scalars with gradients. Terms of several micro-batches add up.

    All but the value loss are weighted by ``Targets.weights``.
    """

    policy: Tensor  # negated surrogate, over elements
    value: Tensor  # value loss, over chunks that the value function learns from
    entropy: Tensor  # nats, over tokens
    kl: Tensor  # estimated divergence from a reference policy, nats, over tokens


def total_loss(
    terms: LossTerms,
    elements: int,
    value_chunks: int,
    *,
    policy_coef: float,
    value_coef: float,
    entropy_coef: float,
    kl_coef: float,
) -> Tensor:
    """The share of some rows in an optimizer step's loss, given the counts of that *whole* step.

        policy_coef mean(policy) + value_coef mean(value) - entropy_coef mean(entropy) + kl_coef mean(kl)

    Policy, entropy and divergence are averaged over elements (of whose tokens entropy and divergence are the sums), the
    value loss over the chunks that it is about. Linear in ``terms``: the shares of all micro-batches and ranks sum to
    the loss of the step.

    Args:
        terms: of these rows.
        elements, value_chunks: numbers in the whole step.
        policy_coef, value_coef, entropy_coef, kl_coef: coefficients of the terms.
    """
    policy = policy_coef * terms.policy - entropy_coef * terms.entropy + kl_coef * terms.kl
    return policy / max(elements, 1) + value_coef * terms.value / max(value_chunks, 1)


def token_mask(num_steps: Tensor, chunk_size: int, action_dim: int) -> Tensor:
    """Which tokens were executed: bool [n, K, A], from ``num_steps`` [n]."""
    steps = torch.arange(chunk_size, device=num_steps.device) < num_steps[:, None]
    return steps[:, :, None].expand(-1, -1, action_dim)


def element_mask(tokens: Tensor, level: RatioLevel) -> Tensor:
    """Which elements hold an executed token: bool at ``level``."""
    return tokens if level == "token" else tokens.any(dim=_COVERED[level])


def pool(per_token: Tensor, tokens: Tensor, level: RatioLevel) -> Tensor:
    """Sums of [n, K, A] numbers over the executed tokens of each element, at ``level``; 0 for elements without any."""
    executed = _masked(_at_least_float32(per_token), tokens)
    return executed if level == "token" else executed.sum(dim=_COVERED[level])


def log_ratio(numerator: Tensor, denominator: Tensor, tokens: Tensor, level: RatioLevel, mean: bool = False) -> Tensor:
    """Log-ratios at ``level`` of two policies with log-probabilities ``numerator`` and ``denominator`` [n, K, A].

    Tokens of a chunk are decoded in parallel and independent given the observation, so their log-ratios add; ``mean``
    averages them over the tokens of an element instead (GSPO, arXiv:2507.18071, equation 7). The result is limited to
    +-``LOG_RATIO_LIMIT``, without gradient beyond, so that its exponential squared stays finite.
    """
    result = pool(_at_least_float32(numerator) - _at_least_float32(denominator), tokens, level)
    if mean:
        result = result / pool(torch.ones_like(numerator), tokens, level).clamp(min=1.0)
    return result.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped_surrogate(
    log_ratios: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    weights: Tensor | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate: sum over elements of ``-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``.

    Without weights this is PPO's objective (arXiv:1707.06347, equation 7), with unequal limits as in arXiv:2503.14476.
    With weights it is the decoupled objective (arXiv:2505.24298, after arXiv:2110.00641): the clip holds pi near
    pi_prox, while the data may come from an older pi_behaviour.

    Args:
        log_ratios: log r = log(pi / pi_prox), at a level.
        advantages: [n], A.
        mask: bool, at the same level.
        clip_low, clip_high: distances of the limits from 1.
        weights: w = pi_prox / pi_behaviour at the same level, used without gradient; None: 1.
        dual_clip: c; elements of negative A contribute at least ``c A`` (arXiv:1912.09729), so that stale actions that
            have become likely do not push without limit.
    """
    ratios = log_ratios.exp()
    advantages = _per_chunk(advantages, log_ratios)
    surrogate = torch.minimum(ratios * advantages, ratios.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    if dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)
    return _weighted_loss(surrogate, mask, weights)


def weighted_surrogate(
    log_ratios: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    weights: Tensor | None = None,
) -> Tensor:
    """CISPO (arXiv:2506.13585, equation 4): sum over elements of ``-w sg(clip(r)) A log r``, clipped as by PPO.

    sg stops the gradient, so that no element loses its own: a clipped ratio only limits its weight. log r has the
    gradient of log pi. Arguments as ``clipped_surrogate``.
    """
    limited = log_ratios.detach().exp().clamp(1.0 - clip_low, 1.0 + clip_high)
    return _weighted_loss(limited * log_ratios * _per_chunk(advantages, log_ratios), mask, weights)


def soft_surrogate(
    log_ratios: Tensor,
    advantages: Tensor,
    mask: Tensor,
    tau_positive: float,
    tau_negative: float,
    weights: Tensor | None = None,
) -> Tensor:
    """SAPO (arXiv:2511.20347): sum over elements of ``-w (4 / tau) sigmoid(tau (r - 1)) A``, tau by the sign of A.

    Gradients fade with the distance of r from 1, where the slope is 1 for any tau. Arguments as ``clipped_surrogate``.
    """
    advantages = _per_chunk(advantages, log_ratios)
    positive = (advantages > 0).to(advantages.dtype)
    tau = tau_negative + (tau_positive - tau_negative) * positive
    surrogate = 4.0 / tau * torch.sigmoid(tau * (log_ratios.exp() - 1.0)) * advantages
    return _weighted_loss(surrogate, mask, weights)


def gaussian_surrogate(
    log_ratios: Tensor, advantages: Tensor, mask: Tensor, sigma: float, weights: Tensor | None = None
) -> Tensor:
    """GIPO (arXiv:2603.03955): sum over elements of ``-w g r A`` with ``g = exp(-(log r / sigma)^2 / 2)``.

    The trust weight g has no gradient and is the same for r and 1 / r. An element's gradient is g r times that of the
    policy gradient: largest at log r = sigma^2, and fading on both sides without ever being 0. Arguments as
    ``clipped_surrogate``.
    """
    trust = torch.exp(-0.5 * (log_ratios.detach() / sigma) ** 2)
    return _weighted_loss(trust * log_ratios.exp() * _per_chunk(advantages, log_ratios), mask, weights)


def k3_divergence(logprobs: Tensor, reference: Tensor, tokens: Tensor, behaviour: Tensor | None = None) -> Tensor:
    """KL divergence KL(pi, pi_ref) by the k3 estimate, ``exp(d) - d - 1``, summed over each chunk's executed tokens.

    ``d = log pi_ref - log pi``, in nats (joschu.net/blog/kl-approx.html; GRPO, arXiv:2402.03300, equation 4). The value
    is right for tokens drawn from pi, and its gradient is not that of the divergence. Times ``pi / pi_behaviour``, both
    are right for tokens drawn from pi_behaviour (DeepSeek-V3.2, arXiv:2512.02556).

    Args:
        logprobs: [n, K, A], log pi.
        reference: [n, K, A], log pi_ref.
        behaviour: [n, K, A], log pi_behaviour; None: without the factor.

    Returns [n]; never negative.
    """
    d = log_ratio(reference, logprobs, tokens, "token")
    k3 = torch.expm1(d) - d
    if behaviour is not None:
        k3 = k3 * log_ratio(logprobs, behaviour, tokens, "token").exp()
    return pool(k3, tokens, "chunk")


def reference_divergence(logprobs: Tensor, rows: RowTargets, tokens: Tensor, *, weighted: bool) -> Tensor:
    """``k3_divergence`` of some rows from the reference policy: [n]; 0 without one.

    ``weighted``: with the factor ``pi / pi_behaviour``.
    """
    if rows.reference_logprobs is None:
        return logprobs.new_zeros(len(logprobs))
    return k3_divergence(logprobs, rows.reference_logprobs, tokens, rows.behaviour_logprobs if weighted else None)


def behaviour_weights(log_weights: Tensor, cap: float | None, low: float | None, high: float | None) -> Tensor:
    """Importance weights: ``min(w, cap)``, and 0 where w lies outside ``[low, high]``. None: no such limit.

    Truncated as in V-trace (arXiv:1802.01561); masked on both sides as in arXiv:2510.18855, or above only as in AReaL
    (arXiv:2505.24298) and RLinf. Unlimited weights are unbiased, with a higher variance. ``log_weights`` is log w, of
    any shape; the result has the same.
    """
    weights = log_weights.exp().clamp(max=cap) if cap is not None else log_weights.exp()
    return _masked(weights, (log_weights >= _log(low, -math.inf)) & (log_weights <= _log(high, math.inf)))


def clipped_value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor, clip: float | None, huber_delta: float
) -> Tensor:
    """Clipped value loss: sum over chunks of ``max(h(V - R), h(V_old + clamp(V - V_old, -clip, clip) - R))``.

    h is the Huber loss. A prediction gains nothing from moving further than ``clip`` in one update (OpenAI baselines'
    PPO2; compared with others in arXiv:2006.05990).

    Args:
        values, returns: [n], V and R.
        old_values: [n], V_old, predictions at the start of the update.
        mask: bool [n].
        clip: None: only ``h(V - R)``.
        huber_delta: h(x) is ``x^2 / 2`` up to here, then linear.
    """
    values, returns, old = (_masked(_at_least_float32(x), mask) for x in (values, returns, old_values))
    loss = functional.huber_loss(values, returns, reduction="none", delta=huber_delta)
    if clip is not None:
        near = old + (values - old).clamp(-clip, clip)
        loss = torch.maximum(loss, functional.huber_loss(near, returns, reduction="none", delta=huber_delta))
    return loss.sum()


def _log(limit: float | None, default: float) -> float:
    return default if limit is None else math.log(limit)


def _weighted_loss(surrogate: Tensor, mask: Tensor, weights: Tensor | None) -> Tensor:
    if weights is not None:
        surrogate = surrogate * weights.detach()
    return -_masked(surrogate, mask).sum()


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    """Zero outside the mask. A product with the mask would keep infinities and NaN, in values and gradients."""
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _per_chunk(x: Tensor, like: Tensor) -> Tensor:
    """[n] as [n, 1, ...], to be combined with a tensor at any level."""
    return _at_least_float32(x).reshape(-1, *(1,) * (like.dim() - 1))
