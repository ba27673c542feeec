"""A scripted expert with privileged state, for goals of the form "on" and "in": pick an object up, put it down.

It is closed-loop: every action derives from the present state. So it recovers when noise or a collision moves things,
and it plans again when a grasp fails, or when somebody else has acted. It cannot open drawers, close doors or turn
knobs.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np

from envs.base import EnvError
from envs.libero.expert.grasping import (
    PALM_ABOVE_SITE,
    TIP_BELOW_SITE,
    Grasp,
    HeightMap,
    clear_robot,
    closing_axis,
    find_grasp,
    grasp_at,
)
from envs.libero.fast.task_model import SimState, TaskModel

_FULL_MOVE = 0.05  # metres by which a full action moves the controller's goal
_FULL_TURN = 0.5  # radians
_GAIN = 2.0  # of displacement over error; the controller's damping ratio becomes 1 / sqrt(gain)
_PATIENCE = 0.03  # metres: within this distance, errors that persist are pushed against
_TILT_TOLERANCE = 0.1  # radians of orientation error that are not corrected: most demonstrations then never turn
_CLEARANCE = 0.03  # metres between the carried object and what it passes over
_SPOT = 0.02  # radius around the destination, in metres, that counts as the object's support
_AWAY = np.array([0.0, 0.0, -5.0])  # metres, where no ray from above meets a held object
_MAX_ATTEMPTS = 3  # to find a grasp
_OPEN, _CLOSED = 1.0, 0.0


Phase = Generator[np.ndarray, None, bool]  # yields actions, returns whether the next phase can follow


@dataclass(frozen=True, slots=True)
class _Goal:
    predicate: tuple[str, str, str]  # as LIBERO evaluates it
    thing: str
    target: str


class Expert:
    """The expert of one episode. Ask for one action per control step.

    After steps for which it was not asked it begins anew, from where the gripper is then and what it holds. If the
    fingers fit where they are, it grasps there: from one place to the next it would first have to rise.

    Raises EnvError if it has no plan for the task's goal.
    """

    def __init__(self, model: TaskModel, state: SimState) -> None:
        self._model, self._state = model, state
        self._env, self._data = model.env, state.data
        self._goals = _goals(model)
        self._eef_mat = state.data.site_xmat[model.robot.constants.site].reshape(3, 3)
        self._push = np.zeros(3)
        self._script = self._solve()
        self._asked = state.data.time  # seconds, at the last action or, before the first, at the beginning

    def action(self) -> np.ndarray:
        """float32 [7] in OpenVLA's convention, for the present state.

        Raises EnvError if the target is closed from above, or if the fingers have fitted nowhere for a while.
        """
        self._model.bind(self._state)
        if self._data.time - self._asked > 1.5 * self._env.control_timestep:
            self._script, self._push = self._solve(resumes=True), np.zeros(3)
        self._asked = self._data.time
        return next(self._script)

    def _solve(self, *, resumes: bool = False) -> Iterator[np.ndarray]:
        """``resumes``: after others have acted, so that the gripper may be near a grasp already."""
        for goal in self._goals:
            self._check_open(goal)
        attempts = 0
        while True:
            goal = next((g for g in self._goals if not self._env._eval_predicate(list(g.predicate))), self._goals[-1])
            heights = self._look(goal)
            if self._model.holds(self._state, goal.thing):
                grasp = Grasp(self._eef.copy(), self._yaw, 0.0)
            else:
                try:
                    grasp = self._plan_grasp(goal, resumes)
                except EnvError as error:
                    attempts += 1
                    if attempts > _MAX_ATTEMPTS:
                        raise EnvError(f"no scripted expert for {self._model.task}, {goal.thing}: {error}") from error
                    yield from self._rise(0.0)  # an object that was just dropped may still come to rest
                    continue
                yield from self._reach(grasp, heights)
                yield from self._close_fingers(grasp)
            resumes = False
            held = self._is_above(goal, heights) or (yield from self._lift(goal, grasp, heights))
            if held:
                yield from self._carry(goal, grasp, heights)
                yield from self._lower(goal, grasp, heights)
            yield from self._release(grasp)

    def _reach(self, grasp: Grasp, heights: HeightMap) -> Iterator[np.ndarray]:
        """Move above the grasp, then descend with open fingers."""
        obstacle = heights.highest_in_corridor(self._eef, grasp.position, 0.08)
        travel = max(obstacle + TIP_BELOW_SITE + _CLEARANCE, grasp.position[2] + 0.04)
        above = np.array([*grasp.position[:2], travel])
        for _ in range(80):
            if np.linalg.norm(above[:2] - self._eef[:2]) < 0.01 and self._turned(grasp.yaw) < 0.12:
                break
            yield self._move(above, grasp.yaw, _OPEN)
        for _ in range(30):
            if self._eef[2] - grasp.position[2] < 0.006:
                break
            yield self._move(grasp.position, grasp.yaw, _OPEN)

    def _close_fingers(self, grasp: Grasp) -> Iterator[np.ndarray]:
        for step in range(14):
            width = self._width
            yield self._move(grasp.position, grasp.yaw, _CLOSED)
            if step >= 3 and width - self._width < 0.001:
                break

    def _lift(self, goal: _Goal, grasp: Grasp, heights: HeightMap) -> Phase:
        """Rise until the held object clears everything on its way; returns whether an object is held."""
        start = self._position(goal.thing)[2]
        for _ in range(40):
            rise = self._cruise(goal, heights) - self._lowest(goal.thing)
            if rise < 0.01:
                break
            yield self._move(self._eef + np.array([0, 0, rise]), grasp.yaw, _CLOSED, anchor=grasp.position[:2])
            if self._eef[2] - grasp.position[2] > 0.04 and self._position(goal.thing)[2] - start < 0.015:
                return False
        return True

    def _carry(self, goal: _Goal, grasp: Grasp, heights: HeightMap) -> Iterator[np.ndarray]:
        for _ in range(80):
            offset = self._destination(goal) - self._position(goal.thing)[:2]
            if np.linalg.norm(offset) < 0.01 or not self._holds(goal):
                break
            rise = self._cruise(goal, heights) - self._lowest(goal.thing)
            yield self._move(self._eef + np.array([*offset, rise]), grasp.yaw, _CLOSED)

    def _lower(self, goal: _Goal, grasp: Grasp, heights: HeightMap) -> Iterator[np.ndarray]:
        support = heights.highest(self._destination(goal), _SPOT)
        for _ in range(40):
            offset = self._destination(goal) - self._position(goal.thing)[:2]
            rim = heights.highest_under_palm(self._eef, grasp.yaw) - PALM_ABOVE_SITE + 0.01
            sink = min(self._lowest(goal.thing) - support - 0.006, self._eef[2] - rim)
            if sink < 0.004 or not self._holds(goal):
                break
            yield self._move(self._eef + np.array([*offset, -sink]), grasp.yaw, _CLOSED)

    def _release(self, grasp: Grasp) -> Iterator[np.ndarray]:
        place = self._eef.copy()
        for _ in range(8):
            if self._width > 0.07:
                break
            yield self._move(place, grasp.yaw, _OPEN)
        yield from self._rise(grasp.yaw)

    def _rise(self, yaw: float) -> Iterator[np.ndarray]:
        place = self._eef + np.array([0, 0, 0.1])
        for _ in range(8):
            yield self._move(place, yaw, _OPEN)

    def _move(self, position: np.ndarray, yaw: float, gripper: float, anchor: np.ndarray | None = None) -> np.ndarray:
        """The action towards a position of the grip site, fingers pointing down; ``anchor`` overrides its x and y."""
        target = position if anchor is None else np.array([*anchor, position[2]])
        action = np.zeros(7)
        error = target - self._eef
        # If the arm is stretched, the controller's pull on orientation and posture would hold it back forever.
        near = np.linalg.norm(error) < _PATIENCE
        self._push = (0.9 * self._push + 0.3 * error).clip(-_FULL_MOVE, _FULL_MOVE) if near else np.zeros(3)
        action[:3] = (error * _GAIN + self._push) / _FULL_MOVE
        turn = _rotation_vector(_pointing_down(yaw) @ self._eef_mat.T)
        if np.linalg.norm(turn) > _TILT_TOLERANCE:
            action[3:6] = turn / _FULL_TURN
        action[:6] = action[:6].clip(-1, 1)
        action[6] = gripper
        return action.astype(np.float32)

    def _turned(self, yaw: float) -> float:
        """Radians between the present and the wanted orientation."""
        return float(np.linalg.norm(_rotation_vector(_pointing_down(yaw) @ self._eef_mat.T)))

    @property
    def _eef(self) -> np.ndarray:
        return self._state.arm.sim.eef_pos

    @property
    def _yaw(self) -> float:
        """Radians, as ``Grasp.yaw``: that of the fingers as they are."""
        across = self._eef_mat[:, 0]
        return float(np.arctan2(-across[0], across[1]))

    @property
    def _width(self) -> float:
        """Metres between the fingers, 0..0.08."""
        left, right = self._state.arm.sim.qpos[self._model.robot.joints[7:]]
        return float(abs(left) + abs(right))

    def _position(self, thing: str) -> np.ndarray:
        """float64 [3]: where LIBERO's predicates see an object."""
        return self._data.xpos[self._env.obj_body_id[thing]]

    def _is_above(self, goal: _Goal, heights: HeightMap) -> bool:
        """Whether the held object only has to be lowered."""
        place = self._destination(goal)
        room = self._lowest(goal.thing) - heights.highest(place, _SPOT)
        is_there = np.linalg.norm(place - self._position(goal.thing)[:2]) < _SPOT and room > 0.01
        return bool(is_there) and self._model.holds(self._state, goal.thing)

    def _holds(self, goal: _Goal) -> bool:
        return self._width > 0.002 and bool(np.linalg.norm(self._position(goal.thing) - self._eef) < 0.2)

    def _destination(self, goal: _Goal) -> np.ndarray:
        """float64 [2]: where the object's position has to be."""
        if goal.target in self._env.object_sites_dict:
            return self._env.sim.data.get_site_xpos(goal.target)[:2]
        return self._position(goal.target)[:2]

    def _lowest(self, thing: str) -> float:
        """Height of an object's lowest point, by the bounding boxes of its collision shapes."""
        return _lowest_point(self._model.model, self._data, self._env.get_object(thing).contact_geoms)

    def _look(self, goal: _Goal) -> HeightMap:
        """Heights along the way, without the robot and what it holds."""
        here, there = self._position(goal.thing), self._destination(goal)
        middle = np.array([*(here[:2] + there) / 2, here[2]])
        reach = np.abs(here[:2] - there).max() / 2 + 0.2
        return HeightMap(self._model.model, self._posed(), middle, float(reach), 0.01)

    def _plan_grasp(self, goal: _Goal, resumes: bool) -> Grasp:
        model, body = self._model.model, self._env.obj_body_id[goal.thing]
        centre = self._data.subtree_com[body].copy()
        near, root = HeightMap(model, self._posed(), centre, 0.17, 0.004), int(model.body_rootid[body])
        here = grasp_at(near, root, centre, self._eef[:2].copy(), self._yaw) if resumes else None
        return here or find_grasp(near, root, centre)

    def _posed(self) -> Any:
        scratch, qpos = self._model.scratch, self._data.qpos.copy()
        for thing in {goal.thing for goal in self._goals}:
            if self._model.holds(self._state, thing):
                joint = self._model.model.joint(self._env.get_object(thing).joints[0])
                qpos[int(joint.qposadr[0]) : int(joint.qposadr[0]) + 3] += _AWAY
        clear_robot(self._model.model, scratch, qpos, self._model.robot.arm_qpos)
        return scratch

    def _check_open(self, goal: _Goal) -> None:
        """Raise EnvError if the target is the inside of something that has to be opened first."""
        site = self._env.object_sites_dict.get(goal.target)
        if goal.predicate[0] != "in" or site is None or site.parent_name is None:
            return
        data, place, heights = self._env.sim.data, self._destination(goal), self._look(goal)
        top = data.get_site_xpos(goal.target)[2] + (np.abs(data.get_site_xmat(goal.target)) @ site.size)[2]
        parent = self._model.model.body_rootid[self._env.obj_body_id[site.parent_name]]
        if heights.at(place)[1] == parent and heights.highest(place, _SPOT) > top - 0.005:
            raise EnvError(f"no scripted expert for {self._model.task}: {goal.target} is closed from above")

    def _cruise(self, goal: _Goal, heights: HeightMap) -> float:
        """The height at which the lowest point of the carried object clears everything on its way."""
        return heights.highest_in_corridor(self._position(goal.thing), self._destination(goal), 0.08) + _CLEARANCE


