"""What all simulators share: the ``VectorEnv`` interface, reward shaping and demonstration files."""

from envs.base.config import SimulatorConfig
from envs.base.sequential import Outcome, SequentialEnv
from envs.base.vector_env import EnvError, EnvInstance, NothingPlayable, SimulatorEnv, VectorEnv, empty_observation

__all__ = [
    "EnvError",
    "EnvInstance",
    "NothingPlayable",
    "Outcome",
    "SequentialEnv",
    "SimulatorConfig",
    "SimulatorEnv",
    "VectorEnv",
    "empty_observation",
]
