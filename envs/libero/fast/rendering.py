"""Off-screen rendering with the pixels of robosuite's renderer, at lower cost.

A thread has one GL context, which holds each model's meshes and textures once, for all of its environments. The
renderer leaves out work that changes no pixel: shadow maps if no light casts shadows, and shapes outside the camera's
view (in software rendering, time goes into triangles, not into pixels). A mirror makes MuJoCo draw everything twice; if
it covers little of the image, only that window is drawn with the mirror, and the rest without.
"""

import ctypes
import threading
from dataclasses import dataclass
from itertools import product
from typing import Any

import mujoco
import numpy as np

from envs.base import EnvError

_MAX_SCENE_GEOMS = 1000  # robosuite's
_HIDDEN_GROUP = 5  # a geometry group that is never drawn
_VIEW_SLACK = 1e-3  # metres by which a shape must be outside the view
_WINDOW_SLACK = 2  # pixels drawn around the mirror
_SHAPE_FACES = 500  # about what a box or cylinder costs, in faces of meshes

_of_thread = threading.local()


@dataclass(frozen=True, slots=True)
class _Pass:
    """One drawing of the scene; only ``window`` of its image is kept."""

    mirror: bool
    hidden: np.ndarray  # bool [shapes]
    window: tuple[int, int, int, int]  # left, right, bottom, top: pixels, from the lower left corner


def _gl_context() -> Any:
    """The thread's GL context: only one thread at a time can use a context."""
    if not hasattr(_of_thread, "context"):
        _of_thread.context = _new_gl_context()
    return _of_thread.context


def _new_gl_context() -> Any:
    """Of the kind that MUJOCO_GL names (see ``bootstrap``)."""
    from robosuite.utils.binding_utils import GLContext

    try:
        context = GLContext(max_width=64, max_height=64)  # MuJoCo renders into buffers of its own
    except (RuntimeError, ImportError) as error:
        raise EnvError(
            f"no off-screen GL context could be created ({error}): see `vla-rl doctor` for the GL backend"
        ) from error
    # Keep it until the process ends: its finalizer would run after the OpenGL bindings are unloaded, and complain.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(context))
    return context


class Renderer:
    """Renders one model. Free it with ``close``: meshes and textures are in the GL library's memory.

    Raises EnvError if no GL context can be created.
    """

    def __init__(self, model: Any, size: int, *, antialiasing: bool = True) -> None:
        """Without ``antialiasing``, software rendering costs about half, but pixels differ from LIBERO's."""
        self._model = model
        self._data = mujoco.MjData(model)  # its own: an environment's state is later than its images
        self._gl = _gl_context()
        self._gl.make_current()
        self._context = _new_context(model, size, antialiasing)
        self._scene = mujoco.MjvScene(model, maxgeom=_MAX_SCENE_GEOMS)
        self._options = mujoco.MjvOption()
        self._options.geomgroup[0] = 0  # collision shapes
        self._options.geomgroup[_HIDDEN_GROUP] = 0
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._perturbation = mujoco.MjvPerturb()
        self._viewport = mujoco.MjrRect(0, 0, size, size)
        self._size = self.size = size
        self._pixels = np.zeros((size, size, 3), np.uint8)
        self._shapes, self._costs = _find_shapes(model)
        bounds = model.geom_aabb[self._shapes].reshape(-1, 2, 3)  # centre and half sizes
        self._corners = bounds[:, :1] + np.array(list(product((-1, 1), repeat=3))) * bounds[:, 1:]  # [shapes, 8, 3]
        self._update_scene(0)
        self._mirror = _find_mirror(self._scene)

    def pose(self, qpos: np.ndarray) -> None:
        """Set the pose of all bodies, float64 [nq]; call it before ``render``."""
        self._data.qpos[:] = qpos
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_comPos(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)

    def render(self, camera: int, out: np.ndarray) -> None:
        """Write the camera's image, rotated by 180 degrees as the OpenVLA papers show it, into uint8 [H, W, 3]."""
        self._gl.make_current()
        kept = out[::-1, ::-1]
        for drawing in self._plan(camera):
            self._draw(camera, drawing)
            left, right, bottom, top = drawing.window
            kept[bottom:top, left:right] = self._pixels[bottom:top, left:right]

    def _draw(self, camera: int, drawing: _Pass) -> None:
        """Draw into ``_pixels``, whose first row is the lowest."""
        hidden = self._shapes[drawing.hidden]
        groups = self._model.geom_group[hidden]
        self._model.geom_group[hidden] = _HIDDEN_GROUP
        self._update_scene(camera)
        self._model.geom_group[hidden] = groups
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = drawing.mirror
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        mujoco.mjr_render(self._viewport, self._scene, self._context)
        mujoco.mjr_readPixels(self._pixels, None, self._viewport, self._context)

    def _update_scene(self, camera: int) -> None:
        self._camera.fixedcamid = camera
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(
            self._model, self._data, self._options, self._perturbation, self._camera, everything, self._scene
        )

    def _plan(self, camera: int) -> list[_Pass]:
        """The drawings that make up the image; the window of each covers those before it.

        MuJoCo draws at most one mirror, the upper side of the first reflecting plane or box, by rendering the whole
        scene a second time. Cameras behind it, or whose view does not contain it, do not need that.
        """
        model, data, mirror = self._model, self._data, self._mirror
        image = (0, self._size, 0, self._size)
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
        model, data, size = self._model, self._data, self._size
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
            slope = (2 * edge / self._size - 1) * self._slope(camera)
            beyond = side * (seen[..., axis] - slope * depth) > _VIEW_SLACK * np.sqrt(1 + slope**2)
            outside |= beyond.all(axis=1)
        return outside

    def close(self) -> None:
        """Free what the GL library holds; safe to call twice."""
        if self._context is not None:
            self._gl.make_current()
            self._context.free()
            self._context = None


def _new_context(model: Any, size: int, antialiasing: bool) -> Any:
    """Meshes, textures and a frame buffer of the right size; the model's own settings are restored."""
    vis = model.vis
    before = vis.global_.offwidth, vis.global_.offheight, vis.quality.shadowsize, vis.quality.offsamples
    vis.global_.offwidth = vis.global_.offheight = size
    if not model.light_castshadow.any():
        vis.quality.shadowsize = 0
    if not antialiasing:
        vis.quality.offsamples = 0
    try:
        return mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50.value)
    except mujoco.FatalError as error:
        raise EnvError(f"MuJoCo cannot render with this GL library ({error}): see `vla-rl doctor`") from error
    finally:
        vis.global_.offwidth, vis.global_.offheight, vis.quality.shadowsize, vis.quality.offsamples = before


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
