"""A super-batch on its way through an algorithm, as the learner would drive it, in float64."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields, replace
from typing import get_args

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from algos import make_algorithm
from algos.awr import AWRConfig
from algos.config import AlgorithmConfig
from algos.denominators import LossDenominators, RatioLevel
from algos.grpo import GRPOConfig
from algos.iql import IQLConfig
from algos.ppo import PPOConfig
from algos.recap import RECAPConfig
from algos.rft import RFTConfig
from algos.rloo import RLOOConfig
from algos.targets import RowTargets, Targets
from tests.algos.reference_algos import random_super_batch

LEVELS: tuple[RatioLevel, ...] = get_args(RatioLevel)
SEED = st.integers(0, 2**32 - 1)
PLAIN = PPOConfig(entropy_coef=0.01, huber_delta=0.8)
DECOUPLED = PPOConfig(entropy_coef=0.01, proximal="recomputed", importance_cap=1.5)
DUAL = PPOConfig(proximal="recomputed", dual_clip=1.05)
GROUPED = GRPOConfig(group_size=2, entropy_coef=0.01)
GROUPED_DECOUPLED = GRPOConfig(group_size=2, average="episodes", proximal="recomputed", importance_cap=1.5)
GROUPED_ANCHORED = GRPOConfig(group_size=2, average="episodes", kl_coef=0.3, entropy_coef=0.2)
LEFT_OUT = RLOOConfig(group_size=2)
CONSTANT = GRPOConfig(group_size=2, average="constant", scale="none")
BY_BATCH = GRPOConfig(group_size=2, scale="batch")
MASKED = PPOConfig(proximal="recomputed", importance_low=1 / 1.3, importance_high=1.3)
ONE_SIDED = PPOConfig(proximal="recomputed", importance_high=1.2)
WEIGHTED = PPOConfig(objective="cispo", clip_high=0.1)
GEOMETRIC = PPOConfig(ratio_mean=True, clip_low=0.05, clip_high=0.05)
SOFT = PPOConfig(objective="sapo", tau_positive=2.0, tau_negative=3.0)
GAUSSIAN = PPOConfig(objective="gipo", gipo_sigma=0.3)
INTERPOLATED = PPOConfig(proximal="interpolated", importance_cap=1.2)
ANCHORED = PPOConfig(kl_coef=0.3)
ANCHORED_EXACTLY = PPOConfig(kl_coef=0.3, kl_estimate="weighted_k3")
BY_CHUNK = PPOConfig(proximal="recomputed", importance_level="chunk", importance_low=0.5)
BY_EPISODE = PPOConfig(proximal="recomputed", importance_level="episode", importance_cap=1.1)
BY_TASK = PPOConfig(advantage_scale="task", values="recomputed")
VTRACE = PPOConfig(bootstrap="truncated", proximal="recomputed", estimator="vtrace")
_OF_PPO = (
    *(PLAIN, DECOUPLED, DUAL, MASKED, SOFT, GAUSSIAN, INTERPOLATED, ANCHORED),
    *(BY_CHUNK, BY_EPISODE, BY_TASK, VTRACE, ONE_SIDED, WEIGHTED, GEOMETRIC, ANCHORED_EXACTLY),
)
PPO_CONFIGS = [c.model_copy(update={"ratio_level": level}) for c in _OF_PPO for level in LEVELS]
GRPO_CONFIGS = [
    c.model_copy(update={"ratio_level": level})
    for c in (GROUPED, GROUPED_DECOUPLED, GROUPED_ANCHORED, LEFT_OUT, CONSTANT, BY_BATCH)
    for level in LEVELS
]
IQL = IQLConfig(expectile=0.8, gamma=0.9, max_weight=3.0, critic_warmup=0)
AWR = AWRConfig(bootstrap="truncated", beta=0.7, max_weight=2.0, entropy_coef=0.1, gamma=0.9)
CONFIGS: list[AlgorithmConfig] = [*PPO_CONFIGS, *GRPO_CONFIGS, AWR, RFTConfig(), RECAPConfig(entropy_coef=0.1), IQL]


class Case:
    """A super-batch, the proximal policy's numbers, and the current policy's as float64 leaves."""

    def __init__(self, config: AlgorithmConfig, seed: int = 0, episodes: int = 6, **shape: int) -> None:
        rng = np.random.default_rng(seed)
        self.algorithm = make_algorithm(config)
        self.batch = random_super_batch(rng, episodes, **shape)
        chunks, size, dim = self.batch.logprobs.shape

        def near(logprobs: np.ndarray) -> np.ndarray:
            return (logprobs + 0.15 * rng.normal(size=logprobs.shape)).astype(np.float32)

        recompute = self.algorithm.needs_recompute
        self.proximal = near(self.batch.logprobs) if recompute else None
        self.values = np.asarray(rng.normal(size=chunks), np.float32) if recompute else None
        self.reference = near(self.batch.logprobs) if self.algorithm.needs_reference else None
        self.q = rng.normal(size=(chunks, config.num_critics)).astype(np.float32) if config.num_critics else None
        self.targets = self.new_targets()
        self.logprobs = torch.tensor(near(self.targets.proximal_logprobs), dtype=torch.float64, requires_grad=True)
        self.entropy = torch.tensor(rng.random((chunks, size, dim)), requires_grad=True)
        self.predictions = torch.tensor(self.targets.old_values + 0.3 * rng.normal(size=chunks), requires_grad=True)

    def new_targets(self) -> Targets:
        return self.algorithm.targets(self.batch, self.proximal, self.values, self.reference, self.q)

    def rows(self, index: np.ndarray | slice) -> RowTargets:
        return in_float64(self.targets.rows(index))

    def loss(
        self, index: np.ndarray, denominators: LossDenominators | None = None, policy_version: int = 0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        at = torch.as_tensor(index)
        if denominators is None:
            denominators = LossDenominators.of(self.batch.num_steps[index], self.targets.trains_value[index])
        outputs = self.logprobs[at], self.entropy[at], self.predictions[at]
        return self.algorithm.loss(*outputs, self.rows(index), denominators, policy_version)

    def whole(self, policy_version: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(np.arange(self.batch.num_chunks), policy_version=policy_version)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, [self.logprobs, self.entropy, self.predictions]))


_NOT_REAL = "num_steps", "condition", "trains_value", "judges_values"


def in_float64(rows: RowTargets) -> RowTargets:
    tensors = {f.name: getattr(rows, f.name) for f in fields(rows) if f.name not in _NOT_REAL}
    return replace(rows, **{name: x if x is None else x.double() for name, x in tensors.items()})


def summed(parts: list[dict[str, Tensor]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, x in part.items():
            total[name] += float(x)
    return total


def describe_config(config: AlgorithmConfig) -> str:
    """A short name of a case, for pytest: what differs from the defaults."""
    changes = config.model_dump(exclude_defaults=True)
    return "-".join([config.name, config.loss_level, *(f"{k}={v}" for k, v in changes.items() if k != "ratio_level")])
