"""Reinforcement-learning algorithms, one a file: settings and advantages in numpy, tensors in ``algos.algorithm``.

Adding one takes its file and its name in ``AlgoConfig``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from algos.grpo import GRPO
from algos.ppo import PPO
from algos.rloo import RLOO

if TYPE_CHECKING:
    from algos.algorithm import Algorithm
    from algos.config import AlgorithmConfig as AlgorithmSettings

AlgoConfig = Annotated[PPO | GRPO | RLOO, Field(discriminator="name")]


def make_algorithm(config: AlgorithmSettings) -> Algorithm:
    """The tensors' side of an algorithm's settings."""
    from algos.algorithm import SurrogateAlgorithm  # loads torch

    return SurrogateAlgorithm(config)
