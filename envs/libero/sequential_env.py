"""What both LIBERO environments share: tasks, spec, initial states, and stepping one environment after another."""

import os
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from envs.base.packages import versions
from envs.base.sequential import Outcome, SequentialEnv
from envs.base.vector_env import Instance
from envs.libero.bootstrap import import_libero
from envs.libero.config import LiberoConfig
from envs.libero.playable import playable_tasks
from envs.libero.protocol.conventions import to_robosuite
from envs.libero.protocol.settled import PLACEMENT_SEED, reference, resting_note, settled_init_states
from envs.libero.protocol.suites import base_suite
from envs.libero.protocol.tasks import STEP_LIMITS, LiberoTask, load_init_states
from vla_rl.core.actions import ROBOSUITE, end_effector
from vla_rl.core.records import EnvSpec, EpisodeSpec

JOINTS = 128  # positions, and as many velocities; no scene of LIBERO has more
STATE_DIM = 3 + 2 * JOINTS  # numbers of ``VectorEnv.state``


def env_spec(config: LiberoConfig) -> EnvSpec:
    """The ``spec`` of the environments that ``config`` describes; imports LIBERO, but builds no task.

    Raises EnvError if LIBERO, its OpenGL library, the assets or a configured task is missing.
    """
    assets = import_libero(config.assets)
    tasks, left_out, notes = playable_tasks(config.suite, config.tasks, assets)
    base = base_suite(config.suite)
    states = [len(load_init_states(task)) for task in tasks if task.init_states_file]
    return EnvSpec(
        name="libero",
        views=("agentview", "robot0_eye_in_hand") if config.wrist_camera else ("agentview",),
        image_size=config.image_size,
        state_dim=STATE_DIM if config.implementation == "fast" else 0,
        proprio_dim=8 if config.proprio else 0,
        actions=end_effector(ROBOSUITE),
        max_episode_steps=config.max_episode_steps or STEP_LIMITS.get(base, max(STEP_LIMITS.values())),
        instructions=tuple(task.instruction for task in tasks),
        init_states=max(states, default=50),
        engine=f"{versions('mujoco', 'robosuite')}, drawn by {os.environ['MUJOCO_GL']}",
        assets=assets.origin,
        suite=base,
        robot="panda",
        notes=(*notes, *_settling_notes(config, tasks, assets.origin)),
        left_out=left_out,
    )


def _settling_notes(config: LiberoConfig, tasks: Sequence[LiberoTask], origin: str) -> tuple[str, ...]:
    """Raises EnvError if objects are to begin where a reference has them that is not there."""
    if config.settled == "reference":
        for task in tasks:
            reference(str(task))
        return ("objects begin where they rest under MuJoCo 3.3.0 (env.settled=reference)",)
    note = None if origin == "placeholder" else resting_note(tasks)  # such results are compared with none
    return () if note is None else (note,)


class SequentialVectorEnv(SequentialEnv[Instance]):
    """LIBERO environments in one process, stepped one after another. Raises EnvError as ``env_spec`` does."""

    def __init__(self, config: LiberoConfig, num_envs: int) -> None:
        super().__init__(env_spec(config), num_envs)
        self.config, self.assets = config, import_libero(config.assets)
        self.tasks, *_ = playable_tasks(config.suite, config.tasks, self.assets)

    @abstractmethod
    def _execute(self, instance: Instance, command: np.ndarray) -> bool:
        """One control step, float64 [7] in robosuite's convention; returns whether the goal holds after it."""

    def _advance(self, instance: Instance, action: np.ndarray) -> Outcome:
        success = self._execute(instance, action)
        return Outcome(float(success), terminated=success, success=success)

    def _commands(self, actions: np.ndarray) -> np.ndarray:
        return to_robosuite(actions)

    def _init_state(self, episode: EpisodeSpec) -> np.ndarray | None:
        """float64 [1 + nq + nv]: the benchmark state to start from, of a task with fewer of them again from the first;
        None: LIBERO's samplers place everything."""
        task = self.tasks[episode.task]
        if episode.init_state is None or task.init_states_file is None:
            return None
        states = (load_init_states if self.config.settled == "here" else settled_init_states)(task)
        return states[episode.init_state % len(states)]

    def _placement_seed(self, episode: EpisodeSpec) -> int:
        """Of fixtures, and of objects without an initial state."""
        given = self.config.settled == "reference" and episode.init_state is not None
        return PLACEMENT_SEED if given else episode.seed
