"""Meta-World behind the ``VectorEnv`` interface.

Placements are Meta-World's own, drawn with random numbers that are a pure function of (task, seed), or of (task,
init_state) if one is given. An episode ends when Meta-World reports success (terminated, reward 1) or at the time limit
(truncated). Actions are Meta-World's: the hand moves by centimetres, and the last number opens (-1) or closes (1) the
gripper.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from envs.base import EnvError, EnvInstance, Outcome, SequentialEnv
from envs.base.mujoco_setup import select_gl_backend
from envs.base.packages import package_folder, versions
from envs.metaworld.config import MetaWorldConfig
from envs.metaworld.rendering import Painter
from envs.metaworld.simulation import Simulation
from envs.metaworld.tasks import INSTRUCTIONS
from vla_rl.core.actions import ROBOSUITE, ActionDim, ActionSpace
from vla_rl.core.packages import install_command
from vla_rl.core.records import EnvSpec, EpisodeSpec

ACTIONS = ActionSpace((*map(ActionDim, ("dx", "dy", "dz")), ActionDim("gripper", gripper=ROBOSUITE)))
# Where Meta-World lets the hand go, in metres, and the gripper from 0 = closed to 1 = open.
PROPRIO_RANGE = ((-0.525, 0.525), (0.348, 1.025), (-0.0525, 0.7), (0.0, 1.0))
INIT_STATES = 1000  # placements that are for evaluations alone
_SAMPLED, _BENCHMARK = 0, 1  # streams of random numbers


def env_spec(config: MetaWorldConfig) -> EnvSpec:
    """See ``envs.env_spec``. Raises EnvError, with the remedy, if Meta-World or the GL library is missing."""
    for package in ("metaworld", "mujoco"):
        if package_folder(package) is None:
            raise EnvError(f"Python package {package!r} is missing: {install_command('metaworld')}")
    backend = select_gl_backend()
    return EnvSpec(
        name="metaworld",
        views=(config.camera,),
        image_size=config.image_size,
        proprio_dim=len(PROPRIO_RANGE) if config.proprio else 0,
        proprio_range=PROPRIO_RANGE if config.proprio else (),
        actions=ACTIONS,
        max_episode_steps=config.max_episode_steps,
        instructions=tuple(INSTRUCTIONS[name] for name in config.chosen),
        init_states=INIT_STATES,
        engine=f"{versions('metaworld', 'mujoco')}, drawn by {backend}",
        assets="package",
        robot="sawyer",
        fps=80,
    )


@dataclass
class _Instance(EnvInstance):
    simulation: Simulation


class MetaWorldVectorEnv(SequentialEnv[_Instance]):
    """See the module. Raises EnvError as ``env_spec`` does."""

    def __init__(self, config: MetaWorldConfig, num_envs: int) -> None:
        super().__init__(env_spec(config), num_envs)
        self.config = config
        self._idle: list[Simulation] = []  # left by environments that have changed to another task
        self._painters: dict[str, Painter] = {}  # by task

    def _start(self, env_id: int, episode: EpisodeSpec, previous: _Instance | None) -> _Instance:
        if previous is not None:
            self._idle.append(previous.simulation)
        task = self.config.chosen[episode.task]
        simulation = self._simulation(task)
        stream, number = (_SAMPLED, episode.seed) if episode.init_state is None else (_BENCHMARK, episode.init_state)
        key = (stream, list(INSTRUCTIONS).index(task))
        simulation.reset(np.random.default_rng(np.random.SeedSequence(number, spawn_key=key)))
        return _Instance(episode, simulation)

    def _simulation(self, task: str) -> Simulation:
        for position, simulation in reversed(list(enumerate(self._idle))):  # its own one is the last
            if simulation.task == task:
                return self._idle.pop(position)
        return Simulation(task)

    def _advance(self, instance: _Instance, action: np.ndarray) -> Outcome:
        success = instance.simulation.step(self.spec.actions.clip(action))
        return Outcome(float(success), terminated=success, success=success)

    def _images(self, instance: _Instance) -> np.ndarray:
        task, scene = instance.simulation.task, instance.simulation.env
        if task not in self._painters:
            self._painters[task] = Painter(scene.model, self.config)
        return self._painters[task].image(scene.model, scene.data)[None]

    def _proprio(self, instance: _Instance) -> np.ndarray:
        return instance.simulation.seen[:4]

    def expert_action(self, env_id: int) -> np.ndarray:
        action = self.instance(env_id).simulation.expert_action()
        return self.spec.actions.clip(action).astype(np.float32)

    def potential(self, env_ids: Sequence[int]) -> np.ndarray:
        """Meta-World's dense reward, between 0 and 1."""
        return np.array([self.instance(env_id).simulation.progress() for env_id in env_ids], np.float32)

    def close(self) -> None:
        simulations = [*self._idle, *(instance.simulation for instance in self._instances if instance is not None)]
        super().close()
        for painter in self._painters.values():
            painter.close()
        for simulation in simulations:
            simulation.close()
        self._idle, self._painters = [], {}


make_env = MetaWorldVectorEnv
