"""Conventions of all LIBERO environments here: actions, proprioception, and noise on the start of an episode.

Actions follow OpenVLA's convention. The arm's displacement is passed on unchanged (OSC_POSE, 1.0 = 5 cm or 0.5 rad);
the gripper, 0 = closed .. 1 = open, is binarized and inverted for robosuite (-1 = open, 1 = closed).
"""

import numpy as np

NO_OP = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])  # in robosuite's convention: stay, gripper open; for settling


def to_robosuite(actions: np.ndarray) -> np.ndarray:
    """float64 [..., 7] for robosuite from OpenVLA's convention: the gripper g becomes -sign(2g - 1)."""
    commands = np.asarray(actions, np.float64).copy()
    commands[..., 6] = -np.sign(2 * commands[..., 6] - 1)
    return commands


def pose(eef_pos: np.ndarray, eef_quat: np.ndarray, fingers: np.ndarray) -> np.ndarray:
    """float64 [8], proprioception: position (m), orientation (x, y, z, w) as axis times angle (rad), fingers (m)."""
    from robosuite.utils.transform_utils import quat2axisangle

    return np.concatenate([eef_pos, quat2axisangle(eef_quat.copy()), fingers])


def arm_noise(seed: int, deviation: float) -> np.ndarray:
    """float64 [7] (rad): depends on the episode's seed alone and does not draw from LIBERO's random stream."""
    return np.random.default_rng([seed, 7]).normal(0.0, deviation, 7)
