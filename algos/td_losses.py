"""Losses of critics and actors as pure functions: n chunks of K steps of A numbers, an ensemble of m members."""

import math

import torch
from torch import Tensor

BIN_SMOOTHING = 0.75  # deviation of the aims' distribution, in bins, as published
LEAST_Q = 0.2  # of a success that pays 1


def chunk_return(rewards: Tensor, num_steps: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """What n chunks earn, ``Σ_k γ^k r_k`` over their executed steps, and the discount ``γ^n`` of what follows.

    ``rewards`` [..., K], ``num_steps`` int [...]; returns [...] each.
    """
    steps = torch.arange(rewards.shape[-1], device=rewards.device)
    earned = (rewards.masked_fill(steps >= num_steps[..., None], 0.0) * gamma ** steps.to(rewards.dtype)).sum(dim=-1)
    return earned, gamma ** num_steps.to(rewards.dtype)


def return_of_chunks(rewards: Tensor, num_steps: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """``chunk_return`` of C chunks, one after the other: ``rewards`` [n, C, K], ``num_steps`` int [n, C]; [n] each.

    No step of a chunk is executed after an episode's end.
    """
    earned, discounts = chunk_return(rewards, num_steps, gamma)
    after = discounts.cumprod(dim=1)
    return earned[:, 0] + (after[:, :-1] * earned[:, 1:]).sum(dim=1), after[:, -1]


def td_aim(earned: Tensor, discount: Tensor, next_q: Tensor, continues: Tensor) -> Tensor:
    """``r + γ^n min Q_target(s', a')``: [n], without gradient; the minimum over the members of ``next_q`` [n, m].

    0 follows where ``continues``, bool [n], is false.
    """
    following = next_q.min(dim=1).values.masked_fill(~continues, 0.0)
    return (earned + discount * following).detach()


def td_loss(q: Tensor, aim: Tensor) -> Tensor:
    """Mean over chunks of the squared errors, summed over the members of ``q`` [n, m]; ``aim`` [n]."""
    return (q - aim[:, None]).square().sum(dim=1).mean()


def bin_targets(aim: Tensor, edges: Tensor) -> Tensor:
    """[n, b]: how probable each bin is under a normal distribution around ``aim`` [n], within ``edges`` [b + 1].

    Its deviation is ``BIN_SMOOTHING`` bins (HL-Gauss, arXiv:2403.03950). Aims beyond the edges are taken for the
    nearest one.
    """
    deviation = BIN_SMOOTHING * (edges[1] - edges[0])
    z = (edges - aim.clamp(edges[0], edges[-1])[:, None]) / (deviation * math.sqrt(2.0))
    below = torch.erf(z)
    return below.diff(dim=1) / (below[:, -1:] - below[:, :1])


def hl_gauss_loss(logits: Tensor, aim: Tensor, edges: Tensor) -> Tensor:
    """Mean over chunks of the cross-entropy with ``bin_targets``, summed over the members of ``logits`` [n, m, b]."""
    wanted = bin_targets(aim, edges)[:, None]
    return -(wanted * logits.log_softmax(dim=2)).sum(dim=(1, 2)).mean()


def expectile_loss(better: Tensor, expectile: float) -> Tensor:
    """``mean |expectile − 1(u < 0)| u²`` (IQL, arXiv:2110.06169, equation 5) of what chunks are better than V, [n]."""
    slope = (expectile - (better < 0).to(better.dtype)).abs()
    return (slope * better.square()).mean()


def best_candidate(rated: Tensor, executed: Tensor, success: Tensor) -> Tensor:
    """int64 [n]: the number of the best candidate of each state, by the ensemble's minimum; N is the executed chunk.

    ``rated`` [n, N, m]: of N chunks that the policy draws. ``executed`` [n, m]: of the executed chunk, which is a
    candidate in a ``success``, bool [n].
    """
    of_executed = executed.min(dim=1).values.masked_fill(~success, -torch.inf)
    return torch.cat([rated.min(dim=2).values, of_executed[:, None]], dim=1).argmax(dim=1)


def conservative_loss(q: Tensor, other: Tensor) -> Tensor:
    """CQL's regularizer (arXiv:2006.04779, equation 4): ``log mean exp Q(s, other) − Q(s, a)``, summed over members.

    With the mean for the sum, the number of other chunks moves no value. ``q`` [n, m], ``other`` [n, chunks, m].
    """
    level = torch.logsumexp(other, dim=1) - torch.log(torch.tensor(float(other.shape[1])))
    return (level - q).sum(dim=1).mean()


def imagined_loss(q: Tensor, gains: Tensor) -> Tensor:
    """Mean over n states and b chunks of ``(Q − mean_b Q − A)²``, summed over the members of ``q`` [n, b, m].

    ``gains`` [n, b], A: what a model expects of each chunk beyond the mean of its state. Q of states is left alone.
    """
    return (q - q.mean(dim=1, keepdim=True) - gains[:, :, None]).square().sum(dim=2).mean()


def excess_loss(means: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Mean over n chunks of ``Σ (x − clip(x, low, high))²`` over their numbers x, ``means`` [n, ...].

    A critic that rates what a simulator executes has no slope beyond its limits: nothing else would bring an actor back
    (Hausknecht & Stone, arXiv:1511.04143, section 5, show how actors drift away, and other remedies).
    """
    return (means - means.clamp(low, high)).square().flatten(1).sum(dim=1).mean()


def rating_scale(q: Tensor) -> Tensor:
    """``max(mean |Q|, LEAST_Q)``, without gradient: what is divided by it has size 1 whatever the returns are.

    Where Q is about 0, its noise must not outweigh the other terms. ``q`` [n].
    """
    return q.detach().abs().mean().clamp(min=LEAST_Q)


def executed_mean(x: Tensor, executed: Tensor) -> Tensor:
    """Mean of ``x`` [n, K, A] over the numbers of executed steps, bool [n, K]."""
    counted = executed[:, :, None].to(x.dtype)
    return (x * counted).sum() / (counted.sum() * x.shape[2]).clamp(min=1.0)


def td3_bc_loss(q: Tensor, means: Tensor, recorded: Tensor, executed: Tensor, cloning: float) -> Tensor:
    """TD3+BC (Fujimoto & Gu, arXiv:2106.06860): ``−mean Q / rating_scale + cloning · mean (π(s) − a)²``.

    The distance is the mean over the numbers of executed steps. Arguments as in ``Acted``.
    """
    return -q.mean() / rating_scale(q) + cloning * executed_mean((means - recorded).square(), executed)


def sac_loss(
    q: Tensor,
    means: Tensor,
    entropy: Tensor,
    recorded: Tensor,
    executed: Tensor,
    *,
    alpha: float,
    cloning: float,
    scaled: bool,
) -> Tensor:
    """SAC (arXiv:1801.01290, equation 12): ``−mean Q / scale − alpha · mean H + cloning · mean (mean of π(s) − a)²``.

    H is the entropy of an action number. Published is the entropy of the whole action: ``alpha`` here is K A times that
    one. Both means are over the numbers of executed steps. The distance is that of the means, so that cloning leaves
    the deviation alone. Arguments as in ``Acted``; ``scaled``: whether the scale is ``rating_scale`` or 1.
    """
    scale = rating_scale(q) if scaled else torch.ones_like(q[0])
    distance = executed_mean((means - recorded).square(), executed)
    return -q.mean() / scale - alpha * executed_mean(entropy, executed) + cloning * distance


def alpha_loss(log_alpha: Tensor, entropy: float, target: float) -> Tensor:
    """SAC's temperature (arXiv:1812.05905, equation 18): ``α (H − target)``; both nats of an action number."""
    return log_alpha.exp() * (entropy - target)
