"""Weighted cloning of recorded chunks, the policy's loss of algorithms without probability ratios."""

import torch
from torch import Tensor

from algos.losses import log_ratio, pool
from algos.metrics import ratio_metrics
from algos.targets import RowTargets


def weighted_cloning(
    logprobs: Tensor, rows: RowTargets, tokens: Tensor, weights: Tensor, compared: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over chunks of ``-w log pi(chunk)``, and sums of the ratios to the policy that acted, for the metrics.

    Args:
        logprobs: [n, K, A], log pi of the recorded tokens, under the weights in training.
        rows: targets of these n chunks.
        tokens: bool [n, K, A], the executed tokens.
        weights: [n], w.
        compared: bool [n], the chunks that the metrics are about; None: all.
    """
    executed = tokens.flatten(1).any(dim=1)
    used = torch.where(executed, weights, torch.zeros_like(weights))
    ratios = log_ratio(logprobs, rows.behaviour_logprobs, tokens, "action")
    mask = tokens.any(dim=2) if compared is None else tokens.any(dim=2) & compared[:, None]
    return -(used * pool(logprobs, tokens, "chunk")).sum(), ratio_metrics(ratios, mask)
