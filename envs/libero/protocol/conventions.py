"""What every LIBERO environment here agrees on: actions, proprioception, and how placements are made harder.

Actions come in OpenVLA's convention: the arm's displacement is passed on as it is (OSC_POSE, 1.0 = 5 cm or 0.5 rad),
the gripper, 0 = closed .. 1 = open, is binarized and inverted for robosuite (-1 = open, 1 = closed).
"""

from __future__ import annotations

import numpy as np

NO_OP = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])  # in robosuite's convention: stay, gripper open; for settling


def to_robosuite(actions: np.ndarray) -> np.ndarray:
    """float64 [..., 7] for robosuite from OpenVLA's convention: the gripper g becomes -sign(2g - 1).

    Raises ValueError where an action is not finite.
    """
    commands = np.asarray(actions, np.float64).copy()
    if not np.isfinite(commands).all():
        raise ValueError(f"actions must be finite, got {actions[~np.isfinite(actions)][0]}")
    commands[..., 6] = -np.sign(2 * commands[..., 6] - 1)
    return commands


def pose(eef_pos: np.ndarray, eef_quat: np.ndarray, fingers: np.ndarray) -> np.ndarray:
    """float64 [8], proprioception: position (m), orientation (x, y, z, w) as axis times angle (rad), fingers (m)."""
    from robosuite.utils.transform_utils import quat2axisangle

    return np.concatenate([eef_pos, quat2axisangle(eef_quat.copy()), fingers])


def arm_noise(seed: int, deviation: float) -> np.ndarray:
    """float64 [7] (rad): a function of the episode's seed, beside the stream that LIBERO's samplers draw from."""
    return np.random.default_rng([seed, 7]).normal(0.0, deviation, 7)
