"""The main camera of LIBERO-Plus's tasks, by the five numbers in their names (arXiv:2510.13626 and its package)."""

import mujoco
import numpy as np

_PIVOT = np.array([0.0, 0.0, 0.8])  # metres; what the camera circles and comes closer to
_Y, _Z = np.array([0.0, 1.0, 0.0]), np.array([0.0, 0.0, 1.0])


def moved(position: np.ndarray, quaternion: np.ndarray, numbers: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Where the camera stands, float64 [3] (m), and its orientation, float64 [4] (w, x, y, z).

    ``numbers``: degrees upwards on a circle is the second, degrees around the vertical the first; then the distance in
    per cent; then the camera alone turns by degrees around the vertical and upwards. The package rounds to four
    decimals in between, this does not.
    """
    around, up, percent, turn, tilt = numbers
    lift, circle = _rotation(_Y, -up), _rotation(_Z, around)
    position = _PIVOT + percent / 100 * (_turned(_PIVOT + _turned(position - _PIVOT, lift), circle) - _PIVOT)
    for rotation in (lift, circle, _rotation(_Z, turn), _rotation(_Y, -tilt)):
        quaternion = _product(rotation, quaternion)
    return position, quaternion


def _rotation(axis: np.ndarray, degrees: float) -> np.ndarray:
    quaternion = np.zeros(4)
    mujoco.mju_axisAngle2Quat(quaternion, axis, np.radians(degrees))
    return quaternion


def _turned(vector: np.ndarray, quaternion: np.ndarray) -> np.ndarray:
    result = np.zeros(3)
    mujoco.mju_rotVecQuat(result, vector, quaternion)
    return result


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    result = np.zeros(4)
    mujoco.mju_mulQuat(result, left, right)
    return result
