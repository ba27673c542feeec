"""The surrogate of policy gradients: ratios, clipping and importance weights.

r = pi / pi_prox        ratios, held near 1 by the objective
w = pi_prox / pi_behaviour   importance weights; 1 unless the objective is decoupled
"""

from torch import Tensor

from algos import losses
from algos.config import PolicyGradientConfig
from algos.losses import LOG_RATIO_LIMIT, element_mask, log_ratio
from algos.metrics import ratio_metrics, weight_metrics
from algos.targets import RowTargets


def policy_loss(
    config: PolicyGradientConfig, logprobs: Tensor, rows: RowTargets, tokens: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negated surrogate, summed over elements, and sums of its ratios for the metrics.

    The plain objective holds the ratio to the policy that acted near 1. The decoupled objective (arXiv:2505.24298)
    holds the ratio to a proximal policy near 1, and weighs each element by pi_prox / pi_behaviour. Stale data are then
    neither clipped away at once, nor do they pull the policy back to the one that acted.

    Args:
        config: the objective.
        logprobs: [n, K, A], log pi, under the weights in training.
        rows: targets of these n chunks.
        tokens: bool [n, K, A], the executed tokens.

    Returns scalars.
    """
    c, mask = config, element_mask(tokens, config.ratio_level)
    limits = c.weight_cap, c.importance_low, c.importance_high
    proximal = proximal_logprobs(c, logprobs, rows)
    log_ratios = log_ratio(logprobs, proximal, tokens, c.ratio_level, mean=c.ratio_mean)
    log_weights = weights = None
    if c.proximal != "behaviour":
        log_weights = behaviour_log_weights(c, proximal, rows, tokens).expand_as(log_ratios)
        weights = losses.behaviour_weights(log_weights, *limits)
    weights = rows.weights.reshape(-1, *(1,) * (mask.dim() - 1)) * (1.0 if weights is None else weights)
    given = log_ratios, rows.advantages, mask
    match c.objective:
        case "clip":
            negated = losses.clipped_surrogate(*given, c.clip_low, c.clip_high, weights, c.dual_clip)
        case "cispo":
            negated = losses.weighted_surrogate(*given, c.clip_low, c.clip_high, weights)
        case "sapo":
            negated = losses.soft_surrogate(*given, c.tau_positive, c.tau_negative, weights)
        case "gipo":
            negated = losses.gaussian_surrogate(*given, c.gipo_sigma, weights)
    metrics = ratio_metrics(log_ratios, mask, (c.clip_low, c.clip_high), log_weights)
    if log_weights is not None:
        metrics |= weight_metrics(log_weights, mask, *limits)
    return negated, metrics


def proximal_logprobs(config: PolicyGradientConfig, logprobs: Tensor, rows: RowTargets) -> Tensor:
    """Log-probabilities under the policy that ratios are relative to.

    They are those of ``rows``, except with ``proximal=interpolated`` (as in RLinf's asynchronous PPO):

        log pi_prox = log pi_behaviour + s / (s + 1) (log pi - log pi_behaviour)

    With staleness s, this policy is one update older than the one in training; for fresh data it is the one that acted.
    No forward pass is needed. Arguments as ``policy_loss``; returns [n, K, A], without gradient.
    """
    if config.proximal != "interpolated":
        return rows.proximal_logprobs
    fraction = (rows.staleness / (rows.staleness + 1.0))[:, None, None]
    return rows.behaviour_logprobs + fraction * (logprobs.detach() - rows.behaviour_logprobs)


def behaviour_log_weights(config: PolicyGradientConfig, proximal: Tensor, rows: RowTargets, tokens: Tensor) -> Tensor:
    """Logarithms of importance weights: ``log(pi_prox / pi_behaviour)``, within +-``LOG_RATIO_LIMIT``.

    ``proximal`` [n, K, A] is log pi_prox; other arguments as ``policy_loss``. One weight covers an
    ``importance_level``; the result broadcasts to ``ratio_level``.
    """
    level = config.weight_level
    if level == "episode":
        assert rows.episode_log_weights is not None  # given by ``Algorithm.targets`` at this level
        weights = rows.episode_log_weights.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    else:
        weights = log_ratio(proximal, rows.behaviour_logprobs, tokens, level)
    dims = {"token": 3, "action": 2, "chunk": 1}[config.ratio_level]
    return weights.reshape(*weights.shape, *(1,) * (dims - weights.dim()))
