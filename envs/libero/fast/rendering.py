"""Off-screen rendering with the pixels of robosuite's renderer, at lower cost.

A thread has one GL context, which holds each model's meshes and textures once, for all of its environments. The
renderer leaves out work that changes no pixel: shadow maps if no light casts shadows, shapes outside the camera's view,
and in software rendering, where time goes into triangles, not into pixels, nearly all triangles (``lean_drawing``). A
mirror makes MuJoCo draw everything twice; if it covers little of the image, only that window is drawn with the mirror,
and the rest without.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import mujoco
import numpy as np

from envs.libero.fast.canvas import Canvas
from envs.libero.fast.lean_drawing import LeanDrawing

log = logging.getLogger(__name__)

_VIEW_SLACK = 1e-3  # metres by which a shape must be outside the view
_WINDOW_SLACK = 2  # pixels drawn around the mirror
_SHAPE_FACES = 500  # about what a box or cylinder costs, in faces of meshes
_COMPARE_EVERY = 1024  # lean drawings of a camera between two comparisons; the first ones follow each other closely
_TRIALS = 8  # drawings after which the faster way is known


@dataclass(frozen=True, slots=True)
class _Pass:
    """One drawing of the scene; only ``window`` of its image is kept."""

    mirror: bool
    hidden: np.ndarray  # bool [shapes]
    window: tuple[int, int, int, int]  # left, right, bottom, top: pixels, from the lower left corner


@dataclass(slots=True)
class _Comparison:
    """Lean drawings of a camera, and what they took at best beside full ones, in seconds."""

    drawn: int = 0
    lean: float = math.inf
    full: float = math.inf

    @property
    def is_due(self) -> bool:
        return self.drawn % _COMPARE_EVERY == 0 or (self.drawn < _COMPARE_EVERY and self.drawn.bit_count() == 1)

    @property
    def is_lost(self) -> bool:
        """Whether full drawings are faster: there is little to leave out."""
        return self.drawn >= _TRIALS and self.lean > self.full


class Renderer:
    """Renders one model. Free it with ``close``: meshes and textures are in the GL library's memory.

    Raises EnvError if no GL context can be created.
    """

    def __init__(self, model: Any, size: int, *, antialiasing: bool = True) -> None:
        """Without ``antialiasing``, software rendering costs less, but pixels differ from LIBERO's."""
        self._model, self.size = model, size
        self._canvas = Canvas(model, size, antialiasing=antialiasing)
        self._data = self._canvas.data
        self._lean = LeanDrawing(self._canvas)
        self._comparisons: defaultdict[int, _Comparison] = defaultdict(_Comparison)  # by camera
        self._shapes, self._costs = _find_shapes(model)
        bounds = model.geom_aabb[self._shapes].reshape(-1, 2, 3)  # centre and half sizes
        self._corners = bounds[:, :1] + np.array(list(product((-1, 1), repeat=3))) * bounds[:, 1:]  # [shapes, 8, 3]
        self._mirror = _find_mirror(self._canvas.scene)
        self._fills: list[Callable[[], None]] = []  # of the last image
        self.is_compared = False  # whether the last image was drawn a second time, to compare
        self.wrong_pixels = 0  # of the lean drawing that was found to be wrong; there are none after it

    @property
    def obstacle(self) -> str:
        """Why images without mirrors are drawn with all of their triangles; empty if they are not."""
        return self._lean.obstacle

    def pose(self, qpos: np.ndarray) -> None:
        """Set the pose of all bodies, float64 [nq]; call it before ``render``."""
        self._data.qpos[:] = qpos
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_comPos(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)

    def render(self, camera: int, out: np.ndarray) -> None:
        """Write the camera's image, rotated by 180 degrees as the OpenVLA papers show it, into uint8 [H, W, 3]."""
        self._canvas.use()
        kept = out[::-1, ::-1]
        self._fills.clear()
        self.is_compared = False
        for drawing in self._plan(camera):
            self._draw(camera, drawing)
            left, right, bottom, top = drawing.window
            kept[bottom:top, left:right] = self._canvas.pixels[bottom:top, left:right]

    def _draw(self, camera: int, drawing: _Pass) -> None:
        """Draw into the canvas's ``pixels``."""
        comparison = self._comparisons[camera]
        if drawing.mirror or self._lean.obstacle or comparison.is_lost:
            self._draw_fully(camera, drawing)
            return
        start = time.perf_counter()
        self._lean.draw(camera, self._shapes[drawing.hidden])
        self._fills.append(self._lean.again)
        comparison.drawn += 1
        if comparison.is_due:
            comparison.lean = min(comparison.lean, time.perf_counter() - start)
            self._compare(camera, drawing, comparison)

    def _compare(self, camera: int, drawing: _Pass, comparison: _Comparison) -> None:
        """Draw fully what was drawn lean. If they differ, there are no lean drawings any more."""
        self.is_compared = True
        lean, start = self._canvas.pixels.copy(), time.perf_counter()
        self._draw_fully(camera, drawing)
        comparison.full = min(comparison.full, time.perf_counter() - start)
        self.wrong_pixels = int((lean != self._canvas.pixels).any(axis=-1).sum())
        if self.wrong_pixels:
            self._lean.obstacle = f"{self.wrong_pixels} pixels of a lean drawing were wrong"
            name = self._model.camera(camera).name
            log.warning("%s, drawing %d: %s; full ones from now on", name, comparison.drawn, self._lean.obstacle)

    def _draw_fully(self, camera: int, drawing: _Pass) -> None:
        self._canvas.show(camera, self._shapes[drawing.hidden])
        self._fill(drawing.mirror)
        self._fills.append(partial(self._fill, drawing.mirror))

    def _fill(self, mirror: bool) -> None:
        self._canvas.draw(mirror=mirror)
        self._canvas.read()

    def again(self) -> None:
        """Repeat the last of the drawings of the last image, whose scene is still set."""
        self._fills[-1]()

    def _plan(self, camera: int) -> list[_Pass]:
        """The drawings that make up the image; the window of each covers those before it.

        MuJoCo draws at most one mirror, the upper side of the first reflecting plane or box, by rendering the whole
        scene a second time. Cameras behind it, or whose view does not contain it, do not need that.
        """
        model, data, mirror = self._model, self._data, self._mirror
        image = (0, self.size, 0, self.size)
        if model.cam_sensorsize[camera].any():  # an off-centre lens, whose view differs from what is assumed here
            return [_Pass(True, np.zeros(len(self._shapes), dtype=bool), image)]
        corners = data.geom_xpos[self._shapes, None] + self._corners @ data.geom_xmat[self._shapes].reshape(
            -1, 3, 3
        ).transpose(0, 2, 1)
        outside = self._outside(camera, corners, image)
        plain = _Pass(False, outside, image)
        if mirror is None:
            return [plain]
        normal = data.geom_xmat[mirror].reshape(3, 3)[:, 2]
        face = data.geom_xpos[mirror] + model.geom_size[mirror, 2] * normal
        if (data.cam_xpos[camera] - face) @ normal < -_VIEW_SLACK:
            return [plain]
        window = self._mirror_window(camera, mirror)
        if window[0] >= window[1] or window[2] >= window[3]:
            return [plain]
        height = (corners - face) @ normal  # [n, 8]
        under = height.max(axis=1) < -_VIEW_SLACK  # MuJoCo clips what is behind the mirror
        mirrored = corners - 2 * height[..., None] * normal
        whole = _Pass(True, outside & (under | self._outside(camera, mirrored, image)), image)
        around = self._outside(camera, corners, window) & (under | self._outside(camera, mirrored, window))
        apart = [plain, _Pass(True, around, window)]
        return min([whole], apart, key=self._cost)

    def _cost(self, drawings: list[_Pass]) -> float:
        """Roughly the number of faces to draw."""
        return sum((1 + drawing.mirror) * float(self._costs[~drawing.hidden].sum()) for drawing in drawings)

    def _mirror_window(self, camera: int, mirror: int) -> tuple[int, int, int, int]:
        """The part of the image that contains the mirror: possibly empty, and the whole image in doubt."""
        model, data, size = self._model, self._data, self.size
        if model.geom_type[mirror] != mujoco.mjtGeom.mjGEOM_BOX:  # planes may have no end
            return 0, size, 0, size
        signs = np.array([[-1, -1, 1], [-1, 1, 1], [1, -1, 1], [1, 1, 1]])
        corners = data.geom_xpos[mirror] + signs * model.geom_size[mirror] @ data.geom_xmat[mirror].reshape(3, 3).T
        seen = (corners - data.cam_xpos[camera]) @ data.cam_xmat[camera].reshape(3, 3)
        depth = -seen[:, 2:]
        if (depth < _VIEW_SLACK).any():
            return 0, size, 0, size
        pixels = size / 2 * (1 + seen[:, :2] / (depth * self._slope(camera)))
        low = np.clip(np.floor(pixels.min(axis=0)) - _WINDOW_SLACK, 0, size).astype(int)
        high = np.clip(np.ceil(pixels.max(axis=0)) + _WINDOW_SLACK, 0, size).astype(int)
        return int(low[0]), int(high[0]), int(low[1]), int(high[1])

    def _slope(self, camera: int) -> float:
        return float(np.tan(np.radians(self._model.cam_fovy[camera]) / 2))

    def _outside(self, camera: int, corners: np.ndarray, window: tuple[int, int, int, int]) -> np.ndarray:
        """bool [n]: which boxes (corners float64 [n, 8, 3]) are completely outside a window of the view."""
        seen = (corners - self._data.cam_xpos[camera]) @ self._data.cam_xmat[camera].reshape(3, 3)
        depth = -seen[..., 2]  # MuJoCo's cameras look along their negative z axis
        outside = (depth < -_VIEW_SLACK).all(axis=1)
        for edge, (axis, side) in zip(window, ((0, -1), (0, 1), (1, -1), (1, 1)), strict=True):
            slope = (2 * edge / self.size - 1) * self._slope(camera)
            beyond = side * (seen[..., axis] - slope * depth) > _VIEW_SLACK * np.sqrt(1 + slope**2)
            outside |= beyond.all(axis=1)
        return outside

    def close(self) -> None:
        """Free what the GL library holds; safe to call twice."""
        self._canvas.use()
        self._lean.close()
        self._canvas.close()


