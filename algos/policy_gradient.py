"""Policy gradients: algorithms whose policy is trained by a surrogate with probability ratios (``algos.surrogate``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from algos.advantages import episode_log_ratios
from algos.algorithm import Algorithm
from algos.config import PolicyGradientConfig
from vla_rl.core.records import Array, SuperBatch

if TYPE_CHECKING:
    from torch import Tensor

    from algos.targets import RowTargets


class PolicyGradient(Algorithm):
    """Raises the probability of actions with a positive advantage, as far as the objective allows."""

    config: PolicyGradientConfig

    def policy_loss(self, logprobs: Tensor, rows: RowTargets, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from algos import surrogate  # loads torch

        return surrogate.policy_loss(self.config, logprobs, rows, tokens)

    def episode_log_weights(self, batch: SuperBatch, proximal: Array) -> Array | None:
        if self.config.weight_level != "episode":
            return None
        return episode_log_ratios(proximal, batch.logprobs, batch.num_steps, batch.offsets)
