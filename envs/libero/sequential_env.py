"""What both LIBERO environments share: tasks, spec, initial states, and stepping one environment after another."""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from envs.base.vector_env import Instance, SimulatorEnv
from envs.libero.bootstrap import import_libero
from envs.libero.config import LiberoConfig
from envs.libero.protocol.conventions import to_robosuite
from envs.libero.protocol.tasks import STEP_LIMITS, load_init_states, select_tasks
from vla_rl.core.records import EnvSpec, EpisodeSpec, StepResult


def env_spec(config: LiberoConfig) -> EnvSpec:
    """The ``spec`` of the environments that ``config`` describes; imports LIBERO, but builds no task.

    Raises EnvError if LIBERO, its OpenGL library, the assets or a configured task is missing.
    """
    tasks = select_tasks(config.suite, config.tasks)
    return EnvSpec(
        name="libero",
        views=("agentview", "robot0_eye_in_hand") if config.wrist_camera else ("agentview",),
        image_size=config.image_size,
        proprio_dim=8 if config.proprio else 0,
        action_dim=7,
        max_episode_steps=config.max_episode_steps or STEP_LIMITS[config.suite],
        instructions=tuple(task.instruction for task in tasks),
        init_states=min(len(load_init_states(task)) for task in tasks),
        assets=import_libero(config.assets).origin,
        suite=config.suite,
    )


class SequentialVectorEnv(SimulatorEnv[Instance]):
    """LIBERO environments in one process, stepped one after another. Raises EnvError as ``env_spec`` does."""

    def __init__(self, config: LiberoConfig, num_envs: int) -> None:
        super().__init__(env_spec(config), num_envs)
        self.config, self.assets = config, import_libero(config.assets)
        self.tasks = select_tasks(config.suite, config.tasks)

    @abstractmethod
    def _advance(self, instance: Instance, command: np.ndarray) -> bool:
        """One control step, float64 [7] in robosuite's convention; returns whether the goal holds after it."""

    @abstractmethod
    def _frame(self, instance: Instance) -> np.ndarray:
        """uint8 [H, W, 3]: the main view, for a recording."""

    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> StepResult:
        instances = self._running_instances(env_ids, actions)
        count, chunk = actions.shape[:2]
        rewards, num_steps = np.zeros((count, chunk), np.float32), np.zeros(count, np.int32)
        success, truncated = np.zeros(count, bool), np.zeros(count, bool)
        for row, instance in enumerate(instances):
            for command in to_robosuite(actions[row]):
                success[row] = self._advance(instance, command)
                instance.steps += 1
                num_steps[row] += 1
                if instance.episode.record:
                    instance.frames.append(self._frame(instance))
                truncated[row] = not success[row] and instance.steps >= self.spec.max_episode_steps
                instance.running = not (success[row] or truncated[row])
                if not instance.running:
                    break
            rewards[row, num_steps[row] - 1] = success[row]
        return StepResult(rewards, num_steps, terminated=success, truncated=truncated, success=success.copy())

    def _init_state(self, episode: EpisodeSpec) -> np.ndarray | None:
        """float64 [1 + nq + nv]: the benchmark state to start from; None: LIBERO's samplers place everything."""
        if episode.init_state is None:
            return None
        return load_init_states(self.tasks[episode.task])[episode.init_state]
