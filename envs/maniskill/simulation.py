"""One ManiSkill environment as rows that are reset, stepped and drawn separately.

On physx_cpu it has one row. On physx_cuda it has one row per environment, and PhysX advances all rows at once. Rows
that are not stepped get an action that holds them still, and their previous state is written back afterwards. This
restores positions, velocities and joints, but not PhysX's own memory of contacts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from envs.base.vector_env import resized
from envs.maniskill.bootstrap import make
from envs.maniskill.config import ManiSkillConfig
from envs.maniskill.tasks import ACTIONS, Task


class Simulation:
    """See the module."""

    def __init__(self, task: Task, config: ManiSkillConfig, backend: str, rows: int) -> None:
        self.task = task
        self.rows = rows
        self.env = make(task, config, backend, rows)
        self._image_size = config.image_size
        self._fingers = np.ones(rows, np.float32)  # the last command of each row's gripper
        self._reached = np.zeros(rows, np.float32)  # share of the task's milestones that each row's episode has reached
        # From here on, only ``images`` renders, and only with the task's camera.
        self.env._obs_mode = "none"
        camera = self.env.scene.sensors[task.camera]
        self.env.scene.sensors = self.env._sensors = {task.camera: camera}
        if config.show_goal:
            for marker in self.env._hidden_objects:
                marker.show_visual()
            self.env._hidden_objects = []

    def reset(self, row: int, seed: int, init_state: int | None) -> None:
        """Start an episode in one row, from the initial state with this number if one is given, else from the seed."""
        options: dict[str, Any] = {}
        if self.rows > 1:
            options["env_idx"] = self._index([row])
        if init_state is not None:
            seed = init_state
            if self.task.assets:  # these tasks number their fixed placements themselves
                options["episode_id"] = self._index([init_state])
        _, info = self.env.reset(seed=[seed] * self.rows, options=options)
        self._fingers[row] = 1.0
        self._note_milestones([row], info)

    def step(self, rows: Sequence[int], commands: np.ndarray) -> np.ndarray:
        """One control step. ``commands`` is float32 [n, 7] in ManiSkill's convention; returns success, bool [n]."""
        action = np.zeros((self.rows, len(ACTIONS)), np.float32)
        self._fingers[list(rows)] = commands[:, -1]
        action[:, -1] = self._fingers
        action[list(rows)] = commands
        held = [row for row in range(self.rows) if row not in rows]
        before = self.env.get_state_dict() if held else {}
        _, _, _, _, info = self.env.step(action)
        success = info["success"].cpu().numpy()[list(rows)]
        self._note_milestones(rows, info)
        if held:
            index = self._index(held)
            self.env.set_state_dict(_rows_of(before, index), index)
        return success.astype(bool)

    def _note_milestones(self, rows: Sequence[int], info: dict[str, Any]) -> None:
        """Read ManiSkill's report of the step: asking ``evaluate`` again would count a held grasp twice."""
        if self.task.milestones:
            reached = np.mean([info[name].cpu().numpy() for name in self.task.milestones], axis=0)
            self._reached[list(rows)] = reached[list(rows)]

    def progress(self, row: int) -> float:
        """0..1: share of ``task.milestones`` that the row's episode has reached."""
        return float(self._reached[row])

    def images(self, rows: Sequence[int]) -> np.ndarray:
        """uint8 [n, H, W, 3]: what the camera sees now."""
        images = self.env._get_obs_sensor_data()[self.task.camera]["rgb"][list(rows)].cpu().numpy()
        return resized(images, self._image_size)

    def proprio(self, row: int) -> np.ndarray:
        """float64 [8]: position of the end effector from the robot's base (m), its rotation from ``task.upright`` (axis
        times angle, rad), finger joints."""
        robot = self.env.agent.robot
        tool = (robot.pose.inv() * self.env.agent.tcp.pose).raw_pose[row].cpu().numpy().astype(np.float64)
        turn = rotation_vector(_product(tool[3:], _inverse(np.array(self.task.upright))))
        return np.concatenate([tool[:3], turn, self.joints(row)[-2:]])

    def joints(self, row: int) -> np.ndarray:
        """float64 [J]: all joints of the robot, the fingers last."""
        return self.env.agent.robot.get_qpos()[row].cpu().numpy().astype(np.float64)

    def position(self, row: int, thing: str) -> np.ndarray:
        """float64 [3]: where one of ``task.things`` is in the world."""
        return getattr(self.env, self.task.things[thing]).pose.p[row].cpu().numpy().astype(np.float64)

    def tool(self, row: int) -> np.ndarray:
        """float64 [3]: where the end effector is in the world."""
        return self.env.agent.tcp.pose.p[row].cpu().numpy().astype(np.float64)

    def grasping(self, row: int, thing: str) -> bool:
        """Whether both fingers press on one of ``task.things``."""
        return bool(self.env.agent.is_grasping(getattr(self.env, self.task.things[thing]))[row])

    def state(self, row: int) -> np.ndarray:
        """float64 [S]: poses and velocities of everything that moves, joints."""
        return self.env.get_state()[row].cpu().numpy().astype(np.float64)

    def close(self) -> None:
        self.env.close()

    def _index(self, numbers: Sequence[int]) -> Any:
        import torch

        return torch.tensor(list(numbers), device=self.env.device)


def _rows_of(state: dict[str, Any], index: Any) -> dict[str, Any]:
    return {name: _rows_of(part, index) if isinstance(part, dict) else part[index] for name, part in state.items()}


def rotation_vector(quaternion: np.ndarray) -> np.ndarray:
    """float64 [3], axis times angle (at most pi) of a unit quaternion [4] (w, x, y, z)."""
    real, axis = quaternion[0], quaternion[1:]
    if real < 0:  # the negated quaternion is the same rotation, by a smaller angle
        real, axis = -real, -axis
    sine = np.linalg.norm(axis)
    return axis * (2 * np.arctan2(sine, real) / sine if sine > 1e-9 else 2.0)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    real = a[0] * b[0] - a[1:] @ b[1:]
    return np.concatenate([[real], a[0] * b[1:] + b[0] * a[1:] + np.cross(a[1:], b[1:])])


def _inverse(quaternion: np.ndarray) -> np.ndarray:
    return quaternion * [1, -1, -1, -1]
