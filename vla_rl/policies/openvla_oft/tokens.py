"""Distributions over the 256 bins of an action number: log-probability, entropy, sampling, and the loss of cloning."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vla_rl.policies.openvla_oft.architecture import NUM_BINS


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """float32 [...]: log-probability of each token under logits [..., 256]. Sampler and learner both use this."""
    logits = logits.float()
    chosen = logits.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(-1)


def token_entropy(logits: Tensor) -> Tensor:
    """float32 [...]: entropy of each token's distribution, in nats."""
    logprobs = logits.float().log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def sample_tokens(logits: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [...]: the bin at which the cumulative distribution passes the uniform number (inverse transform).

    Sums in float64, so that rounding cannot choose a bin of probability zero.
    """
    cumulative = logits.float().softmax(-1).double().cumsum(-1)
    threshold = uniforms.double().unsqueeze(-1) * cumulative[..., -1:]
    return (cumulative <= threshold).sum(-1).clamp(max=NUM_BINS - 1)


def smoothed_cross_entropy(logits: Tensor, tokens: Tensor, mask: Tensor, smoothing: float) -> Tensor:
    """Mean cross-entropy with the demonstrated bins.

    Args:
        logits: [N, K, A, 256].
        tokens: uint8 [N, K, A].
        mask: bool [N, K], false after the end of the demonstration.
        smoothing: standard deviation, in bins, of the target, a normal distribution around the demonstrated bin
            (a neighbouring bin is nearly the same action); 0: that bin only.
    """
    if smoothing == 0:
        losses = F.cross_entropy(logits.flatten(0, 2), tokens.long().flatten(), reduction="none").view(tokens.shape)
    else:
        distance = torch.arange(logits.shape[-1], device=logits.device) - tokens.long().unsqueeze(-1)
        target = torch.softmax(-0.5 * (distance / smoothing) ** 2, dim=-1)
        losses = -(target * F.log_softmax(logits, dim=-1)).sum(-1)
    weights = mask.unsqueeze(-1).expand_as(losses).to(losses.dtype)
    return (losses * weights).sum() / weights.sum()
