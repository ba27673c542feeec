"""Fast control steps that equal robosuite's bit for bit.

A control step of the untouched environment costs 25 physics substeps, in each of which robosuite runs the whole
forward dynamics three times (before the controller, inside it, and in ``mj_step``) and looks everything up by name.
None of that changes the result: ``mj_step1`` (all that depends on position and velocity), the controller's torques,
``mj_step2`` (actuation, constraints, integration) is one pass over the same equations.

The torques are those of robosuite's operational-space controller (Khatib 1987, OSC_POSE with fixed gains). Its compiled
functions are called as they are, and every numpy product keeps its operand order and memory layout, because floating
point sums depend on both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np

SUBSTEPS = 25  # physics steps of 2 ms in one control step at 20 Hz
GRIPPER_SPEED = 0.01  # of robosuite's PandaGripper, a substep; -1 is open, 1 is closed


@dataclass(frozen=True, slots=True)
class RobotLayout:
    """Where the robot's numbers stand in the simulator's arrays, and its controller's constants."""

    model: Any  # mujoco.MjModel
    arm_qpos: np.ndarray  # int [7]
    arm_dofs: slice
    joints: np.ndarray  # int [9]: arm, then both fingers
    eef_site: int
    hand_body: int
    arm_actuators: np.ndarray  # int [7]
    torque_low: np.ndarray  # float64 [7]
    torque_high: np.ndarray  # float64 [7]
    finger_actuators: tuple[int, int]
    finger_bias: list[float]  # [2]
    finger_weight: list[float]  # [2]
    kp: tuple[np.ndarray, np.ndarray]  # float64 [3] each, for position and orientation
    kd: tuple[np.ndarray, np.ndarray]
    action_scale: np.ndarray  # float64 [6]: a full action moves the goal by this much, metres and radians

    @classmethod
    def of(cls, env: Any) -> RobotLayout:
        """Read from a robosuite environment with one Panda under OSC_POSE."""
        robot, model = env.robots[0], env.sim.model._model
        controller = robot.controller
        dofs = [int(i) for i in controller.qvel_index]
        fingers = tuple(int(i) for i in robot._ref_joint_gripper_actuator_indexes)
        ranges = model.actuator_ctrlrange[list(fingers)]
        low, high = robot.torque_limits
        plain = (
            controller.impedance_mode == "fixed"
            and controller.use_delta
            and controller.uncoupling
            and controller.interpolator_pos is None
            and controller.position_limits is None
            and controller.orientation_limits is None
            and dofs == list(range(dofs[0], dofs[0] + 7))
            and (controller.output_max == -controller.output_min).all()
            and (controller.input_max == 1).all()
            and (controller.input_min == -1).all()
        )
        if not plain or round(env.control_timestep / env.model_timestep) != SUBSTEPS:
            raise ValueError("the fast stepper knows robosuite's default OSC_POSE controller at 20 Hz only")
        return cls(
            model=model,
            arm_qpos=np.array(controller.qpos_index),
            arm_dofs=slice(dofs[0], dofs[0] + 7),
            joints=np.array([*controller.qpos_index, *robot._ref_gripper_joint_pos_indexes]),
            eef_site=int(env.sim.model.site_name2id(controller.eef_name)),
            hand_body=int(env.sim.model.body_name2id(robot.robot_model.eef_name)),
            arm_actuators=np.array(robot._ref_joint_actuator_indexes),
            torque_low=low.copy(),
            torque_high=high.copy(),
            finger_actuators=(fingers[0], fingers[1]),
            finger_bias=[float(x) for x in 0.5 * (ranges[:, 1] + ranges[:, 0])],
            finger_weight=[float(x) for x in 0.5 * (ranges[:, 1] - ranges[:, 0])],
            kp=(controller.kp[:3].copy(), controller.kp[3:].copy()),
            kd=(controller.kd[:3].copy(), controller.kd[3:].copy()),
            action_scale=abs(controller.output_max - controller.output_min) / 2.0,  # inputs reach from -1 to 1
        )


