"""ManiSkill behind the ``VectorEnv`` interface.

An episode begins with ManiSkill's own reset, with the episode's seed (benchmark initial state i is the reset with seed
i). It ends when ManiSkill declares success (terminated, reward 1) or at the time limit (truncated). Actions are in the
units of ManiSkill's controller: for the Panda arm, shares of 0.1 m and 0.1 rad. The gripper switches at 0.5.

On physx_cpu each environment has a ManiSkill environment of its own; on physx_cuda all share one (see ``simulation``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from envs.base import SimulatorEnv
from envs.base.vector_env import EnvInstance
from envs.maniskill.bootstrap import check_maniskill
from envs.maniskill.config import ManiSkillConfig
from envs.maniskill.expert import expert_action
from envs.maniskill.simulation import Simulation
from envs.maniskill.tasks import maniskill_spec, select_tasks
from vla_rl.core.records import EnvSpec, EpisodeSpec, Observation, StepResult


def env_spec(config: ManiSkillConfig) -> EnvSpec:
    """See ``envs.env_spec``. Raises EnvError as ``check_maniskill`` does."""
    check_maniskill(config)
    return maniskill_spec(config)


@dataclass(slots=True)
class _Instance(EnvInstance):
    simulation: Simulation
    row: int


class ManiSkillVectorEnv(SimulatorEnv[_Instance]):
    """See the module. Raises EnvError as ``check_maniskill`` does."""

    def __init__(self, config: ManiSkillConfig, num_envs: int) -> None:
        super().__init__(env_spec(config), num_envs)
        self.config = config
        self.backend = config.backend
        self._tasks = select_tasks(config)
        self._idle: list[Simulation] = []  # left by environments that have changed to another task
        self._shared: Simulation | None = None

    def _start(self, env_id: int, episode: EpisodeSpec, previous: _Instance | None) -> _Instance:
        if previous is not None and self._shared is None:
            self._idle.append(previous.simulation)
        simulation, row = self._place(env_id, episode.task)
        simulation.reset(row, episode.seed, episode.init_state)
        return _Instance(episode, simulation, row)

    def _place(self, env_id: int, number: int) -> tuple[Simulation, int]:
        """Where the next episode runs: in a row of the shared scene, or in a scene of its own."""
        task = self._tasks[number]
        if self.backend == "physx_cuda":
            if self._shared is None:
                self._shared = Simulation(task, self.config, self.backend, self.num_envs)
            return self._shared, env_id
        for position, simulation in reversed(list(enumerate(self._idle))):  # its own one is the last
            if simulation.task is task:
                return self._idle.pop(position), 0
        return Simulation(task, self.config, self.backend, 1), 0

    def _step(self, env_ids: Sequence[int], instances: list[_Instance], actions: np.ndarray) -> StepResult:
        commands = np.asarray(actions, np.float32).copy()
        fingers = list(self.spec.actions.grippers)
        commands[..., fingers] = np.where(commands[..., fingers] > 0.5, 1.0, -1.0)
        n, chunk = actions.shape[:2]
        rewards, num_steps = np.zeros((n, chunk), np.float32), np.zeros(n, np.int32)
        success, truncated = np.zeros(n, bool), np.zeros(n, bool)
        for k in range(chunk):
            active = [i for i, instance in enumerate(instances) if instance.running]
            for members in _by_simulation(instances, active):
                rows = [instances[i].row for i in members]
                success[members] = instances[members[0]].simulation.step(rows, commands[members, k])
            for i in active:
                instance = instances[i]
                instance.steps += 1
                if instance.episode.record:
                    instance.frames.append(instance.simulation.images([instance.row])[0])
                truncated[i] = not success[i] and instance.steps >= self.spec.max_episode_steps
                instance.running = not (success[i] or truncated[i])
            num_steps[active] += 1
            rewards[active, k] = success[active]
        return StepResult(rewards, num_steps, success, truncated, success.copy())

    def _sense(self, env_ids: Sequence[int], out: Observation) -> None:
        instances = [self.instance(env_id) for env_id in env_ids]
        indices = np.asarray(env_ids, np.int64)
        for members in _by_simulation(instances, range(len(instances))):
            rows = [instances[i].row for i in members]
            out.images[indices[members], 0] = instances[members[0]].simulation.images(rows)
        if self.spec.proprio_dim:
            for env_id, instance in zip(env_ids, instances, strict=True):
                out.proprio[env_id] = instance.simulation.proprio(instance.row)

    def expert_action(self, env_id: int) -> np.ndarray:
        instance = self.instance(env_id)
        return expert_action(instance.simulation, instance.row)

    def potential(self, env_ids: Sequence[int]) -> np.ndarray:
        """Cube tasks: half for the hand's nearness to the cube, half for the cube's to the goal; each falls to a third
        within 10 cm. Bridge scenes: half for a grasp of the object, half for one of 5 control steps; both are kept."""
        return np.array([_progress(self.instance(env_id)) for env_id in env_ids], np.float32)

    def demo_state(self, env_id: int) -> dict[str, np.ndarray]:
        """The present privileged state, by its path within a demonstration (see ``envs.base.demonstrations``)."""
        instance = self.instance(env_id)
        simulation, row = instance.simulation, instance.row
        proprio = simulation.proprio(row)
        return {
            "states": simulation.state(row),
            "robot_states": np.concatenate([simulation.joints(row)[-2:], proprio[:6]]),
            "obs/proprio": proprio.astype(np.float32),
            "obs/ee_pos": proprio[:3],
            "obs/ee_ori": proprio[3:6],
            "obs/gripper_states": proprio[6:],
            "obs/joint_states": simulation.joints(row)[:-2],
        }

    def close(self) -> None:
        simulations = [*self._idle, *(instance.simulation for instance in self._instances if instance is not None)]
        if self._shared is not None:
            simulations = [self._shared]
        super().close()
        self._idle, self._shared = [], None
        for simulation in simulations:
            simulation.close()


make_env = ManiSkillVectorEnv


def _progress(instance: _Instance) -> float:
    simulation, row = instance.simulation, instance.row
    if simulation.task.milestones:
        return simulation.progress(row)
    cube, goal = simulation.position(row, "cube"), simulation.position(row, "goal")
    distances = np.linalg.norm([simulation.tool(row) - cube, cube - goal], axis=1)
    return float(np.exp(-distances / 0.1).mean())


def _by_simulation(instances: Sequence[_Instance], members: Sequence[int]) -> list[list[int]]:
    """The positions ``members``, grouped by the simulation of their instances."""
    groups: dict[int, list[int]] = {}
    for i in members:
        groups.setdefault(id(instances[i].simulation), []).append(i)
    return list(groups.values())
