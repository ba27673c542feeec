"""ManiSkill behind the ``VectorEnv`` protocol.

An episode is ManiSkill's own reset with the episode's seed (a benchmark initial state i is the reset with seed i), then
control steps until ManiSkill declares success (terminated, reward 1) or the time limit (truncated). Actions are in the
units of ManiSkill's controller, for the Panda arm shares of 0.1 m and 0.1 rad; the gripper is a switch at 0.5.

On physx_cpu each slot has a ManiSkill environment of its own; on physx_cuda all slots share one (see ``simulation``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from envs.base import EnvError, VectorEnv
from envs.maniskill.bootstrap import check_maniskill, choose_backend
from envs.maniskill.config import ManiSkillConfig
from envs.maniskill.expert import expert_action
from envs.maniskill.simulation import Simulation
from envs.maniskill.tasks import ACTION_DIM, INIT_STATES, maniskill_spec, select_tasks
from vla_rl.core.records import Episode, Observation, StepResult


@dataclass(slots=True)
class _Slot:
    """An episode under way, or ended."""

    episode: Episode
    simulation: Simulation
    row: int
    steps: int = 0
    running: bool = True
    frames: list[np.ndarray] = field(default_factory=list)


class ManiSkillVectorEnv(VectorEnv):
    """See the module. Raises EnvError as ``check_maniskill`` does, ValueError where ``num_slots`` is not positive."""

    def __init__(self, config: ManiSkillConfig, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots={num_slots}: a vectorized environment needs at least one slot")
        check_maniskill(config)
        self.config = config
        self.num_slots = num_slots
        self.spec = maniskill_spec(config)
        self.backend = choose_backend(config)
        self._tasks = select_tasks(config)
        self._slots: list[_Slot | None] = [None] * num_slots
        self._idle: list[Simulation] = []  # of slots that have moved on to another task
        self._shared: Simulation | None = None

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        for index, episode in zip(slots, episodes, strict=True):
            self._check(episode)
            simulation, row = self._place(index, episode.task)
            simulation.reset(row, episode.seed, episode.init_state)
            self._slots[index] = _Slot(episode, simulation, row)

    def _check(self, episode: Episode) -> None:
        if not 0 <= episode.task < len(self._tasks):
            raise EnvError(
                f"episode {episode.id} asks for task {episode.task}: env.tasks={list(self.config.tasks)} "
                f"has the tasks 0..{len(self._tasks) - 1}"
            )
        if episode.init_state is not None and not 0 <= episode.init_state < INIT_STATES:
            raise EnvError(
                f"episode {episode.id} asks for initial state {episode.init_state}: "
                f"ManiSkill's tasks have the states 0..{INIT_STATES - 1}"
            )

    def _place(self, index: int, number: int) -> tuple[Simulation, int]:
        """Where a slot's next episode runs: in a row of the scene of all, or in a scene of its own."""
        task = self._tasks[number]
        if self.backend == "physx_cuda":
            if self._shared is None:
                self._shared = Simulation(task, self.config, self.backend, self.num_slots)
            return self._shared, index
        slot, self._slots[index] = self._slots[index], None
        if slot is not None:
            self._idle.append(slot.simulation)
        for position, simulation in reversed(list(enumerate(self._idle))):  # its own one came last
            if simulation.task is task:
                return self._idle.pop(position), 0
        return Simulation(task, self.config, self.backend, 1), 0

    def step(self, slots: Sequence[int], actions: np.ndarray) -> StepResult:
        moving = self._checked(slots, actions)
        commands = np.asarray(actions, np.float32).copy()
        commands[..., -1] = np.where(commands[..., -1] > 0.5, 1.0, -1.0)
        n, chunk = actions.shape[:2]
        rewards, num_steps = np.zeros((n, chunk), np.float32), np.zeros(n, np.int32)
        success, truncated = np.zeros(n, bool), np.zeros(n, bool)
        for k in range(chunk):
            active = [i for i, slot in enumerate(moving) if slot.running]
            for members in _by_simulation(moving, active):
                rows = [moving[i].row for i in members]
                success[members] = moving[members[0]].simulation.step(rows, commands[members, k])
            for i in active:
                slot = moving[i]
                slot.steps += 1
                if slot.episode.record:
                    slot.frames.append(slot.simulation.images([slot.row])[0])
                truncated[i] = not success[i] and slot.steps >= self.spec.max_episode_steps
                slot.running = not (success[i] or truncated[i])
            num_steps[active] += 1
            rewards[active, k] = success[active]
        return StepResult(rewards, num_steps, success, truncated, success.copy())

    def _checked(self, slots: Sequence[int], actions: np.ndarray) -> list[_Slot]:
        n = len(slots)
        if actions.ndim != 3 or actions.shape[0] != n or actions.shape[1] < 1 or actions.shape[2] != ACTION_DIM:
            raise ValueError(f"actions of shape {actions.shape} for {n} slots: need [{n}, K, {ACTION_DIM}]")
        if len(set(slots)) != n:
            raise ValueError(f"slots {list(slots)} name a slot twice")
        if not np.isfinite(actions).all():
            raise ValueError("actions hold numbers that are not finite")
        moving = [self._occupied(index) for index in slots]
        for index, slot in zip(slots, moving, strict=True):
            if not slot.running:
                raise ValueError(f"slot {index}: episode {slot.episode.id} has ended: reset it first")
        return moving

    def _occupied(self, index: int) -> _Slot:
        slot = self._slots[index]
        if slot is None:
            raise ValueError(f"slot {index} holds no episode: reset it first")
        return slot

    def observe(self, slots: Sequence[int], out: Observation) -> None:
        occupied = [self._occupied(index) for index in slots]
        indices = np.asarray(slots, np.int64)
        for members in _by_simulation(occupied, range(len(occupied))):
            rows = [occupied[i].row for i in members]
            out.images[indices[members], 0] = occupied[members[0]].simulation.images(rows)
        for index, slot in zip(slots, occupied, strict=True):
            out.task[index] = slot.episode.task
            if self.spec.proprio_dim:
                out.proprio[index] = slot.simulation.proprio(slot.row)

    def frames(self, slot: int) -> list[np.ndarray]:
        """See VectorEnv: the third-person view after each control step."""
        return self._occupied(slot).frames

    def expert_action(self, slot: int) -> np.ndarray:
        occupied = self._occupied(slot)
        return expert_action(occupied.simulation, occupied.row)

    def potential(self, slots: Sequence[int]) -> np.ndarray:
        """Cube tasks: half for the hand's nearness to the cube, half for the cube's to the goal; it falls to a third in
        10 cm. Bridge scenes: half for a grasp of the object, half for one of 5 control steps; once reached, both stay.
        """
        return np.array([_progress(self._occupied(index)) for index in slots], np.float32)

    def demo_state(self, slot: int) -> dict[str, np.ndarray]:
        """The current privileged state, by its path within a demonstration (see ``envs.base.demonstrations``)."""
        occupied = self._occupied(slot)
        simulation, row = occupied.simulation, occupied.row
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
        simulations = [*self._idle, *(slot.simulation for slot in self._slots if slot is not None)]
        if self._shared is not None:
            simulations = [self._shared]
        self._slots, self._idle, self._shared = [None] * self.num_slots, [], None
        for simulation in simulations:
            simulation.close()


def _progress(slot: _Slot) -> float:
    simulation, row = slot.simulation, slot.row
    if simulation.task.milestones:
        return simulation.progress(row)
    cube, goal = simulation.position(row, "cube"), simulation.position(row, "goal")
    distances = np.linalg.norm([simulation.tool(row) - cube, cube - goal], axis=1)
    return float(np.exp(-distances / 0.1).mean())


def _by_simulation(slots: Sequence[_Slot], members: Sequence[int]) -> list[list[int]]:
    """Positions ``members`` of slots, those that share a simulation together."""
    groups: dict[int, list[int]] = {}
    for i in members:
        groups.setdefault(id(slots[i].simulation), []).append(i)
    return list(groups.values())
