"""What the renderer leaves out changes no pixel; anti-aliasing does, and is on unless switched off."""

import numpy as np
import pytest

from envs.libero.bootstrap import import_libero
from envs.libero.rendering import Renderer
from envs.libero.task_model import TaskModel
from envs.libero.tasks import suite_tasks

pytestmark = pytest.mark.libero

SIZE = 64


@pytest.fixture(scope="module", params=[("libero_spatial", 7), ("libero_object", 2), ("libero_90", 20)])
def scene(request):
    """A task with a stove (a mirror on original assets), one on the floor, one in a kitchen."""
    suite, number = request.param
    model = TaskModel(suite_tasks(suite)[number], import_libero())
    slot = model.new_slot()
    model.place(slot, 0, None)
    return model, slot


def images(renderer, model, slot):
    renderer.pose(slot.seen.qpos)
    views = np.zeros((2, SIZE, SIZE, 3), np.uint8)
    for view, name in zip(views, ("agentview", "robot0_eye_in_hand"), strict=True):
        renderer.render(model.model.camera(name).id, view)
    return views


def test_leaving_out_what_no_camera_sees_changes_nothing(scene):
    model, slot = scene
    renderer = Renderer(model.model, SIZE)
    groups = model.model.geom_group.copy()
    lean = images(renderer, model, slot)
    assert np.array_equal(model.model.geom_group, groups)
    hidden = [len(renderer._what_shows(model.model.camera(name).id)[1]) for name in ("agentview", "robot0_eye_in_hand")]
    assert max(hidden) > 0
    renderer._what_shows = lambda camera: (True, np.array([], dtype=int))
    assert np.array_equal(images(renderer, model, slot), lean)
    renderer.close()
    renderer.close()


def test_antialiasing_is_a_choice(scene):
    model, slot = scene
    smooth, rough = Renderer(model.model, SIZE), Renderer(model.model, SIZE, antialiasing=False)
    one, other = images(smooth, model, slot).astype(int), images(rough, model, slot).astype(int)
    assert 0 < np.abs(one - other).mean() < 8
    assert np.array_equal(images(smooth, model, slot), one)
    smooth.close()
    rough.close()
