"""algos.metrics against hand-computed cases and exact quantiles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from algos.losses import LossTerms
from algos.metrics import finish_metrics, loss_metrics, ratio_metrics, weight_metrics
from tests.algos.test_losses import F64, categorical, normal, tensor


def finished(log_ratios: Tensor, log_weights: Tensor | None = None, cap: float | None = None) -> dict[str, float]:
    mask = torch.ones_like(log_ratios, dtype=torch.bool)
    tokens = mask[:, None, None]
    policy, value, entropy, kl = (tensor(x).sum() for x in (3.0, 8.0, 2.0, 1.0))
    terms = LossTerms(policy, value, tensor(99.0).sum(), tensor(99.0).sum())
    sums = loss_metrics(terms, entropy, kl, mask, tokens, mask)
    sums |= ratio_metrics(log_ratios, mask, (0.2, 0.2), log_weights)
    if log_weights is not None:
        sums |= weight_metrics(log_weights, mask, cap, low=None, high=None)
    return finish_metrics({name: float(x) for name, x in sums.items()})


def test_metrics_by_hand() -> None:
    metrics = finished(tensor(math.log(2.0), 0.0, math.log(0.5), 0.0))
    assert metrics["policy_loss"] == 0.75
    assert metrics["value_loss"] == 2.0
    assert metrics["entropy"] == 0.5
    assert metrics["reference_kl"] == 0.25
    assert metrics["approx_kl_k1"] == pytest.approx(0.0, abs=1e-15)
    # (2 - 1 - ln 2 + 0.5 - 1 + ln 2) / 4
    assert metrics["approx_kl"] == pytest.approx(0.125)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["ratio_mean"] == 1.125
    # (2 + 1 + 0.5 + 1)^2 / (4 * (4 + 1 + 0.25 + 1))
    assert metrics["ess"] == pytest.approx(20.25 / 25.0)
    assert "behaviour_weight_mean" not in metrics


def test_behaviour_weight_metrics_by_hand() -> None:
    # weights 4 and 1, ratios 0.5 and 2: pi / pi_behaviour is 2 for both, so all samples count alike
    metrics = finished(tensor(math.log(0.5), math.log(2.0)), tensor(math.log(4.0), 0.0), cap=2.0)
    assert metrics["behaviour_weight_mean"] == pytest.approx(2.5)
    assert metrics["behaviour_weight_cut"] == 0.5
    assert metrics["ess"] == pytest.approx(1.0)


def test_k1_and_k3_estimate_the_divergence() -> None:
    old, new = categorical(normal(6, seed=1)), categorical(normal(6, seed=2))
    exact = float((old.exp() * (old - new)).sum())
    drawn = torch.multinomial(old.exp(), 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    metrics = finished((new - old)[drawn])
    assert metrics["approx_kl_k1"] == pytest.approx(exact, rel=0.03)
    assert metrics["approx_kl"] == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("spread", [1e-5, 0.01, 0.3, 3.0])
def test_ratio_quantiles_are_as_exact_as_documented(spread: float) -> None:
    log_ratios = spread * normal(5000, seed=1)
    metrics = finished(log_ratios)
    exact = {"ratio_max": 1.0, "ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}
    for name, q in exact.items():
        expected = float(np.quantile(log_ratios.numpy(), q, method="inverted_cdf"))
        assert abs(math.log(metrics[name]) - expected) <= max(0.07 * abs(expected), 0.0007)


def test_untouched_ratios_are_exactly_one() -> None:
    metrics = finished(torch.zeros(10, dtype=F64))
    assert [metrics[f"ratio_{x}"] for x in ("mean", "max", "p01", "p50", "p99")] == [1.0] * 5
    assert metrics["ess"] == 1.0
    assert metrics["clip_fraction"] == metrics["approx_kl"] == 0.0


def test_nothing_summed_gives_no_metrics() -> None:
    assert finish_metrics({}) == {}
