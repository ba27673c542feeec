"""Fast control steps that equal robosuite's bit for bit.

A control step consists of 25 physics substeps. In each, robosuite runs the whole forward dynamics three times (before
the controller, inside it, and in ``mj_step``) and looks everything up by name. One pass over the same equations gives
the same result: ``mj_step1`` (what depends on position and velocity), the controller's torques, and ``mj_step2``
(actuation, constraints, integration).

``osc_kernel`` computes the torques of robosuite's operational-space controller (Khatib 1987, OSC_POSE, fixed gains).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from envs.libero.fast.osc_kernel import Moment, Robot

SUBSTEPS = 25  # physics steps of 2 ms in one control step at 20 Hz
GRIPPER_SPEED = 0.01  # of robosuite's PandaGripper, a substep; -1 is open, 1 is closed


class RobotLayout:
    """One Panda under OSC_POSE in a compiled model: the kernel's constants and what setting a goal needs.

    Raises ValueError if the environment has another controller.
    """

    def __init__(self, env: Any) -> None:
        from envs.libero.fast.osc_kernel import Robot

        robot, self.model = env.robots[0], env.sim.model._model
        controller = robot.controller
        _check_controller(env)
        fingers = np.array([int(i) for i in robot._ref_joint_gripper_actuator_indexes])
        ranges = self.model.actuator_ctrlrange[fingers]
        low, high = robot.torque_limits
        self.arm_qpos = np.array(controller.qpos_index, dtype=np.int64)
        self.joints = np.array([*controller.qpos_index, *robot._ref_gripper_joint_pos_indexes], dtype=np.int64)
        self.hand_body = int(env.sim.model.body_name2id(robot.robot_model.eef_name))
        # Inputs reach from -1 to 1; a full action moves the goal by this much: float64 [6], metres and radians.
        self.action_scale = abs(controller.output_max - controller.output_min) / 2.0
        self.constants: Robot = Robot(
            site=int(env.sim.model.site_name2id(controller.eef_name)),
            first_dof=int(controller.qvel_index[0]),
            arm_qpos=self.arm_qpos,
            joints=self.joints,
            dofs=np.array([*controller.qvel_index, *robot._ref_gripper_joint_vel_indexes], dtype=np.int64),
            arm_actuators=np.array(robot._ref_joint_actuator_indexes, dtype=np.int64),
            torque_low=low.copy(),
            torque_high=high.copy(),
            finger_actuators=fingers,
            finger_bias=0.5 * (ranges[:, 1] + ranges[:, 0]),
            finger_weight=0.5 * (ranges[:, 1] - ranges[:, 0]),
            finger_speed=GRIPPER_SPEED,
            kp_pos=controller.kp[:3].copy(),
            kp_ori=controller.kp[3:].copy(),
            kd_pos=controller.kd[:3].copy(),
            kd_ori=controller.kd[3:].copy(),
        )


def _check_controller(env: Any) -> None:
    controller = env.robots[0].controller
    dofs = [int(i) for i in controller.qvel_index]
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


class ArmState:
    """One environment's controller state, and views into its simulator state.

    The views stay valid as long as ``data`` lives: MuJoCo never moves these arrays.
    """

    def __init__(self, robot: RobotLayout, data: Any) -> None:
        from envs.libero.fast.osc_kernel import Controller, Simulator

        model, site = robot.model, robot.constants.site
        self.robot = robot
        self.data = data  # keeps the simulator's memory alive
        self.sim = Simulator(
            model=model._address,
            data=data._address,
            mass=data.qM.ctypes.data,
            qpos=data.qpos,
            qvel=data.qvel,
            bias=data.qfrc_bias,
            ctrl=data.ctrl,
            eef_pos=data.site_xpos[site],
            eef_mat=data.site_xmat[site],
            eef_quat=data.xquat[robot.hand_body],
            jacp=np.zeros((3, model.nv)),
            jacr=np.zeros((3, model.nv)),
            full_mass=np.zeros((model.nv, model.nv)),
        )
        self.controller = Controller.empty()
        self.fresh = False

    def start(self, controller: Any) -> None:
        """Begin an episode with the memory of a controller that robosuite has just created.

        Such a controller has read the robot once, before objects and initial state were set. It uses this reading for
        one more substep, and its first goal is relative to it; to be exact, this one does the same.
        """
        memory = self.controller
        memory.goal_pos[:], memory.goal_mat[:] = controller.goal_pos, controller.goal_ori
        memory.home[:] = controller.initial_joint
        memory.fingers[:] = 0.0
        memory.pos[:], memory.mat[:] = controller.ee_pos, controller.ee_ori_mat
        memory.vel[:], memory.rot_vel[:] = controller.ee_pos_vel, controller.ee_ori_vel
        memory.joint_pos[:], memory.joint_vel[:] = controller.joint_pos, controller.joint_vel
        memory.jac_pos[:], memory.jac_ori[:] = controller.J_pos, controller.J_ori
        memory.jac[:], memory.mass[:] = controller.J_full, controller.mass_matrix
        self.fresh = True

    def set_goal(self, arm_action: np.ndarray) -> None:
        """Set the goal relative to the pose that was read last; float64 [6], clipped to [-1, 1]."""
        import robosuite.utils.transform_utils as transforms

        memory = self.controller
        delta = np.clip(arm_action, -1.0, 1.0) * self.robot.action_scale
        if any(delta[3:]):  # a zero rotation keeps the old goal; it does not hold the present orientation
            turn = transforms.quat2mat(transforms.axisangle2quat(delta[3:]))
            memory.goal_mat[:] = np.dot(turn, memory.mat)
        memory.goal_pos[:] = memory.pos + delta[:3]


def read_moment(arm: ArmState) -> Moment:
    """The present moment, as a copy. ``control_step`` keeps it up to date as LIBERO's observables would.

    LIBERO samples its observables in one substep of each control step, after ``mj_step``: poses and pixels then still
    belong to the positions before the integration, joint readings to those after it.
    """
    from envs.libero.fast.osc_kernel import Moment

    sim, robot = arm.sim, arm.robot.constants
    poses = sim.qpos.copy(), sim.eef_pos.copy(), sim.eef_quat.copy()
    return Moment(*poses, sim.qpos[robot.joints], sim.qvel[robot.dofs])


def control_step(arm: ArmState, action: np.ndarray, seen: Moment, seen_at: int) -> None:
    """One control step of 25 substeps.

    ``action`` is float64 [7] in robosuite's convention: goal displacement in [-1, 1], gripper -1 open .. 1 closed (only
    its sign counts). ``seen`` is overwritten in substep ``seen_at`` (1..25).
    """
    from envs.libero.fast.osc_kernel import begin, finish

    constants, sim, memory = arm.robot.constants, arm.sim, arm.controller
    begin(constants, sim, memory, not arm.fresh)
    arm.fresh = False
    arm.set_goal(action[:6])
    finish(constants, sim, memory, seen, float(np.sign(action[6])), SUBSTEPS, seen_at)
