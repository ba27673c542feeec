"""robosuite's operational-space controller around MuJoCo's two half steps, compiled: no Python between substeps.

Import it after ``bootstrap.import_libero``, which decides where robosuite keeps its files.

Floating point sums depend on operand order, memory layout and the BLAS kernel. So this module calls robosuite's own
compiled functions, every product keeps its order and layout, and the tests compare with the reference environment bit
for bit. MuJoCo's functions are called by address, without its Python bindings: an error inside MuJoCo, such as an
overflow of its memory arena, ends the process instead of raising.
"""

from typing import Any, NamedTuple, Self

import mujoco
import numpy as np
from llvmlite import binding
from numba import njit, types
from robosuite.utils.control_utils import nullspace_torques, opspace_matrices, orientation_error

_P, _I = types.intp, types.int32  # pointers travel as integers
binding.load_library_permanently(mujoco._functions.__file__)  # loads libmujoco into the linker's view, too
_mj_step1: Any = types.ExternalFunction("mj_step1", types.void(_P, _P))
_mj_step2: Any = types.ExternalFunction("mj_step2", types.void(_P, _P))
_mj_jac_site: Any = types.ExternalFunction("mj_jacSite", types.void(_P, _P, _P, _P, _I))
_mj_full_m: Any = types.ExternalFunction("mj_fullM", types.void(_P, _P, _P))


class Robot(NamedTuple):
    """Indices of the robot's numbers in the simulator's arrays, and its controller's constants."""

    site: int
    first_dof: int  # of the arm's seven
    arm_qpos: np.ndarray  # int64 [7]
    joints: np.ndarray  # int64 [9]: arm, then both fingers
    dofs: np.ndarray  # int64 [9], of the same joints' velocities
    arm_actuators: np.ndarray  # int64 [7]
    torque_low: np.ndarray  # float64 [7]
    torque_high: np.ndarray  # float64 [7]
    finger_actuators: np.ndarray  # int64 [2]
    finger_bias: np.ndarray  # float64 [2]
    finger_weight: np.ndarray  # float64 [2]
    finger_speed: float  # change of a finger's command in one substep
    kp_pos: np.ndarray  # float64 [3]
    kp_ori: np.ndarray  # float64 [3]
    kd_pos: np.ndarray  # float64 [3]
    kd_ori: np.ndarray  # float64 [3]


class Simulator(NamedTuple):
    """MuJoCo's structures and views into them."""

    model: int  # address
    data: int  # address
    mass: int  # address of the sparse mass matrix
    qpos: np.ndarray  # float64 [nq]
    qvel: np.ndarray  # float64 [nv]
    bias: np.ndarray  # float64 [nv], Coriolis, centrifugal and gravity forces
    ctrl: np.ndarray  # float64 [nu]
    eef_pos: np.ndarray  # float64 [3]
    eef_mat: np.ndarray  # float64 [9]
    eef_quat: np.ndarray  # float64 [4]
    jacp: np.ndarray  # float64 [3, nv], scratch
    jacr: np.ndarray  # float64 [3, nv], scratch
    full_mass: np.ndarray  # float64 [nv, nv], scratch


class Controller(NamedTuple):
    """The controller's memory: its goal, and its last reading of the robot.

    Matrices of the arm's joints are column-major, as robosuite's index lists make them.
    """

    goal_pos: np.ndarray  # float64 [3]
    goal_mat: np.ndarray  # float64 [3, 3]
    home: np.ndarray  # float64 [7]
    fingers: np.ndarray  # float64 [2], commands in [-1, 1]
    pos: np.ndarray  # float64 [3]
    mat: np.ndarray  # float64 [3, 3]
    vel: np.ndarray  # float64 [3]
    rot_vel: np.ndarray  # float64 [3]
    joint_pos: np.ndarray  # float64 [7]
    joint_vel: np.ndarray  # float64 [7]
    jac_pos: np.ndarray  # float64 [3, 7]
    jac_ori: np.ndarray  # float64 [3, 7]
    jac: np.ndarray  # float64 [6, 7]
    mass: np.ndarray  # float64 [7, 7]

    @classmethod
    def empty(cls) -> Self:
        vectors = (3, (3, 3), 7, 2, 3, (3, 3), 3, 3, 7, 7)
        matrices = ((3, 7), (3, 7), (6, 7), (7, 7))
        return cls(*(np.zeros(shape) for shape in vectors), *(np.zeros(shape, order="F") for shape in matrices))