def _goals(model: TaskModel) -> list[_Goal]:
    env = model.env
    found = []
    for state in env.parsed_problem["goal_state"]:
        if state[0] not in ("on", "in") or state[1] not in env.objects_dict:
            raise EnvError(
                f"no scripted expert for {model.task} ({model.task.instruction!r}): it can pick and place, "
                f"not reach ({' '.join(state)}); take demonstrations from files, or another task"
            )
        found.append(_Goal((state[0], state[1], state[2]), state[1], state[2]))
    moved = {goal.thing for goal in found}
    return sorted(found, key=lambda goal: goal.target in moved)  # objects that others are put on come first


def _lowest_point(model: Any, data: Any, geoms: list[str]) -> float:
    ids = [model.geom(name).id for name in geoms]
    matrices = data.geom_xmat[ids].reshape(-1, 3, 3)
    centre = data.geom_xpos[ids, 2] + np.einsum("nj,nj->n", matrices[:, 2], model.geom_aabb[ids, :3])
    return float((centre - np.einsum("nj,nj->n", np.abs(matrices[:, 2]), model.geom_aabb[ids, 3:])).min())


def _pointing_down(yaw: float) -> np.ndarray:
    """float64 [3, 3]: the grip site's orientation with fingers straight down."""
    axis, down = np.array([*closing_axis(yaw), 0.0]), np.array([0.0, 0.0, -1.0])
    return np.stack([axis, np.cross(down, axis), down], axis=1)


def _rotation_vector(matrix: np.ndarray) -> np.ndarray:
    """float64 [3]: axis times angle of a rotation matrix."""
    quaternion, vector = np.zeros(4), np.zeros(3)
    mujoco.mju_mat2Quat(quaternion, np.ascontiguousarray(matrix).reshape(9))
    mujoco.mju_quat2Vel(vector, quaternion, 1.0)
    return vector
