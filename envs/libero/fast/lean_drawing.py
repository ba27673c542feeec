"""A drawing with the same pixels from a fraction of the triangles, for renderers that run on processor cores.

Software rendering spends its time on triangles, and nearly all of LIBERO's are the robot's: 130,000 for an image of
9,000 pixels. Three things are done about it.

* Of meshes, only triangles that can be seen are drawn (``visible_faces``). MuJoCo puts them into display lists of
  their own, which it then calls in place of those of whole meshes.
* What stands still before a camera that stands still is drawn once, kept with the colours and depths of all samples,
  and put back as the first "shape" of each drawing.
* The lists of bodies that rest are used again. What such a body hides of others is not left out then.

All of it depends on how the renderer rounds, so ``Renderer`` compares such drawings with full ones.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import mujoco
import numpy as np

from envs.libero.fast.canvas import Canvas
from envs.libero.fast.views import View
from envs.libero.fast.visible_faces import BOX, Meshes, Scratch, Shapes, Slack, find_visible, narrow, widen

_SOFTWARE = "llvmpipe"  # in the name of the GL renderer
_OPAQUE = 0.995  # alpha from which MuJoCo takes a shape for opaque
_VIEW_BYTES = 8 << 20  # for all of a canvas
_FEWEST_VIEWS = 8  # one for each environment of a process
_SAMPLE_BYTES = 16  # of colour, depth and ``nearest``
_LIGHTS_POSES = ("light_xpos", "light_xdir")
_LOOKS = (
    *("light_active", "light_ambient", "light_diffuse", "light_specular"),
    *("mat_rgba", "mat_emission", "mat_specular", "mat_shininess"),
)
_MOVING = Slack(np.float32(1 / 256), np.float32(1e-4))
_REST = 1 / 256  # pixels by which a body that rests may move
_RESTING = Slack(np.float32(1 / 256 + 2 * _REST), np.float32(1e-3))


class LeanDrawing:
    """Draws on a canvas. ``obstacle`` says why it cannot; empty if it can. ``again`` repeats the last drawing."""

    again: Callable[[], None]

    def __init__(self, canvas: Canvas) -> None:
        self._canvas = canvas
        self._views: OrderedDict[bytes, View] = OrderedDict()
        model, alphas = canvas.model, _alphas(canvas.model)
        drawn = canvas.drawn_groups(model.geom_group)
        self._still = (model.body_weldid[model.geom_bodyid] == 0) & (alphas >= _OPAQUE)
        first = np.flatnonzero(drawn & (alphas > 0))[:1]
        self.obstacle = self._find_obstacle(first)
        if self.obstacle:
            return
        self._first = int(first[0])  # the scene's first shape; the picture of what stands still takes its place
        is_mesh, is_box = (model.geom_type == kind for kind in (mujoco.mjtGeom.mjGEOM_MESH, mujoco.mjtGeom.mjGEOM_BOX))
        self._whole = np.unique(model.geom_dataid[drawn & is_mesh & (alphas < _OPAQUE)])  # seen through
        self._solid = solid = np.flatnonzero(drawn & (is_mesh | is_box) & (alphas >= _OPAQUE))
        self._mesh = np.where(is_mesh, model.geom_dataid, BOX)[solid].astype(np.int64)
        self._body = np.unique(model.geom_bodyid[solid], return_inverse=True)[1]
        self._shares = _shared(self._mesh, self._body)
        self._scale = np.where(is_box[solid, None], model.geom_size[solid], 1.0)  # of a box, from a cube
        bounds = model.geom_aabb[solid].reshape(-1, 2, 3)  # centre and half sizes
        self._corners = bounds[:, :1] + np.array(list(product((-1, 1), repeat=3))) * bounds[:, 1:]  # [N, 8, 3]
        self._samples = canvas.sample_places()
        self._meshes = Meshes.of(model)
        self._scratch = Scratch.of(self._meshes, model.ngeom, len(self._samples), canvas.size)
        self._near = np.float32(1.01 * model.vis.map.znear * model.stat.extent)
        bytes_each = len(self._samples) * canvas.size**2 * _SAMPLE_BYTES
        self._most_views = max(_FEWEST_VIEWS, _VIEW_BYTES // bytes_each)

    def _find_obstacle(self, first: np.ndarray) -> str:
        model, renderer = self._canvas.model, self._canvas.renderer_name()
        if _SOFTWARE not in renderer:
            return f"the renderer is {renderer}"
        if model.light_castshadow.any():
            return "lights cast shadows"
        if model.nskin or model.nflex:
            return "there are soft bodies"
        if not len(first) or not self._still[first[0]]:
            return "no shape stands still"
        return ""

    def draw(self, camera: int, outside: np.ndarray) -> None:
        """Draw what the camera sees, without mirrors, into the canvas's ``pixels``. ``outside``: geometries (indices)
        that are not in the view."""
        canvas, model, solid = self._canvas, self._canvas.model, self._solid
        moves = bool(model.body_weldid[model.cam_bodyid[camera]] != 0)
        view = self._view(camera, moves)
        left_out = np.zeros(model.ngeom, dtype=bool) if moves else self._still.copy()
        left_out[outside] = True
        hidden = self._compile_visible(view, camera, ~left_out[solid])
        left_out[self._first] &= moves
        left_out[solid[hidden]] = True
        canvas.show(camera, left_out, model.site_rgba[:, 3] <= 0, reflecting=False)
        if not moves:
            self._put_hook(canvas.scene.geoms[0], view.hook)
        self.again = partial(self._fill, view, moves)
        self.again()

    def _fill(self, view: View, moves: bool) -> None:
        """Draw the scene with a view's display lists into the canvas's ``pixels``."""
        canvas = self._canvas
        own, canvas.context.baseMesh = canvas.context.baseMesh, view.lists
        canvas.draw(sky=moves, background=view.frame)
        canvas.context.baseMesh = own
        canvas.read()

    def _put_hook(self, shape: Any, hook: int) -> None:
        """Replace the scene's first shape by the picture of what stands still."""
        assert shape.objtype == mujoco.mjtObj.mjOBJ_GEOM
        assert shape.objid == self._first
        shape.type, shape.dataid, shape.matid = mujoco.mjtGeom.mjGEOM_MESH, hook, -1
        shape.rgba[:], shape.emission, shape.reflectance, shape.texcoord = 1, 0, 0, 0

    def _compile_visible(self, view: View, camera: int, shown: np.ndarray) -> np.ndarray:
        """Put what can be seen of these solid shapes (bool [N]) into display lists. Returns a mask of those of which
        nothing can."""
        projections = self._projections(camera)
        corners = projections[:, None, :, :3] @ self._corners[..., None] + projections[:, None, :, 3:]
        distances = corners[:, :, 2, 0]
        pixels = corners[:, :, :2, 0] / distances[..., None]
        inside = (pixels > 1).all(axis=(1, 2)) & (pixels < self._canvas.size - 1).all(axis=(1, 2))
        inside &= (distances > self._near).all(axis=1) & shown & ~self._shares
        rests = self._all_of_body(inside & (np.abs(pixels - view.corners) < _REST).all(axis=(1, 2)))
        stays = rests & view.resting
        view.corners[~stays], view.resting[:] = pixels[~stays], rests
        view.hidden[~stays] = False
        for body in np.unique(self._body[rests & ~stays]):
            self._compile(view, projections, self._body == body, _RESTING)
        self._compile(view, projections, shown & ~rests, _MOVING)
        return view.hidden

    def _all_of_body(self, shapes: np.ndarray) -> np.ndarray:
        """Of a mask of solid shapes, those whose bodies have no others."""
        return (np.bincount(self._body, ~shapes) == 0)[self._body]

    def _compile(self, view: View, projections: np.ndarray, shown: np.ndarray, slack: Slack) -> None:
        """Put what can be seen of the meshes of these shapes into a view's display lists."""
        meshes, scratch = self._meshes, self._scratch
        scratch.nearest[:] = view.nearest
        is_known = self._search(projections, shown, slack)
        names = len(meshes.faces) + self._solid
        for mesh in np.unique(self._mesh[shown]).tolist():
            if mesh == BOX:
                boxes = shown & (self._mesh == BOX)
                view.hidden[boxes] = is_known & ~scratch.kept[names[boxes]]
                scratch.kept[names[boxes]] = False
            elif is_known:
                count = narrow(meshes, mesh, scratch)
                try:
                    if count:
                        self._upload(view, mesh, count)
                    view.hidden[shown & (self._mesh == mesh)] = not count
                finally:
                    widen(meshes, mesh, scratch, count)
            else:
                self._upload(view, mesh)

    def _search(self, projections: np.ndarray, shown: np.ndarray, slack: Slack) -> bool:
        order = np.flatnonzero(shown)
        order = order[np.argsort(projections[order, 2, 3])]  # from near to far
        names = len(self._meshes.faces) + self._solid[order]
        scaled = projections[order] * np.append(self._scale[order], np.ones((len(order), 1)), axis=1)[:, None]
        shapes = Shapes(self._mesh[order], names, scaled.astype(np.float32))
        return bool(find_visible(self._meshes, shapes, self._samples, self._near, slack, self._scratch))

    def _upload(self, view: View, mesh: int, count: int | None = None) -> None:
        """The first ``count`` faces of a mesh, or all; not its convex hull."""
        model, context = self._canvas.model, self._canvas.context
        faces, hull = model.mesh_facenum[mesh], model.mesh_graphadr[mesh]
        model.mesh_graphadr[mesh] = -1
        if count is not None:
            model.mesh_facenum[mesh] = count
        own, context.baseMesh = context.baseMesh, view.lists
        mujoco.mjr_uploadMesh(model, context, mesh)
        context.baseMesh = own
        model.mesh_facenum[mesh], model.mesh_graphadr[mesh] = faces, hull

    def _projections(self, camera: int) -> np.ndarray:
        """float64 [N, 3, 4]: from a solid shape's coordinates in metres to (pixel * distance, pixel * distance,
        distance)."""
        model, data, half = self._canvas.model, self._canvas.data, self._canvas.size / 2
        focal = half / np.tan(np.radians(model.cam_fovy[camera]) / 2)
        lens = np.array([[focal, 0, -half], [0, focal, -half], [0, 0, -1]])  # cameras look along their negative z axis
        lens = lens @ data.cam_xmat[camera].reshape(3, 3).T
        turned = lens @ data.geom_xmat[self._solid].reshape(-1, 3, 3)
        offsets = (data.geom_xpos[self._solid] - data.cam_xpos[camera]) @ lens.T
        return np.concatenate([turned, offsets[..., None]], axis=2)

    def _view(self, camera: int, moves: bool) -> View:
        """The view of what stands still, as it is now; drawn if it is not kept."""
        key = str(camera).encode() if moves else self._appearance(camera)
        if key in self._views:
            self._views.move_to_end(key)
            return self._views[key]
        if len(self._views) >= self._most_views:
            view = self._views.popitem(last=False)[1]
            view.forget()
        else:
            view = View(self._canvas, self._scratch.nearest, len(self._solid))
            for mesh in self._whole.tolist():
                self._upload(view, mesh)
        self._scratch.nearest[:] = 0
        if not moves:
            canvas = self._canvas
            canvas.show(camera, ~self._still, np.ones(canvas.model.nsite, dtype=bool), reflecting=False)
            canvas.draw()
            view.keep_picture()
            self._search(self._projections(camera), self._still[self._solid], _MOVING)
            self._scratch.kept[:] = False
        view.nearest[:] = self._scratch.nearest
        self._views[key] = view
        return view

    def _appearance(self, camera: int) -> bytes:
        """What the picture of all that stands still depends on, but for textures."""
        model, data, still = self._canvas.model, self._canvas.data, self._still
        own = data.cam_xpos[camera], data.cam_xmat[camera], data.geom_xpos[still], data.geom_xmat[still]
        parts = (*own, model.geom_rgba[still], *(getattr(data, name) for name in _LIGHTS_POSES))
        return b"".join(part.tobytes() for part in (*parts, *(getattr(model, name) for name in _LOOKS)))

    def close(self) -> None:
        """Free what the GL library holds; safe to call twice."""
        self.obstacle = self.obstacle or "it is closed"
        while self._views:
            self._views.popitem()[1].close()


def _alphas(model: Any) -> np.ndarray:
    """float32 [geometries]: the lower of the geometry's own and its material's."""
    found: np.ndarray = model.geom_rgba[:, 3].copy()
    has = model.geom_matid >= 0
    found[has] = np.minimum(found[has], model.mat_rgba[model.geom_matid[has], 3])
    return found


def _shared(meshes: np.ndarray, bodies: np.ndarray) -> np.ndarray:
    """bool [N]: shapes whose mesh another body has, too."""
    pairs = {(mesh, body) for mesh, body in zip(meshes.tolist(), bodies.tolist(), strict=True) if mesh != BOX}
    owners = [mesh for mesh, _ in pairs]
    return np.array([mesh != BOX and owners.count(mesh) > 1 for mesh in meshes.tolist()], dtype=bool)
