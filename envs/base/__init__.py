from envs.base.vector_env import EnvError, VectorEnv, empty_observation

__all__ = ["EnvError", "VectorEnv", "empty_observation"]
