"""A scripted expert with privileged state for the cube tasks: it steers the end effector from the present state.

It keeps no plan, so it recovers when noise or a collision moves things. The fingers always point straight down; a cube
that is not aligned with them turns as they close.
"""

from collections.abc import Callable

import numpy as np

from envs.base import EnvError
from envs.maniskill.simulation import Simulation

_FULL_MOVE = 0.1  # metres, or radians, of a full action
_GAIN = 1.5  # of displacement over error: in one step the arm comes about two thirds of the way it is sent
_UPRIGHT_GAIN = 0.5
_OPEN, _CLOSED = 1.0, 0.0
_CUBE = 0.04  # metres
_CRUISE = 0.1  # height above the table at which the hand flies over cubes
_LOW = 0.02  # height of the finger tips at work, half a cube

Aim = tuple[np.ndarray, float]  # where the end effector should be, float64 [3], and the gripper


def expert_action(simulation: Simulation, row: int) -> np.ndarray:
    """float32 [7], gripper 0 = closed .. 1 = open, for the row's present state.

    Raises EnvError if it does not know the task.
    """
    aim = _AIMS.get(simulation.task.uid)
    if aim is None:
        raise EnvError(f"no scripted expert for {simulation.task}: there is one for {', '.join(_AIMS)}")
    tool = simulation.tool(row)
    target, gripper = aim(simulation, row, tool)
    action = np.zeros(7)
    action[:3] = (target - tool) * (_GAIN / _FULL_MOVE)
    action[3:5] = simulation.proprio(row)[3:5] * (_UPRIGHT_GAIN / _FULL_MOVE)  # ManiSkill turns by minus the action
    action[:6] = action[:6].clip(-1, 1)
    action[6] = gripper
    return action.astype(np.float32)


def _push(simulation: Simulation, row: int, tool: np.ndarray) -> Aim:
    """Lower closed fingers behind the cube, then move forward, towards the goal."""
    cube = simulation.position(row, "cube")
    behind = cube[0] - tool[0] > _CUBE / 2 + 0.01
    if behind and abs(tool[1] - cube[1]) < 0.015 and tool[2] < _LOW + 0.02:
        return np.array([tool[0] + 0.06, cube[1], _LOW]), _CLOSED
    return _fly(tool, np.array([cube[0] - 0.07, cube[1], _LOW]), 0.02), _CLOSED


def _pick(simulation: Simulation, row: int, tool: np.ndarray) -> Aim:
    cube = simulation.position(row, "cube")
    if not _held(simulation, row, tool, cube):
        return _grasp(tool, cube)
    return tool + simulation.position(row, "goal") - cube, _CLOSED


def _stack(simulation: Simulation, row: int, tool: np.ndarray) -> Aim:
    """Lift the cube, carry it above the other, lower it, let go."""
    cube = simulation.position(row, "cube")
    place = simulation.position(row, "goal") + np.array([0, 0, _CUBE])
    offset = place - cube
    level, above = np.abs(offset[2]) < 0.006, np.linalg.norm(offset[:2])
    if level and above < 0.01:
        return tool, _OPEN
    if not _held(simulation, row, tool, cube):
        return _grasp(tool, cube)
    if above > 0.01:
        clear = place[2] + 0.02 - cube[2]
        offset = np.array([*(offset[:2] if clear < 0.02 else (0, 0)), clear])
    return tool + offset, _CLOSED


_AIMS: dict[str, Callable[[Simulation, int, np.ndarray], Aim]] = {
    "PushCube-v1": _push,
    "PickCube-v1": _pick,
    "StackCube-v1": _stack,
}


def _held(simulation: Simulation, row: int, tool: np.ndarray, cube: np.ndarray) -> bool:
    return float(np.linalg.norm(cube - tool)) < 0.03 and simulation.grasping(row, "cube")


def _grasp(tool: np.ndarray, cube: np.ndarray) -> Aim:
    """Move above the cube, then down, and close the fingers around it."""
    offset = cube - tool
    if np.linalg.norm(offset[:2]) < 0.012 and abs(offset[2]) < 0.01:
        return cube, _CLOSED
    return _fly(tool, cube, 0.012), _OPEN


def _fly(tool: np.ndarray, target: np.ndarray, precision: float) -> np.ndarray:
    """The next point on the way: up, across at cruising height, down on the target."""
    away = np.linalg.norm(target[:2] - tool[:2])
    if away < precision:
        return target
    height = target[2] + _CRUISE - _LOW
    if tool[2] < height - 0.04 and away > 0.03:
        return np.array([*tool[:2], height])
    return np.array([*target[:2], height if away > 0.03 else min(tool[2], height)])
