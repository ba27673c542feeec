"""What MuJoCo draws on, off-screen: a GL context, a model's meshes and textures in it, and the scene that is drawn."""

from typing import Any

import mujoco
import numpy as np

from envs.base import EnvError
from envs.base.mujoco_setup import gl_context

_MAX_SCENE_GEOMS = 1000  # robosuite's
_HIDDEN_GROUP = 5  # of geometries and sites: never drawn


class Canvas:
    """Draws one model, in the pose of ``data``. Free it with ``close``: the GL library holds meshes and textures.

    Raises EnvError if no GL context can be created.
    """

    def __init__(self, model: Any, size: int, *, antialiasing: bool) -> None:
        self.model, self.size = model, size
        self.data = mujoco.MjData(model)  # its own: an environment's state is later than its images
        self._gl = gl_context()
        self._gl.make_current()
        self.context = _new_context(model, size, antialiasing)
        self.scene = mujoco.MjvScene(model, maxgeom=_MAX_SCENE_GEOMS)
        self.pixels = np.zeros((size, size, 3), np.uint8)  # what ``read`` has read; the first row is the lowest
        self._options = mujoco.MjvOption()
        self._options.geomgroup[0] = 0  # collision shapes
        self._options.geomgroup[_HIDDEN_GROUP] = self._options.sitegroup[_HIDDEN_GROUP] = 0
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._perturbation = mujoco.MjvPerturb()
        self._viewport = mujoco.MjrRect(0, 0, size, size)
        self.show(0)

    def drawn_groups(self, groups: np.ndarray) -> np.ndarray:
        """bool: which of these groups of geometries are drawn at all."""
        drawn: np.ndarray = np.asarray(self._options.geomgroup, dtype=bool)[groups]
        return drawn

    def renderer_name(self) -> str:
        """As the GL library states it."""
        from OpenGL import GL

        name: str = GL.glGetString(GL.GL_RENDERER).decode()
        return name

    def sample_places(self) -> np.ndarray:
        """float32 [S, 2]: where in a pixel the renderer samples, from its lower left corner."""
        from OpenGL import GL

        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.context)
        places = np.full((max(1, int(GL.glGetIntegerv(GL.GL_SAMPLES))), 2), 0.5, np.float32)
        for number, place in enumerate(places if len(places) > 1 else ()):
            GL.glGetMultisamplefv(GL.GL_SAMPLE_POSITION, number, place)
        return places

    def use(self) -> None:
        """Make its GL context the thread's current one; call it before all else."""
        self._gl.make_current()

    def show(
        self,
        camera: int,
        hidden: np.ndarray | None = None,
        hidden_sites: np.ndarray | None = None,
        *,
        reflecting: bool = True,
    ) -> None:
        """Set the scene: what the camera sees, without ``hidden`` geometries (indices or a mask) and sites."""
        model = self.model
        groups, sites, reflectance = model.geom_group.copy(), model.site_group.copy(), model.mat_reflectance.copy()
        if not reflecting:
            model.mat_reflectance[:] = 0
        if hidden is not None:
            model.geom_group[hidden] = _HIDDEN_GROUP
        if hidden_sites is not None:
            model.site_group[hidden_sites] = _HIDDEN_GROUP
        self._camera.fixedcamid = camera
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(
            model, self.data, self._options, self._perturbation, self._camera, everything, self.scene
        )
        model.geom_group[:], model.site_group[:], model.mat_reflectance[:] = groups, sites, reflectance

    def draw(self, *, mirror: bool = False, sky: bool = True, background: int | None = None) -> None:
        """Draw the scene. ``background``: a frame buffer that is bound for reading meanwhile."""
        self.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = mirror
        self.scene.flags[mujoco.mjtRndFlag.mjRND_SKYBOX] = sky
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.context)
        if background is not None:
            from OpenGL import GL

            GL.glBindFramebuffer(GL.GL_READ_FRAMEBUFFER, background)
        mujoco.mjr_render(self._viewport, self.scene, self.context)

    def read(self) -> None:
        """Fetch what was drawn into ``pixels``."""
        mujoco.mjr_readPixels(self.pixels, None, self._viewport, self.context)

    def close(self) -> None:
        """Safe to call twice."""
        if self.context is not None:
            self.use()
            self.context.free()
            self.context = None


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
