"""Algorithms with a critic: an ensemble that rates a chunk in a state, and a value function of the state."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from pydantic import Field

from algos.algorithm import Algorithm
from algos.config import AlgorithmConfig
from vla_rl.core.schema import Fraction, NonNegative, Positive, PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


class CriticConfig(AlgorithmConfig):
    """The critic and its training, on the policy's features of the super-batch."""

    critics: Positive = Field(2, description="Members of the critic's ensemble; their minimum counts.")
    critic_steps: Positive = Field(200, description="Optimizer steps of the critic in each update.")
    critic_batch: Positive = Field(256, description="Chunks of one of these steps.")
    critic_lr: PositiveFloat = Field(1e-3, description="The critic's learning rate (Adam).")
    critic_warmup: NonNegative = Field(1, description="First iterations, in which only the critic is trained.")
    target_rate: Fraction = Field(0.005, description="How far Q_target moves towards Q in each of the critic's steps.")

    @property
    def num_critics(self) -> int:
        return self.critics

    @property
    def needs_recompute(self) -> bool:
        return True  # the critic reads features under the weights before the update


class CriticAlgorithm(Algorithm):
    """``compute_advantages`` is given the ratings and values of a critic that has been trained on the super-batch."""

    config: CriticConfig

    @abstractmethod
    def critic_loss(self, q: Tensor, target_q: Tensor, values: Tensor, next_values: Tensor, rewards: Tensor) -> Tensor:
        """Mean over n chunks of the losses of Q and V.

        Args:
            q, target_q: [n, critics], Q and Q_target of the chunks.
            values, next_values: [n], V(s) and V(s'); the latter 0 after the last chunk of an episode.
            rewards: [n].
        """

    @property
    def first_policy_version(self) -> int:
        return self.config.critic_warmup
