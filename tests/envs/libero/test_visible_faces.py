"""Which triangles decide a pixel: against a search over all triangles and samples."""

import numpy as np
import pytest

from envs.libero.fast.visible_faces import BOX, Meshes, Scratch, Shapes, Slack, find_visible, narrow, widen

SIZE, NEAR = 12, np.float32(0.01)
SLACK = Slack(np.float32(1 / 256), np.float32(1e-4))
SAMPLES = np.array([[0.375, 0.125], [0.875, 0.375], [0.125, 0.625], [0.625, 0.875]], np.float32)
PROJECTION = np.array([[SIZE, 0, SIZE / 2, 0], [0, SIZE, SIZE / 2, 0], [0, 0, 1, 0]], np.float32)  # looks along +z


def meshes_of(corners: np.ndarray, textured: bool = False) -> Meshes:
    """One mesh of triangles float32 [F, 3, 3]."""
    faces = np.arange(3 * len(corners), dtype=np.int32).reshape(-1, 3)
    ranges = [np.array([[0, count]]) for count in (3 * len(corners), len(corners))]
    texture = faces + 2 if textured else np.zeros((0, 3), np.int32)
    return Meshes(corners.reshape(-1, 3), faces, faces + 1, texture, *ranges, np.array([textured]))


def triangles(generator: np.random.Generator, count: int, size: float) -> np.ndarray:
    """Before the camera, in all directions, float32 [count, 3, 3]."""
    centres = generator.uniform((-0.6, -0.6, 1.0), (0.6, 0.6, 1.5), (count, 1, 3))
    return (centres + generator.uniform(-size, size, (count, 3, 3))).astype(np.float32)


def nearest_faces(corners: np.ndarray) -> set[int]:
    """The nearest triangle that faces the camera, at each sample, by plane equations in double precision."""
    points = (np.indices((SIZE, SIZE)).reshape(2, -1).T[:, None, ::-1] + SAMPLES.astype(float)).reshape(-1, 2)
    rays = np.concatenate([(points - SIZE / 2) / SIZE, np.ones((len(points), 1))], axis=1)
    best, found = np.full(len(points), np.inf), np.full(len(points), -1)
    for face, (a, b, c) in enumerate(corners.astype(float)):
        inverse = np.linalg.inv(np.stack([a, b, c], axis=1))
        weights = rays @ inverse.T  # of the corners, times the share of the ray
        depth = 1 / weights.sum(axis=1)
        faces_us = np.linalg.det(np.stack([a, b, c], axis=1)) > 0
        hit = (weights > 0).all(axis=1) & (depth < best) & faces_us
        best[hit], found[hit] = depth[hit], face
    return set(found.tolist()) - {-1}


def search(meshes: Meshes, shapes: Shapes, boxes: int = 0) -> Scratch:
    scratch = Scratch.of(meshes, boxes, len(SAMPLES), SIZE)
    scratch.nearest[:] = 0
    assert find_visible(meshes, shapes, SAMPLES, NEAR, SLACK, scratch)
    return scratch


def one_shape() -> Shapes:
    return Shapes(np.array([0]), np.array([0]), PROJECTION[None])


@pytest.mark.parametrize("size", [0.01, 0.1, 0.5])
def test_all_that_is_nearest_somewhere_is_kept_and_most_else_is_not(size: float) -> None:
    corners = triangles(np.random.default_rng(0), 3000, size)
    kept = search(meshes_of(corners), one_shape()).kept
    wanted = nearest_faces(corners)
    assert wanted <= set(np.flatnonzero(kept).tolist())
    assert len(wanted) <= kept.sum() < 2 * len(wanted) + 0.02 * len(corners)


def test_what_begins_behind_the_camera_stays() -> None:
    corners = np.array([[[0, 0, -1], [0.1, 0, 1], [0, 0.1, 1]], [[9, 9, 1], [9.1, 9, 1], [9, 9.1, 1]]], np.float32)
    assert search(meshes_of(corners), one_shape()).kept.tolist() == [True, False]


