"""Metrics of an update, as sums that add up over micro-batches, optimizer steps and ranks.

Each loss call returns a dict of scalar float64 tensors without gradient; two such dicts are merged by adding them key
by key. ``finish_metrics`` turns the total of an update into means.
"""

import bisect
import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from algos.losses import LOG_RATIO_LIMIT, LossTerms

QUANTILES = (0.01, 0.5, 0.99)

# Quantiles and maxima of ratios do not add up, histograms do. Bins are even in asinh(log_ratio / FINE): linear below
# FINE, logarithmic above. Their number is odd, so that a ratio of exactly 1 is the centre of a bin.
BINS = 129
FINE = 0.01
_REACH = math.asinh(LOG_RATIO_LIMIT / FINE)
_BIN_NAMES = tuple(f"ratio_bin_{i}" for i in range(BINS))


def loss_metrics(
    terms: LossTerms, entropy: Tensor, kl: Tensor, mask: Tensor, tokens: Tensor, valued: Tensor
) -> dict[str, Tensor]:
    """Sums of the loss terms and their divisors: elements (``mask``, bool at the ratio level), tokens, valued chunks.

    ``entropy`` and ``kl`` are [n] nats per chunk, before the weights of the average; ``valued`` is bool [n], the chunks
    of the value loss.
    """
    sums = {
        "policy_loss": terms.policy,
        "value_loss": terms.value,
        "entropy": entropy.sum(),
        "reference_kl": kl.sum(),
        "elements": mask.sum(),
        "tokens": tokens.sum(),
        "value_chunks": valued.sum(),
    }
    return {name: x.detach().double() for name, x in sums.items()}


def ratio_metrics(
    log_ratios: Tensor,
    mask: Tensor,
    clip: tuple[float, float] | None = None,
    log_weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """Sums of the ratios r = pi / pi_prox and of pi / pi_behaviour, and a histogram of log r.

    KL(pi_prox, pi) is estimated by k1 = -log r, unbiased if the data come from pi_prox, and by k3 = r - 1 - log r,
    never negative (joschu.net/blog/kl-approx.html).

    Args:
        log_ratios: log r, at the ratio level.
        mask: bool, at the same level.
        clip: (low, high); r is counted as clipped outside [1 - low, 1 + high]. None: there is no clipping.
        log_weights: log(pi_prox / pi_behaviour), at the same level; None: 0.
    """
    log_r = log_ratios.detach().double()
    ratio = log_r.exp()
    total = ratio if log_weights is None else (log_r + log_weights.detach().double()).exp()
    sums = {
        "k1": -log_r,
        "k3": torch.expm1(log_r) - log_r,
        "ratio": ratio,
        "importance": total,
        "importance_sq": total**2,
    }
    if clip is not None:
        sums["clipped"] = ((ratio < 1.0 - clip[0]) | (ratio > 1.0 + clip[1])).double()
    counted = mask.double()
    totals = {name: (x * counted).sum() for name, x in sums.items()}
    return totals | {"ratios": counted.sum()} | _histogram(log_r, counted)


def weight_metrics(
    log_weights: Tensor, mask: Tensor, cap: float | None, low: float | None, high: float | None
) -> dict[str, Tensor]:
    """Sum of the weights pi_prox / pi_behaviour before the limits, and number of those beyond any of them."""
    log_weights, counted = log_weights.detach().double(), mask.double()
    weights = log_weights.exp()
    cut = (weights > min(cap or math.inf, high or math.inf)) | (weights < (low or 0.0))
    return {"behaviour_weight": (weights * counted).sum(), "behaviour_weight_cut": (cut.double() * counted).sum()}


def finish_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means from the summed metrics of a whole update; empty if nothing was summed.

    policy_loss           mean over elements (see ``algos.losses``)
    value_loss            mean over the chunks that the value function learns from
    entropy               nats a token
    reference_kl          k3 estimate of KL(pi, reference), nats a token; 0 without a reference policy
    approx_kl             k3 estimate of KL(pi_prox, pi), nats an element; approx_kl_k1: the k1 estimate. pi_prox is the
                          policy that acted, or the one at the start of the update where that is recomputed. This and
                          the other figures of ratios: of the elements with a ratio (in RECAP those of good chunks)
    clip_fraction         elements whose ratio lies outside the clip range, 0..1; only with a clip range
    ratio_mean            of pi / pi_prox
    ratio_max, ratio_pNN  from a histogram: their logarithms are right to 7 %, or 0.0007 where that is more
    ess                   effective sample size of the weights pi / pi_behaviour, as a fraction of the elements:
                          (sum w)^2 / (elements * sum w^2)
    behaviour_weight_mean, behaviour_weight_cut   mean of pi_prox / pi_behaviour, and the fraction beyond a
                          limit (importance_cap, _low, _high); only in the decoupled objective
    cloning_loss          nats a token of the chunks cloned by bc_coef; only with these
    """
    elements = sums.get("elements", 0.0)
    if elements == 0:
        return {}
    metrics = {
        "policy_loss": sums["policy_loss"] / elements,
        "value_loss": sums["value_loss"] / max(sums["value_chunks"], 1.0),
        "entropy": sums["entropy"] / sums["tokens"],
        "reference_kl": sums["reference_kl"] / sums["tokens"],
    }
    if sums["ratios"] > 0:
        metrics |= _finish_ratios(sums)
    weights = {"behaviour_weight_mean": "behaviour_weight", "behaviour_weight_cut": "behaviour_weight_cut"}
    metrics |= {name: sums[key] / elements for name, key in weights.items() if key in sums}
    if "cloning_loss" in sums:
        metrics["cloning_loss"] = sums["cloning_loss"] / sums["cloned_tokens"]
    return metrics


def _finish_ratios(sums: Mapping[str, float]) -> dict[str, float]:
    ratios, histogram = sums["ratios"], [sums[name] for name in _BIN_NAMES]
    metrics = {
        "approx_kl": sums["k3"] / ratios,
        "approx_kl_k1": sums["k1"] / ratios,
        "ratio_mean": sums["ratio"] / ratios,
        "ratio_max": _ratio_quantile(histogram, 1.0),
        "ess": sums["importance"] ** 2 / (ratios * sums["importance_sq"]),
    }
    metrics |= {f"ratio_p{round(100 * q):02d}": _ratio_quantile(histogram, q) for q in QUANTILES}
    if "clipped" in sums:
        metrics["clip_fraction"] = sums["clipped"] / ratios
    return metrics


def _histogram(log_r: Tensor, counted: Tensor) -> dict[str, Tensor]:
    bins = ((torch.asinh(log_r / FINE) / _REACH + 1.0) * (BINS / 2)).long().clamp(0, BINS - 1)
    histogram = torch.zeros(BINS, dtype=torch.float64, device=log_r.device)
    histogram.scatter_add_(0, bins.flatten(), counted.flatten())
    return dict(zip(_BIN_NAMES, histogram.unbind(), strict=True))


def _ratio_quantile(histogram: list[float], q: float) -> float:
    """The ratio at the centre of the bin that contains the quantile ``q``."""
    reached = list(itertools.accumulate(histogram))
    index = bisect.bisect_left(reached, q * reached[-1])
    return math.exp(FINE * math.sinh(((2 * index + 1) / BINS - 1.0) * _REACH))