def _find_shapes(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """The geometries that may be left out, int [n], and the cost of each in mesh faces, float64 [n]."""
    kinds = mujoco.mjtGeom
    shining = np.isin(model.geom_type, (kinds.mjGEOM_PLANE, kinds.mjGEOM_BOX)) & (model.geom_matid >= 0)
    shining[shining] = model.mat_reflectance[model.geom_matid[shining]] > 0  # without it, another would be the mirror
    shapes = np.flatnonzero((model.geom_rbound > 0) & ~shining)  # planes have no bounds
    if model.light_castshadow.any():  # a shape outside the view may cast a shadow into it
        shapes = shapes[:0]
    meshes = model.geom_type[shapes] == kinds.mjGEOM_MESH
    costs = np.full(len(shapes), float(_SHAPE_FACES))
    costs[meshes] = model.mesh_facenum[model.geom_dataid[shapes[meshes]]]
    costs[model.geom_group[shapes] == 0] = 0  # collision shapes are not drawn
    return shapes, costs


def _find_mirror(scene: Any) -> int | None:
    """The geometry that MuJoCo would draw as a mirror."""
    kinds = (mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_BOX)
    for geom in scene.geoms[: scene.ngeom]:
        if geom.type in kinds and geom.reflectance > 0 and geom.objtype == mujoco.mjtObj.mjOBJ_GEOM:
            return int(geom.objid)
    return None
