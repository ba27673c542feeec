"""What the renderer leaves out changes no pixel; anti-aliasing does, and is on unless switched off."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mujoco
import numpy as np
import pytest

from envs.libero.bootstrap import import_libero
from envs.libero.fast import lean_drawing
from envs.libero.fast.rendering import Renderer, _Pass
from envs.libero.fast.task_model import TaskModel
from envs.libero.protocol.tasks import suite_tasks

pytestmark = pytest.mark.libero

SIZE = 64
CAMERAS = ("agentview", "robot0_eye_in_hand")
TASKS = [("libero_spatial", 7), ("libero_object", 2), ("libero_goal", 3), ("libero_90", 20)]


@pytest.fixture(scope="module", params=TASKS)
def scene(request):
    """Tasks with a stove or a bowl (mirrors on original assets), one on the floor, one in a kitchen."""
    suite, number = request.param
    model = TaskModel(suite_tasks(suite)[number], import_libero())
    state = model.new_state()
    model.place(state, 0, None)
    return model, state


def images(renderer, model, state, qpos=None):
    renderer.pose(state.seen.qpos if qpos is None else qpos)
    views = np.zeros((2, renderer.size, renderer.size, 3), np.uint8)
    for view, name in zip(views, CAMERAS, strict=True):
        renderer.render(model.model.camera(name).id, view)
    return views


def draw_everything(renderer):
    """Switch off all that the renderer leaves out: one drawing of the whole scene, with its mirror."""
    everything = _Pass(True, np.zeros(len(renderer._shapes), dtype=bool), (0, renderer.size, 0, renderer.size))
    renderer._plan = lambda camera: [everything]
    renderer._lean.obstacle = "switched off"


def arm_poses(model, state, count):
    """The state's own pose, and others with the robot's joints anywhere in their ranges."""
    yield state.seen.qpos
    generator = np.random.default_rng(0)
    joints = [j for j in range(model.model.njnt) if model.model.joint(j).name.startswith(("robot0_", "gripper0_"))]
    for _ in range(count):
        qpos = state.seen.qpos.copy()
        qpos[model.model.jnt_qposadr[joints]] = generator.uniform(*model.model.jnt_range[joints].T)
        yield qpos


def test_leaving_out_what_no_camera_sees_changes_nothing(scene):
    model, state = scene
    lean, plain = Renderer(model.model, SIZE), Renderer(model.model, SIZE)
    draw_everything(plain)
    groups = model.model.geom_group.copy()
    for qpos in arm_poses(model, state, 2):
        assert np.array_equal(images(lean, model, state, qpos), images(plain, model, state, qpos))
        assert np.array_equal(model.model.geom_group, groups)
        plans = [lean._plan(model.model.camera(name).id) for name in CAMERAS]
        assert any(plan[0].hidden.any() for plan in plans)
    lean.close()
    lean.close()
    plain.close()


@pytest.fixture
def small_mirror(scene):
    """A small mirror that floats before the first camera, made of a box that does not move."""
    model, state = scene[0].model, scene[1]
    fixed = model.body_weldid[model.geom_bodyid] == 0
    boxes = (model.geom_type == mujoco.mjtGeom.mjGEOM_BOX) & (model.geom_matid >= 0) & (model.geom_rgba[:, 3] == 1)
    mirror = np.flatnonzero(fixed & boxes & np.isin(model.geom_group, (1, 2)))[0]
    names = ("mat_reflectance", "geom_pos", "geom_quat", "geom_size", "geom_aabb", "geom_rbound")
    before = {name: getattr(model, name).copy() for name in names}
    data = mujoco.MjData(model)
    data.qpos[:] = state.seen.qpos
    mujoco.mj_forward(model, data)
    camera, body = model.camera(CAMERAS[0]).id, model.geom_bodyid[mirror]
    place = data.cam_xpos[camera] - 0.6 * data.cam_xmat[camera].reshape(3, 3)[:, 2]
    model.mat_reflectance[:] = 0
    model.mat_reflectance[model.geom_matid[mirror]] = 0.5
    model.geom_pos[mirror] = data.xmat[body].reshape(3, 3).T @ (place - data.xpos[body])
    mujoco.mju_negQuat(model.geom_quat[mirror], data.xquat[body])
    model.geom_size[mirror] = model.geom_aabb[mirror, 3:] = 0.02, 0.03, 0.005
    model.geom_rbound[mirror] = 0.04
    yield mirror
    for name, value in before.items():
        getattr(model, name)[:] = value


def test_a_small_mirror_is_drawn_apart_and_changes_nothing(scene, small_mirror):
    model, state = scene
    lean, plain = Renderer(model.model, SIZE), Renderer(model.model, SIZE)
    draw_everything(plain)
    assert lean._mirror == small_mirror
    apart = False
    for qpos in arm_poses(model, state, 1):
        assert np.array_equal(images(lean, model, state, qpos), images(plain, model, state, qpos))
        apart |= any(len(lean._plan(model.model.camera(name).id)) == 2 for name in CAMERAS)
    assert apart
    lean.close()
    plain.close()


def test_antialiasing_is_a_choice(scene):
    model, state = scene
    smooth, rough = Renderer(model.model, SIZE), Renderer(model.model, SIZE, antialiasing=False)
    one, other = images(smooth, model, state).astype(int), images(rough, model, state).astype(int)
    assert 0 < np.abs(one - other).mean() < 8
    assert np.array_equal(images(smooth, model, state), one)
    smooth.close()
    rough.close()


def test_another_thread_draws_the_same(scene):
    """Each thread has a context of its own; this one's stays current meanwhile."""
    model, state = scene
    here = Renderer(model.model, SIZE)
    drawn = images(here, model, state)

    def draw() -> np.ndarray:
        there = Renderer(model.model, SIZE)
        found = images(there, model, state)
        there.close()
        return found

    with ThreadPoolExecutor(1) as thread:
        assert np.array_equal(thread.submit(draw).result(), drawn)
    assert np.array_equal(images(here, model, state), drawn)
    here.close()
    names = [name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in names if name.startswith("llvmpipe-")], "see mujoco_setup._DRAWING_THREADS"


