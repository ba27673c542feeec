"""One of Meta-World's environments."""

import warnings
from typing import Any

import numpy as np

from envs.base.mujoco_setup import import_mujoco

_MOST_REWARD = 10.0  # of Meta-World's dense rewards, in the goal


class Simulation:
    """One task's scene, in which episodes follow one another."""

    def __init__(self, task: str) -> None:
        self._mujoco = import_mujoco()  # before Meta-World does, which chooses no way to draw
        from metaworld import env_dict, policies

        scenes: Any = env_dict.ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
        experts: Any = policies.ENV_POLICY_MAP
        self.task, self.reward = task, 0.0
        self.env: Any = scenes[f"{task}-goal-observable"](seed=0)
        self._expert = experts[task]()
        self.seen = np.zeros(39)  # Meta-World's observation: hand 3, gripper 1, objects, the same before, goal 3

    def reset(self, rng: np.random.Generator) -> None:
        """Place everything as Meta-World does with these random numbers, whatever was played before.

        Meta-World resets a scene twice. The first time, it begins with what the last episode has left, and draws; only
        what is drawn last, and not drawn again, is placed before the arm moves to its start.
        """
        env = self.env
        env.np_random, env.seeded_rand_vec, env._freeze_rand_vec = rng, True, False
        env.reset()
        env._freeze_rand_vec = True
        self.seen, _ = env.reset()
        self._mujoco.mj_kinematics(env.model, env.data)  # some tasks place things last: for the first picture
        self.reward, _ = env.evaluate_state(self.seen, np.zeros(4, np.float32))

    def step(self, action: np.ndarray) -> bool:
        """One control step with an action float32 [4] within the limits; returns whether the task is solved."""
        self.seen, self.reward, _, _, info = self.env.step(action)
        return bool(info["success"])

    def expert_action(self) -> np.ndarray:
        """float [4], not clipped, of Meta-World's scripted policy for the present state."""
        with warnings.catch_warnings(action="ignore"):  # that its numbers are beyond the limits
            action: np.ndarray = self._expert.get_action(self.seen)
        return action

    def progress(self) -> float:
        """0..1: Meta-World's dense reward of the last step, of the most that it gives."""
        return float(np.clip(self.reward / _MOST_REWARD, 0.0, 1.0))

    def close(self) -> None:
        """Safe to call twice."""
        self.env.close()
