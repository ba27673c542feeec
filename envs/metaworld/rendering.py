"""Pictures of Meta-World's scenes, with the pixels of Meta-World's own renderer."""

from typing import Any

import numpy as np

from envs.base.mujoco_setup import gl_context, import_mujoco
from envs.metaworld.config import MetaWorldConfig

_MAX_SCENE_GEOMS = 1000  # a scene has about 40, and a few marks


class Painter:
    """Draws all scenes of one task, which differ in poses only: meshes and textures are in the GL library once.

    Raises EnvError if no GL context can be created.
    """

    def __init__(self, model: Any, config: MetaWorldConfig) -> None:
        self._mujoco = mujoco = import_mujoco()
        plain, size = config.rendering == "plain", config.image_size
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        if plain:
            model.vis.quality.offsamples = model.vis.quality.shadowsize = 0
        self._gl = gl_context()
        self._gl.make_current()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        self._scene = mujoco.MjvScene(model, maxgeom=_MAX_SCENE_GEOMS)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = not plain
        self._options, self._perturbation = mujoco.MjvOption(), mujoco.MjvPerturb()
        self._camera = mujoco.MjvCamera()
        self._camera.type, self._camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, model.camera(config.camera).id
        self._viewport = mujoco.MjrRect(0, 0, size, size)
        self._upside_down = config.camera != "topview"  # as all other cameras hang

    def image(self, model: Any, data: Any) -> np.ndarray:
        """uint8 [H, W, 3], upright, of a scene of the task."""
        mujoco, pixels = self._mujoco, np.empty((self._viewport.height, self._viewport.width, 3), np.uint8)
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(model, data, self._options, self._perturbation, self._camera, everything, self._scene)
        self._gl.make_current()
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        mujoco.mjr_render(self._viewport, self._scene, self._context)
        mujoco.mjr_readPixels(pixels, None, self._viewport, self._context)  # the lowest row first
        return pixels[:, ::-1] if self._upside_down else pixels[::-1]

    def close(self) -> None:
        """Free what the GL library holds; safe to call twice."""
        if self._context is not None:
            self._gl.make_current()
            self._context.free()
            self._context = None
