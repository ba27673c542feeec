"""Reinforcement-learning algorithms: pure maths on super-batches (``algos.base`` holds the contract)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vla_rl.config import AlgoConfig, GRPOConfig, PPOConfig

if TYPE_CHECKING:
    from algos.base import Algorithm


def make_algorithm(config: AlgoConfig) -> Algorithm:
    """The algorithm that a config describes, chosen by the config's class."""
    # Imported here because they import torch, which ``algos.advantages`` and the command line do without.
    from algos.grpo import GRPO
    from algos.ppo import PPO

    match config:
        case PPOConfig():
            return PPO(config)
        case GRPOConfig():
            return GRPO(config)