class ArmState:
    """The controller's memory of one slot, and views into the slot's simulator state.

    The views stay valid for the life of ``data``: MuJoCo never moves these arrays.
    """

    def __init__(self, robot: RobotLayout, data: Any) -> None:
        from robosuite.utils import control_utils

        self._torque_laws = control_utils
        self.robot = robot
        self.data = data
        self.qpos: np.ndarray = data.qpos
        self.qvel: np.ndarray = data.qvel
        self.eef_pos: np.ndarray = data.site_xpos[robot.eef_site]
        self.eef_quat: np.ndarray = data.xquat[robot.hand_body]
        self._eef_mat = data.site_xmat[robot.eef_site].reshape(3, 3)
        self._arm_qvel = data.qvel[robot.arm_dofs]
        self._bias = data.qfrc_bias[robot.arm_dofs]
        self._ctrl = data.ctrl
        nv = robot.model.nv
        self._jacp, self._jacr = np.zeros((3, nv)), np.zeros((3, nv))
        self._full_mass = np.zeros((nv, nv))
        self._wrench = np.zeros(6)

    def start(self, controller: Any) -> None:
        """Begin an episode as a controller that robosuite has just created.

        Such a controller has read the robot once, before objects and initial state were set, and believes this reading
        for one more substep; its first goal is relative to it. To be exact, so does this one.
        """
        self._goal_pos = np.array(controller.goal_pos)
        self._goal_ori = np.array(controller.goal_ori)
        self._home = np.array(controller.initial_joint)
        self._finger_command = (0.0, 0.0)
        self._pos = np.array(controller.ee_pos)
        self._mat = np.array(controller.ee_ori_mat)
        self._vel = np.array(controller.ee_pos_vel)
        self._rot_vel = np.array(controller.ee_ori_vel)
        self._joint_pos = np.array(controller.joint_pos)
        self._joint_vel = np.array(controller.joint_vel)
        self._jac_pos, self._jac_ori = np.array(controller.J_pos), np.array(controller.J_ori)
        self._jac = np.array(controller.J_full)
        self._mass = np.array(controller.mass_matrix)
        self._fresh = True

    def observe(self) -> None:
        """Read the robot's state after ``mj_step1``."""
        if self._fresh:
            self._fresh = False
            return
        robot, data = self.robot, self.data
        mujoco.mj_jacSite(robot.model, data, self._jacp, self._jacr, robot.eef_site)
        mujoco.mj_fullM(robot.model, self._full_mass, data.qM)
        dofs = robot.arm_dofs
        self._pos = self.eef_pos.copy()
        self._mat = self._eef_mat.copy()
        self._vel = np.dot(self._jacp, self.qvel)
        self._rot_vel = np.dot(self._jacr, self.qvel)
        self._joint_pos = self.qpos[robot.arm_qpos]
        self._joint_vel = self._arm_qvel.copy()
        # robosuite's index lists produce column-major arrays, and the compiled functions multiply by layout.
        self._jac_pos = np.array(self._jacp[:, dofs], order="F")
        self._jac_ori = np.array(self._jacr[:, dofs], order="F")
        jac = np.empty((6, 7), order="F")
        jac[:3], jac[3:] = self._jac_pos, self._jac_ori
        self._jac = jac
        self._mass = np.array(self._full_mass[dofs, dofs], order="F")

    def set_goal(self, arm_action: np.ndarray) -> None:
        """Move the goal relative to the pose last read: float64 [6], clipped to [-1, 1]."""
        import robosuite.utils.transform_utils as transforms

        delta = np.clip(arm_action, -1.0, 1.0) * self.robot.action_scale
        if any(delta[3:]):  # a zero rotation keeps the old goal, it does not hold the present orientation
            turn = transforms.quat2mat(transforms.axisangle2quat(delta[3:]))
            self._goal_ori = np.dot(turn, self._mat)
        self._goal_pos = self._pos + delta[:3]

    def act(self, finger_sign: float) -> None:
        """Write this substep's torques and finger targets into the simulator's controls."""
        robot, laws = self.robot, self._torque_laws
        error_ori = laws.orientation_error(self._goal_ori, self._mat)
        force = (self._goal_pos - self._pos) * robot.kp[0] + -self._vel * robot.kd[0]
        torque = error_ori * robot.kp[1] + -self._rot_vel * robot.kd[1]
        _, mass_pos, mass_ori, null = laws.opspace_matrices(self._mass, self._jac, self._jac_pos, self._jac_ori)
        wrench = self._wrench
        wrench[:3] = np.dot(mass_pos, force)
        wrench[3:] = np.dot(mass_ori, torque)
        torques = np.dot(self._jac.T, wrench) + self._bias
        torques += laws.nullspace_torques(self._mass, null, self._home, self._joint_pos, self._joint_vel)
        np.minimum(np.maximum(torques, robot.torque_low, out=torques), robot.torque_high, out=torques)
        self._ctrl[robot.arm_actuators] = torques
        left, right = self._finger_command
        left = min(max(left - GRIPPER_SPEED * finger_sign, -1.0), 1.0)
        right = min(max(right + GRIPPER_SPEED * finger_sign, -1.0), 1.0)
        self._finger_command = left, right
        one, two = robot.finger_actuators
        self._ctrl[one] = robot.finger_bias[0] + robot.finger_weight[0] * left
        self._ctrl[two] = robot.finger_bias[1] + robot.finger_weight[1] * right


class Snapshot:
    """The moment that an observation shows.

    LIBERO samples its observables in one substep of each control step, after ``mj_step``: poses and pixels then still
    belong to the positions before the integration, joint readings to those after it.
    """

    def __init__(self, arm: ArmState) -> None:
        self._arm = arm
        self.qpos = arm.qpos.copy()  # float64 [nq], which all poses and pixels derive from
        self.eef_pos = arm.eef_pos.copy()  # float64 [3]
        self.eef_quat = arm.eef_quat.copy()  # float64 [4], w first
        self.joints = arm.qpos[arm.robot.joints]  # float64 [9], arm and fingers

    def read_poses(self) -> None:
        """To be called before the integration."""
        self.qpos[:] = self._arm.qpos
        self.eef_pos[:] = self._arm.eef_pos
        self.eef_quat[:] = self._arm.eef_quat

    def read_joints(self) -> None:
        """To be called after the integration."""
        self.joints[:] = self._arm.qpos[self._arm.robot.joints]


def control_step(arm: ArmState, action: np.ndarray, snapshot: Snapshot, snapshot_at: int) -> None:
    """One control step of 25 substeps.

    ``action`` is float64 [7] in robosuite's convention: goal displacement in [-1, 1], gripper -1 open .. 1 closed (only
    its sign counts). The snapshot is taken in substep ``snapshot_at`` (1..25).
    """
    model, data = arm.robot.model, arm.data
    sign = float(np.sign(action[6]))
    for substep in range(1, SUBSTEPS + 1):
        mujoco.mj_step1(model, data)
        arm.observe()
        if substep == 1:
            arm.set_goal(action[:6])
        arm.act(sign)
        if substep == snapshot_at:
            snapshot.read_poses()
            mujoco.mj_step2(model, data)
            snapshot.read_joints()
        else:
            mujoco.mj_step2(model, data)
