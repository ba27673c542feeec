"""Off-screen rendering with the pixels of robosuite's renderer, at less cost.

One GL context serves the whole process; each model has its meshes and textures in it once, whatever the number of
slots. What is left out changes no pixel: shadow maps where no light casts shadows, and meshes that lie outside the
camera's view (in software rendering, time goes into vertices, not into pixels).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mujoco
import numpy as np

from envs.base import EnvError

_MAX_SCENE_GEOMS = 1000  # robosuite's
_HIDDEN_GROUP = 5  # a geometry group that is never drawn
_VIEW_SLACK = 1e-3  # metres by which a mesh must lie outside the view


@cache
def _gl_context() -> Any:
    """The process's GL context, of the kind that MUJOCO_GL names (see ``bootstrap``)."""
    from robosuite.utils.binding_utils import GLContext

    try:
        return GLContext(max_width=64, max_height=64)  # MuJoCo renders into buffers of its own
    except (RuntimeError, ImportError) as error:
        raise EnvError(
            f"no off-screen GL context could be created ({error}): see `vla-rl doctor` for the GL backend"
        ) from error


class Renderer:
    """Renders one model. Free it with ``close`` (meshes and textures live in the GL library's memory).

    Raises EnvError where no GL context can be had.
    """

    def __init__(self, model: Any, size: int, *, antialiasing: bool = True) -> None:
        """Without ``antialiasing``, software rendering costs about half, and pixels are no longer LIBERO's."""
        self._model = model
        self._data = mujoco.MjData(model)  # its own: a slot's poses belong to another moment than its images
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
        self._pixels = np.zeros((size, size, 3), np.uint8)
        self._meshes = np.flatnonzero(model.geom_type == mujoco.mjtGeom.mjGEOM_MESH)
        if model.light_castshadow.any():  # what lies outside the view may throw a shadow into it
            self._meshes = self._meshes[:0]
        self._update_scene(0)
        self._mirror = _find_mirror(self._scene)

    def pose(self, qpos: np.ndarray) -> None:
        """Put all bodies where float64 [nq] says; needed once before the images of a moment."""
        self._data.qpos[:] = qpos
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_comPos(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)

    def render(self, camera: int, out: np.ndarray) -> None:
        """Write the camera's image, rotated by 180 degrees as the OpenVLA papers show it, into uint8 [H, W, 3]."""
        self._gl.make_current()
        model = self._model
        reflection, hidden = self._what_shows(camera)
        groups = model.geom_group[hidden]
        model.geom_group[hidden] = _HIDDEN_GROUP
        self._update_scene(camera)
        model.geom_group[hidden] = groups
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = reflection
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        mujoco.mjr_render(self._viewport, self._scene, self._context)
        mujoco.mjr_readPixels(self._pixels, None, self._viewport, self._context)
        out[:] = self._pixels[::-1, ::-1]

    def _update_scene(self, camera: int) -> None:
        self._camera.fixedcamid = camera
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(
            self._model, self._data, self._options, self._perturbation, self._camera, everything, self._scene
        )

    def _what_shows(self, camera: int) -> tuple[bool, np.ndarray]:
        """Whether the mirror pass is needed, and int [n]: meshes that can be left out.

        MuJoCo draws one mirror at most, the upper side of the first reflecting plane or box, by rendering the whole
        scene a second time. A camera behind it sees nothing of that; nor does one whose view does not hold the mirror.
        """
        model, data, mirror = self._model, self._data, self._mirror
        if model.cam_sensorsize[camera].any():  # an off-centre lens: another pyramid of view than assumed here
            return True, self._meshes[:0]
        centres, radii = data.geom_xpos[self._meshes], model.geom_rbound[self._meshes]
        hidden = self._outside(camera, centres, radii)
        if mirror is None:
            return False, self._meshes[hidden]
        normal = data.geom_xmat[mirror].reshape(3, 3)[:, 2]
        face = data.geom_xpos[mirror] + model.geom_size[mirror, 2] * normal
        behind = (data.cam_xpos[camera] - face) @ normal < -_VIEW_SLACK
        bounded = model.geom_type[mirror] == mujoco.mjtGeom.mjGEOM_BOX
        if behind or (bounded and self._outside(camera, data.geom_xpos[[mirror]], model.geom_rbound[[mirror]])[0]):
            return False, self._meshes[hidden]
        mirrored = centres - 2 * ((centres - face) @ normal)[:, None] * normal
        return True, self._meshes[hidden & self._outside(camera, mirrored, radii)]

    def _outside(self, camera: int, centres: np.ndarray, radii: np.ndarray) -> np.ndarray:
        """bool [n]: which spheres (float64 [n, 3], [n]) lie wholly outside the camera's pyramid of view."""
        seen = (centres - self._data.cam_xpos[camera]) @ self._data.cam_xmat[camera].reshape(3, 3)
        radii = radii + _VIEW_SLACK
        slope = np.tan(np.radians(self._model.cam_fovy[camera]) / 2)
        depth = -seen[:, 2]  # MuJoCo's cameras look along their negative z axis
        beside = np.abs(seen[:, :2]).max(axis=1) - slope * depth > radii * np.sqrt(1 + slope**2)
        return beside | (depth < -radii)

    def close(self) -> None:
        """Free what the GL library holds; safe to call twice."""
        if self._context is not None:
            self._gl.make_current()
            self._context.free()
            self._context = None


def _new_context(model: Any, size: int, antialiasing: bool) -> Any:
    """Meshes, textures and a frame buffer of the needed size (the model's own settings stay as they are)."""
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


def _find_mirror(scene: Any) -> int | None:
    """The geometry that MuJoCo would draw as a mirror."""
    kinds = (mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_BOX)
    for geom in scene.geoms[: scene.ngeom]:
        if geom.type in kinds and geom.reflectance > 0 and geom.objtype == mujoco.mjtObj.mjOBJ_GEOM:
            return int(geom.objid)
    return None