@pytest.mark.parametrize(("distance", "visible"), [(3.0, False), (0.5, True)])
def test_a_box_is_kept_unless_it_is_hidden(distance: float, visible: bool) -> None:
    wall = np.array([[[-9, -9, 1], [9, -9, 1], [0, 9, 1]]], np.float32)
    meshes = meshes_of(wall)
    turned = np.linalg.det(np.vstack([wall[0]])) > 0
    assert turned
    box = PROJECTION.copy()
    box[:, :3] *= 0.1  # its half sizes
    box[:, 3] = PROJECTION[:, 2] * distance
    shapes = Shapes(np.array([0, BOX]), np.array([0, 1]), np.stack([PROJECTION, box]))
    assert search(meshes, shapes, boxes=1).kept.tolist() == [True, visible]


def test_what_else_is_near_hides_everything() -> None:
    meshes = meshes_of(triangles(np.random.default_rng(1), 50, 0.1))
    scratch = Scratch.of(meshes, 0, len(SAMPLES), SIZE)
    scratch.nearest[:] = 10  # at a distance of 0.1
    assert find_visible(meshes, one_shape(), SAMPLES, NEAR, SLACK, scratch)
    assert not scratch.kept.any()


def test_too_little_memory_is_reported() -> None:
    meshes = meshes_of(triangles(np.random.default_rng(2), 500, 0.5))
    scratch = Scratch.of(meshes, 0, len(SAMPLES), SIZE)
    small = scratch._replace(**{name: getattr(scratch, name)[:3] for name in ("hit_face", "hit_sample", "hit_inverse")})
    small.nearest[:] = 0
    assert not find_visible(meshes, one_shape(), SAMPLES, NEAR, SLACK, small)
    assert not small.kept.any()


@pytest.mark.parametrize("textured", [False, True])
def test_a_narrowed_mesh_has_the_marked_faces_first_and_can_be_restored(textured: bool) -> None:
    meshes = meshes_of(triangles(np.random.default_rng(3), 20, 0.1), textured)
    before = [part.copy() for part in (meshes.faces, meshes.normals, meshes.texture)]
    scratch = Scratch.of(meshes, 0, len(SAMPLES), SIZE)
    scratch.kept[[3, 4, 11]] = True
    scratch.kind[4] = 1  # faces away: no matter, if none of the others leaves the image
    assert narrow(meshes, 0, scratch) == 3
    for part, own in zip((meshes.faces, meshes.normals, meshes.texture), before, strict=True):
        assert np.array_equal(part[:3], own[[3, 4, 11]] if len(own) else own)
    assert not scratch.kept.any()
    widen(meshes, 0, scratch, 3)
    for part, own in zip((meshes.faces, meshes.normals, meshes.texture), before, strict=True):
        assert np.array_equal(part, own)


@pytest.mark.parametrize("count", [1000, 350])
def test_what_faces_away_but_for_rounding_shares_no_run_with_what_leaves_the_image(count: int) -> None:
    meshes = meshes_of(triangles(np.random.default_rng(4), count, 0.1))
    before = meshes.faces.copy()
    scratch = Scratch.of(meshes, 0, len(SAMPLES), SIZE)
    scratch.kept[:349] = True
    scratch.kind[2], scratch.kind[[1, 300]] = 1, 2
    drawn = narrow(meshes, 0, scratch)
    if count == 350:  # no room: all of it
        assert drawn == count
        assert np.array_equal(meshes.faces, before)
    else:
        first_runs = meshes.faces[: 2 * 341, 0] // 3
        assert drawn == 2 * 341 + 2
        assert set(first_runs.tolist()) == set(range(349)) - {1, 300}
        assert (meshes.faces[2 * 341 : drawn, 0] // 3).tolist() == [1, 300]
    widen(meshes, 0, scratch, drawn)
    assert np.array_equal(meshes.faces, before)
