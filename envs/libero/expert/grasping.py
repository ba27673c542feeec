"""Top-down grasps for a parallel gripper, found on a height map of the scene.

The map is what a depth camera straight above would see if the robot were absent: for each point of a grid, the height
of the first surface and the body it belongs to. A grasp fits where the target rises between the two fingers while
everything under fingers and palm is lower. This covers rims (bowls, mugs, pans) and whole objects (cans, boxes,
bottles), with meshes and with boxes.
"""

from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np

from envs.base import EnvError

# The Panda gripper, in metres, about its grip site; measured on robosuite's model with open fingers.
TIP_BELOW_SITE = 0.0125
PALM_ABOVE_SITE = 0.026
HALF_OPENING = 0.039
FINGER_REACH = 0.062  # outer side of an open finger, along the closing axis
FINGER_HALF_WIDTH = 0.012
PALM_HALF_LENGTH = 0.105  # along the closing axis
PALM_HALF_WIDTH = 0.032

_MARGIN = 0.004
_SLACK = 0.008  # metres by which a stretched arm may miss; grasps with this much room are preferred
_MIN_DEPTH = 0.007
_BEST_DEPTH = 0.028
_RAY_HEIGHT = 10.0  # high enough that rays from one point are nearly parallel
_ARM_AWAY = np.array([np.pi, -0.6, 0.0, -1.5, 0.0, 1.5, 0.0])  # behind the base
_YAWS = np.radians([0, 15, -15, 30, -30, 45, -45, 60, -60, 75, -75, 90])
_MAX_SLANT = 0.006  # metres over half a pad; fingers slide off a sharper corner
_MAX_PLACES = 100
_ALONG = np.arange(-27, 28) * 0.004  # offsets along the closing axis
_ACROSS = np.array([-0.03, -0.02, -0.01, 0.0, 0.01, 0.02, 0.03])


@dataclass(frozen=True, slots=True)
class Grasp:
    """Where to close the fingers."""

    position: np.ndarray  # float64 [3], of the grip site
    yaw: float  # radians about the vertical; 0 closes along the world's y axis
    score: float


