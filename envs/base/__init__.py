"""What all simulators share: the ``VectorEnv`` interface, reward shaping and demonstration files."""

from envs.base.vector_env import EnvError, SimulatorEnv, VectorEnv, empty_observation

__all__ = ["EnvError", "SimulatorEnv", "VectorEnv", "empty_observation"]
