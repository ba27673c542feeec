"""Super-batches in the layouts of other packages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from algos import make_algorithm
from algos.advantages import chunk_rewards, episode_returns, gae, group_advantages
from algos.config import AlgorithmConfig
from algos.grpo import GRPOConfig
from algos.losses import RatioLevel, token_mask
from tests.algos.ppo_case import Case
from tests.algos.reference_algos import random_super_batch
from vla_rl.core.records import SuperBatch


def compute_advantages(batch: SuperBatch, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Our advantages and returns."""
    rewards = chunk_rewards(batch.rewards, batch.num_steps)
    return gae(rewards, batch.values, batch.offsets, batch.bootstrap_value, batch.truncated, gamma, lam)


def float64(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def column(x: np.ndarray) -> Tensor:
    """[M] as [M, 1]; numbers in float64."""
    return torch.as_tensor(x if x.dtype == bool else x.astype(np.float64))[:, None]


def marks(batch: SuperBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Next values, done and terminated [M], with all episodes on one time axis."""
    last = batch.offsets[1:] - 1
    following, (done, terminated) = np.append(batch.values[1:], 0.0), np.zeros((2, batch.num_chunks), bool)
    following[last], done[last], terminated[last] = batch.bootstrap_value, True, batch.terminated
    return following, done, terminated


def bootstrapped(batch: SuperBatch, gamma: float) -> np.ndarray:
    """Rewards [M] that contain the value of what follows a truncated end."""
    rewards = chunk_rewards(batch.rewards, batch.num_steps)
    rewards[batch.offsets[1:] - 1] += gamma * np.where(batch.truncated, batch.bootstrap_value.astype(np.float64), 0.0)
    return rewards


def padded(x: np.ndarray | Tensor, batch: SuperBatch) -> Tensor:
    """[M, ...] as [B, everything of the longest episode], zero behind the end."""
    return pad_sequence(torch.as_tensor(x).split(np.diff(batch.offsets).tolist()), batch_first=True).flatten(1)


def grouped(seed: int, groups: int, size: int) -> tuple[SuperBatch, np.ndarray]:
    """Episodes whose groups come mixed, and their returns."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(rng.permutation(100)[:groups], size)).astype(np.int32)
    batch = replace(random_super_batch(rng, groups * size), group=group)
    return batch, episode_returns(batch.rewards, batch.num_steps, batch.offsets)


def exact_case(config: AlgorithmConfig, seed: int) -> Case:
    """With targets that are not rounded to float32."""
    case = Case(config, seed)
    t = case.targets
    advantages, returns = make_algorithm(config).compute_advantages(case.batch, t.proximal_logprobs, t.old_values)
    case.targets = replace(
        t, advantages=advantages, returns=returns, weights=case.algorithm.element_weights(case.batch)
    )
    return case


def tokens_of(case: Case) -> Tensor:
    """bool [M, K, A]: which tokens were executed."""
    return token_mask(torch.as_tensor(case.batch.num_steps), *case.batch.logprobs.shape[1:])


def at_level(per_token: Tensor, tokens: Tensor, level: RatioLevel) -> Tensor:
    """Sums over the executed tokens of each element, without ``algos.losses.pool``."""
    executed = torch.where(tokens, per_token, 0.0)
    return {"token": executed, "action": executed.sum(dim=2), "chunk": executed.flatten(1).sum(dim=1)}[level]


def metrics_of(case: Case, sums: dict[str, Tensor]) -> dict[str, float]:
    return case.algorithm.finish_metrics({name: x.item() for name, x in sums.items()}, case.targets)


@dataclass
class Sequences:
    """The tokens of each episode as one sequence [B, T], T of the longest, in float64; ``new`` with gradients."""

    new: Tensor
    proximal: Tensor
    behaviour: Tensor
    mask: Tensor  # bool
    advantages: Tensor  # without what ``average`` multiplies to them

    @classmethod
    def of(cls, case: Case) -> Sequences:
        c: Any = case.algorithm.config
        assert isinstance(c, GRPOConfig)
        new, proximal, behaviour, mask = (
            padded(x, case.batch)
            for x in (case.logprobs, case.targets.proximal_logprobs, case.batch.logprobs, tokens_of(case))
        )
        new, proximal, behaviour, mask = (x[:, : mask.sum(dim=1).max()] for x in (new, proximal, behaviour, mask))
        returns = episode_returns(case.batch.rewards, case.batch.num_steps, case.batch.offsets)
        advantages = column(group_advantages(returns, case.batch.group, baseline=c.baseline, scale=c.scale))
        return cls(new, proximal.double(), behaviour.double(), mask, advantages.expand_as(mask))