class HeightMap:
    """Heights and bodies on a square grid, looked up by world coordinates."""

    def __init__(self, model: Any, scratch: Any, centre: np.ndarray, half_size: float, spacing: float) -> None:
        """Cast rays at ``scratch`` (``mujoco.MjData``) with up-to-date kinematics and the robot out of the way."""
        count = 2 * int(np.ceil(half_size / spacing)) + 1
        self._spacing = spacing
        self._low = np.array(centre[:2]) - spacing * (count - 1) / 2
        self._count = count
        ticks = np.arange(count) * spacing
        grid = np.stack(np.meshgrid(self._low[0] + ticks, self._low[1] + ticks, indexing="ij"), axis=-1)
        eye = np.array([*centre[:2], centre[2] + _RAY_HEIGHT])
        rays = np.concatenate([grid.reshape(-1, 2), np.full((count * count, 1), centre[2])], axis=1) - eye
        rays /= np.linalg.norm(rays, axis=1, keepdims=True)
        geom, distance = np.full(count * count, -1, np.int32), np.zeros(count * count)
        groups = np.array([1, 0, 0, 0, 0, 0], np.uint8)  # collision shapes
        materials, colours = model.geom_matid.copy(), model.geom_rgba.copy()
        model.geom_matid[:], model.geom_rgba[:] = -1, 1.0  # rays pass through what is fully transparent
        for i, ray in enumerate(rays):  # one by one: up to MuJoCo 3.3, mj_multiRay misses geoms
            distance[i] = mujoco.mj_ray(model, scratch, eye, ray, groups, 1, -1, geom[i : i + 1])
        model.geom_matid[:], model.geom_rgba[:] = materials, colours
        height = eye[2] + distance * rays[:, 2]
        planes = (model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE) & (model.geom_contype > 0)
        floor = scratch.geom_xpos[planes, 2].max(initial=-_RAY_HEIGHT)  # both drawn and solid: in another group
        self.height = np.where(geom >= 0, height, floor).reshape(count, count)
        body = np.where(geom >= 0, model.body_rootid[model.geom_bodyid[geom]], -1)
        self.body = body.reshape(count, count)
        self.points = grid

    def at(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Height and root body at points float64 [..., 2]; outside the grid, those of its border."""
        index = np.rint((points - self._low) / self._spacing).astype(int).clip(0, self._count - 1)
        return self.height[index[..., 0], index[..., 1]], self.body[index[..., 0], index[..., 1]]

    def highest(self, centre: np.ndarray, radius: float) -> float:
        """The highest surface within a circle."""
        near = np.linalg.norm(self.points - centre[:2], axis=-1) <= radius
        return float(self.height[near].max()) if near.any() else float(self.at(centre[:2])[0])

    def highest_in_corridor(self, start: np.ndarray, end: np.ndarray, radius: float) -> float:
        """The highest surface within ``radius`` of the straight line between two points."""
        line = end[:2] - start[:2]
        share = np.clip(((self.points - start[:2]) @ line) / max(line @ line, 1e-9), 0, 1)
        near = np.linalg.norm(self.points - start[:2] - share[..., None] * line, axis=-1) <= radius
        return float(self.height[near].max(initial=float(self.at(start[:2])[0])))  # both ends may lie off the grid

    def highest_under_palm(self, centre: np.ndarray, yaw: float) -> float:
        """The highest surface below fingers and palm, for a grip site at ``centre``."""
        along, across = closing_axis(yaw), closing_axis(yaw + np.pi / 2)
        offsets = self.points - centre[:2]
        below = (np.abs(offsets @ along) <= PALM_HALF_LENGTH) & (np.abs(offsets @ across) <= PALM_HALF_WIDTH)
        return float(self.height[below].max()) if below.any() else -np.inf


def closing_axis(yaw: float) -> np.ndarray:
    """float64 [2]: the horizontal direction in which the fingers close."""
    return np.array([-np.sin(yaw), np.cos(yaw)])


def clear_robot(model: Any, scratch: Any, qpos: np.ndarray, arm_qpos: np.ndarray) -> None:
    """Set the pose ``qpos`` in ``scratch``, but with the arm (indices ``arm_qpos``) turned away from the scene."""
    scratch.qpos[:] = qpos
    scratch.qpos[arm_qpos] = _ARM_AWAY
    mujoco.mj_kinematics(model, scratch)


def find_grasp(heights: HeightMap, body: int, centre: np.ndarray) -> Grasp:
    """The best grasp of a root body whose centre of mass is at ``centre`` (float64 [3]).

    Raises EnvError if the fingers fit nowhere.
    """
    rows, columns = np.nonzero(heights.body == body)
    if not len(rows):
        raise EnvError("no grasp: the object cannot be seen from above")
    places = heights.points[rows, columns][:: max(1, len(rows) // _MAX_PLACES)]  # [n, 2]
    for slack in (_SLACK, 0.0):
        found = [_best_at_yaw(heights, body, centre, places, float(yaw), slack) for yaw in _YAWS]
        fitting = [grasp for grasp in found if grasp is not None]
        if fitting:
            return max(fitting, key=lambda grasp: grasp.score)
    raise EnvError("no grasp: the gripper fits nowhere around the object from above")


def grasp_at(heights: HeightMap, body: int, centre: np.ndarray, place: np.ndarray, yaw: float) -> Grasp | None:
    """The grasp of a root body straight below ``place`` (float64 [2]) at this yaw; None if the fingers do not fit."""
    found = _best_at_yaw(heights, body, centre, place[None], yaw, 0.0)
    return None if found is None else Grasp(np.array([*place, found.position[2]]), yaw, found.score)


def _best_at_yaw(
    heights: HeightMap, body: int, centre: np.ndarray, places: np.ndarray, yaw: float, slack: float
) -> Grasp | None:
    """The best grasp at this yaw whose open fingers have ``slack`` metres of room around them."""
    axis, side = closing_axis(yaw), closing_axis(yaw + np.pi / 2)
    offsets = _ALONG[:, None, None] * axis + _ACROSS[None, :, None] * side  # [a, c, 2]
    height, owner = heights.at(places[:, None, None, :] + offsets)  # [n, a, c]
    pads = np.abs(_ACROSS) <= FINGER_HALF_WIDTH
    inside = np.abs(_ALONG) <= HALF_OPENING - _MARGIN
    fingers = (np.abs(_ALONG) > HALF_OPENING - _MARGIN) & (np.abs(_ALONG) <= FINGER_REACH + slack)
    swept = np.abs(_ACROSS) <= FINGER_HALF_WIDTH + slack
    between, between_owner = height[:, inside][:, :, pads], owner[:, inside][:, :, pads]
    top = np.where(between_owner == body, between, -np.inf).max(axis=(1, 2))
    tip = np.maximum.reduce(
        [
            height[:, fingers][:, :, swept].max(axis=(1, 2)) + _MARGIN,
            height.max(axis=(1, 2)) - TIP_BELOW_SITE - PALM_ABOVE_SITE + _MARGIN,
            top - _BEST_DEPTH,
        ]
    )
    depth = top - tip
    gripped = between > (tip + 0.6 * depth.clip(min=0, max=0.016))[:, None, None]  # what the pads will touch
    own = (between_owner == body) | ~gripped
    along = np.broadcast_to(_ALONG[inside][None, :, None], gripped.shape)
    touched = gripped.any(axis=1)  # [n, pads]
    low = np.where(touched, np.where(gripped, along, np.inf).min(axis=1), 0.0)
    high = np.where(touched, np.where(gripped, along, -np.inf).max(axis=1), 0.0)
    count = touched.sum(axis=1).clip(min=1)
    edges = np.stack([low, high])  # where each pad line meets the target, on both sides
    mean = edges.sum(axis=2) / count
    slant = np.where(touched, np.abs(edges - mean[..., None]), 0.0).max(axis=(0, 2))  # of the sides under the pads
    middle = mean.mean(axis=0)
    width = mean[1] - mean[0]
    even = touched[:, touched.shape[1] // 2] & (touched[:, 0] == touched[:, -1])  # not the tip of a corner
    fits = (depth >= _MIN_DEPTH) & own.all(axis=(1, 2)) & even & (slant <= _MAX_SLANT)
    if not fits.any():
        return None
    far = np.linalg.norm(places - centre[:2], axis=1)
    score = (
        depth.clip(max=_BEST_DEPTH)
        - 0.5 * np.abs(middle)
        - 1.5 * slant
        - 0.3 * far
        - 0.1 * width
        - 0.01 * abs(yaw)
        + 0.01 * (places - centre[:2]) @ np.array([0.0, 1.0])  # of two equal rims, always the same one
    )
    choice = int(np.argmax(np.where(fits, score, -np.inf)))
    place = places[choice] + middle[choice] * axis
    return Grasp(np.array([*place, tip[choice] + TIP_BELOW_SITE]), yaw, float(score[choice]))