class Moment(NamedTuple):
    """What an observation shows; see ``stepping.read_moment``."""

    qpos: np.ndarray  # float64 [nq], from which all poses and pixels derive
    eef_pos: np.ndarray  # float64 [3]
    eef_quat: np.ndarray  # float64 [4], w first
    joints: np.ndarray  # float64 [9], arm and fingers
    speeds: np.ndarray  # float64 [9], of these joints


@njit(cache=True, nogil=True)
def begin(robot: Robot, sim: Simulator, arm: Controller, read: bool) -> None:
    """The first half of a control step's first substep; the goal is set after it.

    Without ``read`` the controller keeps its last reading.
    """
    _mj_step1(sim.model, sim.data)
    if read:
        _observe(robot, sim, arm)


@njit(cache=True, nogil=True)
def finish(
    robot: Robot, sim: Simulator, arm: Controller, seen: Moment, finger_sign: float, substeps: int, seen_at: int
) -> None:
    """The rest of a control step: torques and second half of the first substep, then the other substeps.

    ``seen`` is filled in substep ``seen_at`` (from 1): poses before its integration, joints after it.
    """
    for substep in range(1, substeps + 1):
        if substep > 1:
            _mj_step1(sim.model, sim.data)
            _observe(robot, sim, arm)
        _act(robot, sim, arm, finger_sign)
        if substep == seen_at:
            seen.qpos[:] = sim.qpos
            seen.eef_pos[:] = sim.eef_pos
            seen.eef_quat[:] = sim.eef_quat
        _mj_step2(sim.model, sim.data)
        if substep == seen_at:
            for i in range(len(robot.joints)):
                seen.joints[i] = sim.qpos[robot.joints[i]]
                seen.speeds[i] = sim.qvel[robot.dofs[i]]


@njit(cache=True, nogil=True)
def _observe(robot: Robot, sim: Simulator, arm: Controller) -> None:
    """Read the robot's state after ``mj_step1``."""
    _mj_jac_site(sim.model, sim.data, sim.jacp.ctypes.data, sim.jacr.ctypes.data, robot.site)
    _mj_full_m(sim.model, sim.full_mass.ctypes.data, sim.mass)
    arm.pos[:] = sim.eef_pos
    for i in range(9):
        arm.mat[i // 3, i % 3] = sim.eef_mat[i]
    arm.vel[:] = np.dot(sim.jacp, sim.qvel)
    arm.rot_vel[:] = np.dot(sim.jacr, sim.qvel)
    for joint in range(7):
        dof = robot.first_dof + joint
        arm.joint_pos[joint] = sim.qpos[robot.arm_qpos[joint]]
        arm.joint_vel[joint] = sim.qvel[dof]
        for axis in range(3):
            arm.jac_pos[axis, joint] = arm.jac[axis, joint] = sim.jacp[axis, dof]
            arm.jac_ori[axis, joint] = arm.jac[3 + axis, joint] = sim.jacr[axis, dof]
        for other in range(7):
            arm.mass[joint, other] = sim.full_mass[dof, robot.first_dof + other]


@njit(cache=True, nogil=True)
def _act(robot: Robot, sim: Simulator, arm: Controller, finger_sign: float) -> None:
    """Write this substep's torques and finger targets into the simulator's controls."""
    error = orientation_error(arm.goal_mat, arm.mat)
    force = (arm.goal_pos - arm.pos) * robot.kp_pos + -arm.vel * robot.kd_pos
    torque = error * robot.kp_ori + -arm.rot_vel * robot.kd_ori
    _, mass_pos, mass_ori, null = opspace_matrices(arm.mass, arm.jac, arm.jac_pos, arm.jac_ori)
    wrench = np.empty(6)
    wrench[:3] = np.dot(mass_pos, force)
    wrench[3:] = np.dot(mass_ori, torque)
    torques = np.dot(arm.jac.T, wrench) + sim.bias[robot.first_dof : robot.first_dof + 7]
    torques += nullspace_torques(arm.mass, null, arm.home, arm.joint_pos, arm.joint_vel)
    for joint in range(7):
        bounded = min(max(torques[joint], robot.torque_low[joint]), robot.torque_high[joint])
        sim.ctrl[robot.arm_actuators[joint]] = bounded
    for finger in range(2):
        step = robot.finger_speed * finger_sign
        moved = arm.fingers[finger] - step if finger == 0 else arm.fingers[finger] + step
        arm.fingers[finger] = min(max(moved, -1.0), 1.0)
        target = robot.finger_bias[finger] + robot.finger_weight[finger] * arm.fingers[finger]
        sim.ctrl[robot.finger_actuators[finger]] = target