def always_lean(renderer):
    """Never draw fully to compare, nor because it is faster. Returns a list that gets an item for each lean drawing."""
    drawn, draw = [], renderer._lean.draw

    def counted(camera, hidden):
        draw(camera, hidden)
        drawn.append(camera)

    renderer._lean.draw = counted
    for name in CAMERAS:
        renderer._comparisons[renderer._model.camera(name).id].drawn = 1024  # the next one is not compared
    return drawn


@pytest.mark.parametrize("options", [{"size": 64}, {"size": 200}, {"size": 64, "antialiasing": False}])
def test_lean_drawings_have_the_same_pixels(scene, options):
    """Two environments of a model, whose fixtures stand elsewhere, draw in turn, in all poses of the arm."""
    model, state = scene
    other = model.new_state()
    model.place(other, 1, None)
    lean, full = Renderer(model.model, **options), Renderer(model.model, **options)
    assert not lean.obstacle
    drawn = always_lean(lean)
    full._lean.obstacle = "switched off"
    faces = model.model.mesh_face.copy(), model.model.mesh_facenum.copy(), model.model.mesh_graphadr.copy()
    for qpos, joints in zip(arm_poses(model, other, 4), arm_poses(model, state, 4), strict=True):
        for own, pose in ((other, qpos), (state, joints)):
            model.bind(own)
            assert np.array_equal(images(lean, model, own, pose), images(full, model, own, pose))
    assert len(drawn) >= 10  # of 20; mirrors are drawn fully
    assert any(view.resting.any() for view in lean._lean._views.values())  # objects, while the arm moves
    after = model.model.mesh_face, model.model.mesh_facenum, model.model.mesh_graphadr
    assert all(np.array_equal(before, now) for before, now in zip(faces, after, strict=True))
    model.bind(state)
    lean.close()
    full.close()


def test_a_changed_colour_or_light_is_drawn(scene):
    """A picture of what stands still is kept only as long as it would look the same."""
    model, state = scene[0].model, scene[1]
    lean, full = Renderer(model, SIZE), Renderer(model, SIZE)
    always_lean(lean)
    full._lean.obstacle = "switched off"
    still = np.flatnonzero((model.body_weldid[model.geom_bodyid] == 0) & (model.geom_group == 1))
    seen = [images(lean, scene[0], state)]
    for values, where in ((model.geom_rgba, (still, slice(3))), (model.light_diffuse, ...)):
        before = values[where].copy()
        values[where] = 0.2
        seen.append(images(lean, scene[0], state))
        assert np.array_equal(seen[-1], images(full, scene[0], state))
        values[where] = before
    assert not np.array_equal(seen[0], seen[2])
    lean.close()
    full.close()


def test_a_wrong_lean_drawing_is_noticed_and_the_last_one(scene, monkeypatch, caplog):
    model, state = scene
    lean, full = Renderer(model.model, SIZE), Renderer(model.model, SIZE)
    full._lean.obstacle = "switched off"
    right = images(full, model, state)
    monkeypatch.setattr(lean_drawing, "find_visible", lambda *_: True)  # nothing can be seen
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(images(lean, model, state), right)
    assert "pixels of a lean drawing were wrong" in caplog.text
    assert lean.wrong_pixels > 0
    monkeypatch.setattr(lean._lean, "draw", None)
    assert np.array_equal(images(lean, model, state), right)
    assert lean._lean._views
    lean.close()
    assert not lean._lean._views
    full.close()


def test_too_many_candidates_leave_nothing_out(scene, monkeypatch):
    model, state = scene
    lean, full = Renderer(model.model, SIZE), Renderer(model.model, SIZE)
    always_lean(lean)
    full._lean.obstacle = "switched off"
    monkeypatch.setattr(lean_drawing, "find_visible", lambda *_: False)
    assert np.array_equal(images(lean, model, state), images(full, model, state))
    lean.close()
    full.close()
