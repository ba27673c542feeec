"""Reinforcement-learning algorithms, one a file: settings and advantages in numpy, tensors in ``algos.surrogate``.

Adding one takes its file and its name in ``AlgoConfig``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from algos.grpo import GRPO
from algos.ppo import PPO
from algos.rloo import RLOO

AlgoConfig = Annotated[PPO | GRPO | RLOO, Field(discriminator="name")]
