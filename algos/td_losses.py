"""Losses of critics and actors as pure functions: n chunks of K steps of A numbers, an ensemble of m members."""

import torch
from torch import Tensor

LEAST_Q = 0.2  # of a success that pays 1


def chunk_return(rewards: Tensor, num_steps: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """What n chunks earn, ``Σ_k γ^k r_k`` over their executed steps, and the discount ``γ^n`` of what follows.

    ``rewards`` [n, K], ``num_steps`` int [n]; returns [n] each.
    """
    powers = gamma ** torch.arange(rewards.shape[1], dtype=rewards.dtype, device=rewards.device)
    executed = torch.arange(rewards.shape[1], device=rewards.device) < num_steps[:, None]
    earned = (rewards.masked_fill(~executed, 0.0) * powers).sum(dim=1)
    return earned, gamma ** num_steps.to(rewards.dtype)


def td_aim(earned: Tensor, discount: Tensor, next_q: Tensor, continues: Tensor) -> Tensor:
    """``r + γ^n min Q_target(s', a')``: [n], without gradient; the minimum over the members of ``next_q`` [n, m].

    0 follows where ``continues``, bool [n], is false.
    """
    following = next_q.min(dim=1).values.masked_fill(~continues, 0.0)
    return (earned + discount * following).detach()


def td_loss(q: Tensor, aim: Tensor) -> Tensor:
    """Mean over chunks of the squared errors, summed over the members of ``q`` [n, m]; ``aim`` [n]."""
    return (q - aim[:, None]).square().sum(dim=1).mean()


def conservative_loss(q: Tensor, other: Tensor) -> Tensor:
    """CQL's regularizer (arXiv:2006.04779, equation 4): ``log mean exp Q(s, other) − Q(s, a)``, summed over members.

    With the mean for the sum, the number of other chunks moves no value. ``q`` [n, m], ``other`` [n, chunks, m].
    """
    level = torch.logsumexp(other, dim=1) - torch.log(torch.tensor(float(other.shape[1])))
    return (level - q).sum(dim=1).mean()


def td3_bc_loss(q: Tensor, actions: Tensor, recorded: Tensor, executed: Tensor, cloning: float) -> Tensor:
    """TD3+BC (Fujimoto & Gu, arXiv:2106.06860): ``−λ mean Q + cloning · mean (π(s) − a)²``.

    ``λ = 1 / max(mean |Q|, LEAST_Q)`` has no gradient: where Q is about 0, its noise must not outweigh cloning. The
    distance is the mean over the numbers of executed steps. Arguments as
    ``OffPolicyAlgorithm.actor_loss``.
    """
    scale = q.detach().abs().mean().clamp(min=LEAST_Q)
    counted = executed[:, :, None].to(actions.dtype)
    distance = ((actions - recorded).square() * counted).sum() / (counted.sum() * actions.shape[2]).clamp(min=1.0)
    return -q.mean() / scale + cloning * distance
