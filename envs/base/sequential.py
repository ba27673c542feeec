"""Base of simulators whose environments are stepped one after another: the shortest way to a simulator of your own."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from envs.base.vector_env import EnvError, Instance, SimulatorEnv
from vla_rl.core.records import Observation, StepResult


class Outcome(NamedTuple):
    """What one control step of one environment led to. The time limit of the spec is added to it."""

    reward: float
    terminated: bool = False  # the task itself ended: success, or a failure
    success: bool = False
    truncated: bool = False  # by a limit of the simulator's own


class SequentialEnv(SimulatorEnv[Instance]):
    """Plays chunks, counts steps, records frames; a subclass says what one control step does, and what is seen."""

    @abstractmethod
    def _advance(self, instance: Instance, action: np.ndarray) -> Outcome:
        """One control step with an action [A]."""

    @abstractmethod
    def _images(self, instance: Instance) -> np.ndarray:
        """uint8 [V, H, W, 3]: all views."""

    def _proprio(self, instance: Instance) -> np.ndarray:
        """float [P]; needed if the spec has a ``proprio_dim``."""
        raise NotImplementedError(f"{type(self).__name__} has a proprio_dim: define _proprio")

    def _frame(self, instance: Instance) -> np.ndarray:
        """uint8 [H, W, 3], for a video; the first view if it is not overridden."""
        frame: np.ndarray = self._images(instance)[0]
        return frame

    def _commands(self, actions: np.ndarray) -> Iterable[np.ndarray]:
        """The actions of a chunk [K, A], as ``_advance`` wants them."""
        return actions

    def _step(self, env_ids: Sequence[int], instances: list[Instance], actions: np.ndarray) -> StepResult:
        count, chunk = actions.shape[:2]
        rewards, num_steps = np.zeros((count, chunk), np.float32), np.zeros(count, np.int32)
        terminated, truncated, success = (np.zeros(count, bool) for _ in range(3))
        for row, instance in enumerate(instances):
            for k, action in enumerate(self._commands(actions[row])):
                outcome = self._advance(instance, action)
                instance.steps += 1
                num_steps[row], rewards[row, k], success[row] = k + 1, outcome.reward, outcome.success
                terminated[row] = outcome.terminated or outcome.success
                late = outcome.truncated or instance.steps >= self.spec.max_episode_steps
                truncated[row] = late and not terminated[row]
                if instance.episode.record:
                    instance.frames.append(self._frame(instance))
                instance.running = not (terminated[row] or truncated[row])
                if not instance.running:
                    break
        return StepResult(rewards, num_steps, terminated, truncated, success)

    def _sense(self, env_ids: Sequence[int], out: Observation) -> None:
        for env_id in env_ids:
            instance = self.instance(env_id)
            out.images[env_id] = self._images(instance)
            if self.spec.proprio_dim:
                out.proprio[env_id] = self._proprio(instance)

    def expert_action(self, env_id: int) -> np.ndarray:
        raise EnvError(f"{self.spec.name} has no scripted expert: name files of demonstrations in sft.demos")

    def potential(self, env_ids: Sequence[int]) -> np.ndarray:
        raise EnvError(f"{self.spec.name} has no potential: set env.shaping=0")
