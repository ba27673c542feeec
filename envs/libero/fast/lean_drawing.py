"""A drawing with the same pixels from a twentieth of the triangles, for renderers that run on processor cores.

Software rendering spends its time on triangles, and nearly all of LIBERO's are the robot's: 130,000 for an image of
9,000 pixels. Two things are done about it.

* Of meshes, only triangles that can be seen are drawn (``visible_faces``). MuJoCo puts them into display lists of
  their own, which it then calls in place of those of whole meshes.
* What stands still before a camera that stands still is drawn once, kept with the colours and depths of all samples,
  and put back as the first "shape" of each drawing.

Both depend on how the renderer rounds, so ``Renderer`` compares such drawings with full ones.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import mujoco
import numpy as np

from envs.libero.fast.canvas import Canvas
from envs.libero.fast.visible_faces import BOX, Meshes, Scratch, Shapes, find_visible, narrow, widen

_SOFTWARE = "llvmpipe"  # in the name of the GL renderer
_OPAQUE = 0.995  # alpha from which MuJoCo takes a shape for opaque
_BACKGROUND_BYTES = 64 << 20  # for all of a canvas
_FEWEST_BACKGROUNDS = 8  # one for each environment of a process
_SAMPLE_BYTES = 16  # of colour, depth and ``nearest``
_LIGHTS_POSES = ("light_xpos", "light_xdir")
_LOOKS = (
    *("light_active", "light_ambient", "light_diffuse", "light_specular"),
    *("mat_rgba", "mat_emission", "mat_specular", "mat_shininess"),
)


class _Background(NamedTuple):
    """What stands still: names of GL objects, and the inverse of the distance at each sample (``Scratch.nearest``)."""

    frame: int
    color: int
    depth: int
    nearest: np.ndarray


class LeanDrawing:
    """Draws on a canvas. ``obstacle`` says why it cannot; empty if it can."""

    def __init__(self, canvas: Canvas) -> None:
        from OpenGL import GL

        self._canvas, self._gl = canvas, GL
        model = canvas.model
        alphas = np.minimum(model.geom_rgba[:, 3], _material(model, model.mat_rgba[:, 3], 1.0))
        drawn = canvas.drawn_groups(model.geom_group)
        self._still = (model.body_weldid[model.geom_bodyid] == 0) & (alphas >= _OPAQUE)
        first = np.flatnonzero(drawn & (alphas > 0))[:1]
        self.obstacle = self._find_obstacle(first)
        if self.obstacle:
            return
        self._first = int(first[0])  # the scene's first shape; the background takes its place
        is_mesh, is_box = (model.geom_type == kind for kind in (mujoco.mjtGeom.mjGEOM_MESH, mujoco.mjtGeom.mjGEOM_BOX))
        self._solid = np.flatnonzero(drawn & (is_mesh | is_box) & (alphas >= _OPAQUE))
        self._samples = self._sample_places()
        self._meshes = Meshes.of(model)
        self._scratch = Scratch.of(self._meshes, model.ngeom, len(self._samples), canvas.size)
        self._mesh_of = np.where(is_mesh, model.geom_dataid, BOX).astype(np.int64)
        self._scale = np.where(is_box[:, None], model.geom_size, 1.0)  # of a box, from a cube
        self._lists = int(GL.glGenLists(2 * model.nmesh + 1))  # MuJoCo's have two for each mesh
        self._hook = 2 * model.nmesh
        self._backgrounds: OrderedDict[bytes, _Background] = OrderedDict()
        bytes_each = max(1, len(self._samples)) * canvas.size**2 * _SAMPLE_BYTES
        self._most_backgrounds = max(_FEWEST_BACKGROUNDS, _BACKGROUND_BYTES // bytes_each)
        self._compile_hook()
        for mesh in np.unique(model.geom_dataid[drawn & is_mesh & (alphas < _OPAQUE)]).tolist():
            self._upload(mesh)

    def _find_obstacle(self, first: np.ndarray) -> str:
        model, GL = self._canvas.model, self._gl
        renderer = GL.glGetString(GL.GL_RENDERER).decode()
        if _SOFTWARE not in renderer:
            return f"the renderer is {renderer}"
        if model.light_castshadow.any():
            return "lights cast shadows"
        if model.nskin or getattr(model, "nflex", 0):
            return "there are soft bodies"
        if not len(first) or not self._still[first[0]]:
            return "no shape stands still"
        return ""

    def _sample_places(self) -> np.ndarray:
        """float32 [S, 2]: where in a pixel the renderer samples."""
        GL = self._gl
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._canvas.context)
        places = np.full((max(1, int(GL.glGetIntegerv(GL.GL_SAMPLES))), 2), 0.5, np.float32)
        for number, place in enumerate(places if len(places) > 1 else ()):
            GL.glGetMultisamplefv(GL.GL_SAMPLE_POSITION, number, place)
        return places

    def draw(self, camera: int, hidden: np.ndarray) -> None:
        """Draw what the camera sees, without mirrors, into the canvas's ``pixels``. ``hidden``: geometries (indices)
        outside the view."""
        canvas = self._canvas
        model = canvas.model
        moves = model.body_weldid[model.cam_bodyid[camera]] != 0
        background = None if moves else self._background(camera)
        left_out = np.zeros(model.ngeom, dtype=bool) if moves else self._still.copy()
        left_out[hidden] = True
        shown = self._solid[~left_out[self._solid]]
        left_out[self._first] &= moves
        self._scratch.nearest[:] = 0 if background is None else background.nearest
        left_out[self._upload_visible(camera, shown)] = True
        canvas.show(camera, left_out, model.site_rgba[:, 3] <= 0, reflecting=False)
        if background is not None:
            self._put_hook(canvas.scene.geoms[0])
        own, canvas.context.baseMesh = canvas.context.baseMesh, self._lists
        canvas.draw(sky=moves, background=None if background is None else background.frame)
        canvas.context.baseMesh = own
        canvas.read()

    def _put_hook(self, shape: Any) -> None:
        """Replace the scene's first shape by the background."""
        assert shape.objtype == mujoco.mjtObj.mjOBJ_GEOM
        assert shape.objid == self._first
        shape.type, shape.dataid, shape.matid = mujoco.mjtGeom.mjGEOM_MESH, self._hook, -1
        shape.rgba[:], shape.emission, shape.reflectance, shape.texcoord = 1, 0, 0, 0

    def _upload_visible(self, camera: int, shown: np.ndarray) -> np.ndarray:
        """Put what can be seen of these geometries' meshes into display lists. Returns those of which nothing can."""
        meshes, scratch = self._meshes, self._scratch
        is_known = self._find_visible(camera, shown)
        numbers = self._mesh_of[shown]
        boxes = shown[numbers == BOX]
        names = len(meshes.faces) + boxes
        hidden = [boxes[~scratch.kept[names]] if is_known else boxes[:0]]
        scratch.kept[names] = False
        for mesh in np.unique(numbers[numbers != BOX]).tolist():
            if not is_known:
                self._upload(mesh)
                continue
            count = narrow(meshes, mesh, scratch)
            try:
                if count:
                    self._upload(mesh, count)
                else:
                    hidden.append(shown[numbers == mesh])
            finally:
                widen(meshes, mesh, scratch, count)
        return np.concatenate(hidden)

    def _find_visible(self, camera: int, shown: np.ndarray) -> bool:
        model = self._canvas.model
        near = np.float32(1.01 * model.vis.map.znear * model.stat.extent)
        return bool(find_visible(self._meshes, self._shapes(camera, shown), self._samples, near, self._scratch))

    def _upload(self, mesh: int, count: int | None = None) -> None:
        """The first ``count`` faces of a mesh, or all; not its convex hull."""
        model, context = self._canvas.model, self._canvas.context
        faces, hull = model.mesh_facenum[mesh], model.mesh_graphadr[mesh]
        model.mesh_graphadr[mesh] = -1
        if count is not None:
            model.mesh_facenum[mesh] = count
        own, context.baseMesh = context.baseMesh, self._lists
        mujoco.mjr_uploadMesh(model, context, mesh)
        context.baseMesh = own
        model.mesh_facenum[mesh], model.mesh_graphadr[mesh] = faces, hull

    def _shapes(self, camera: int, shown: np.ndarray) -> Shapes:
        """These geometries before the camera."""
        model, data, half = self._canvas.model, self._canvas.data, self._canvas.size / 2
        focal = half / np.tan(np.radians(model.cam_fovy[camera]) / 2)
        lens = np.array([[focal, 0, -half], [0, focal, -half], [0, 0, -1]])  # cameras look along their negative z axis
        lens = lens @ data.cam_xmat[camera].reshape(3, 3).T
        shown = shown[np.argsort((data.geom_xpos[shown] - data.cam_xpos[camera]) @ lens[2])]
        turned = lens @ data.geom_xmat[shown].reshape(-1, 3, 3) * self._scale[shown, None]
        offsets = (data.geom_xpos[shown] - data.cam_xpos[camera]) @ lens.T
        projection = np.concatenate([turned, offsets[..., None]], axis=2).astype(np.float32)
        return Shapes(self._mesh_of[shown], len(self._meshes.faces) + shown, projection)

    def _compile_hook(self) -> None:
        """A display list that copies the frame buffer bound for reading, with its depths, into the drawing."""
        self._gl.glNewList(self._lists + self._hook, self._gl.GL_COMPILE)
        self._copy()
        self._gl.glEndList()

    def _copy(self) -> None:
        GL, size = self._gl, self._canvas.size
        parts = GL.GL_COLOR_BUFFER_BIT | GL.GL_DEPTH_BUFFER_BIT
        GL.glBlitFramebuffer(0, 0, size, size, 0, 0, size, size, parts, GL.GL_NEAREST)

    def _background(self, camera: int) -> _Background:
        """What stands still, as it is now; drawn if it is not kept."""
        canvas, GL = self._canvas, self._gl
        key = self._appearance(camera)
        if key in self._backgrounds:
            self._backgrounds.move_to_end(key)
            return self._backgrounds[key]
        full = len(self._backgrounds) >= self._most_backgrounds
        background = self._backgrounds.popitem(last=False)[1] if full else self._new_background()
        canvas.show(camera, ~self._still, np.ones(canvas.model.nsite, dtype=bool), reflecting=False)
        canvas.draw()
        GL.glBindFramebuffer(GL.GL_READ_FRAMEBUFFER, canvas.context.offFBO)
        GL.glBindFramebuffer(GL.GL_DRAW_FRAMEBUFFER, background.frame)
        self._copy()
        self._scratch.nearest[:] = 0
        self._find_visible(camera, self._solid[self._still[self._solid]])
        self._scratch.kept[:] = False
        background.nearest[:] = self._scratch.nearest
        self._backgrounds[key] = background
        return background

    def _appearance(self, camera: int) -> bytes:
        """What the picture of all that stands still depends on, but for textures."""
        model, data, still = self._canvas.model, self._canvas.data, self._still
        own = data.cam_xpos[camera], data.cam_xmat[camera], data.geom_xpos[still], data.geom_xmat[still]
        parts = (*own, model.geom_rgba[still], *(getattr(data, name) for name in _LIGHTS_POSES))
        return b"".join(part.tobytes() for part in (*parts, *(getattr(model, name) for name in _LOOKS)))

    def _new_background(self) -> _Background:
        GL, context, size = self._gl, self._canvas.context, self._canvas.size
        frame, (color, depth) = int(GL.glGenFramebuffers(1)), map(int, GL.glGenRenderbuffers(2))
        GL.glBindFramebuffer(GL.GL_FRAMEBUFFER, frame)
        places = GL.GL_COLOR_ATTACHMENT0, GL.GL_DEPTH_STENCIL_ATTACHMENT
        for like, own, place in zip((context.offColor, context.offDepthStencil), (color, depth), places, strict=True):
            GL.glBindRenderbuffer(GL.GL_RENDERBUFFER, like)
            names = GL.GL_RENDERBUFFER_SAMPLES, GL.GL_RENDERBUFFER_INTERNAL_FORMAT
            samples, kind = (int(GL.glGetRenderbufferParameteriv(GL.GL_RENDERBUFFER, name)) for name in names)
            GL.glBindRenderbuffer(GL.GL_RENDERBUFFER, own)
            GL.glRenderbufferStorageMultisample(GL.GL_RENDERBUFFER, samples, kind, size, size)
            GL.glFramebufferRenderbuffer(GL.GL_FRAMEBUFFER, place, GL.GL_RENDERBUFFER, own)
        return _Background(frame, color, depth, np.empty_like(self._scratch.nearest))

    def close(self) -> None:
        """Free what the GL library holds; safe to call twice."""
        if self.obstacle:
            return
        self.obstacle = "it is closed"
        self._gl.glDeleteLists(self._lists, 2 * self._canvas.model.nmesh + 1)
        for background in self._backgrounds.values():
            self._gl.glDeleteFramebuffers(1, [background.frame])
            self._gl.glDeleteRenderbuffers(2, [background.color, background.depth])
        self._backgrounds.clear()


def _material(model: Any, values: np.ndarray, default: float) -> np.ndarray:
    """Of each geometry's material; ``default`` where it has none."""
    found = np.full(model.ngeom, default)
    has = model.geom_matid >= 0
    found[has] = values[model.geom_matid[has]]
    return found
