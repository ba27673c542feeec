"""Which triangles decide a pixel, compiled. The others can be left out of a drawing, which stays the same.

A rasterizer colours a sample of the image with the nearest triangle that contains it and faces the camera. So a
triangle changes nothing if it faces away, contains no sample, or has a nearer one before it at each of its samples. The
slacks cover the rounding of the rasterizer: what is closer stays.

Whether the thinnest triangles are drawn depends on others. llvmpipe takes ``_RUN`` triangles at a time. If a corner of
them is outside the image, it leaves out those that face away by their exact corners, else by their rounded ones.
"""

from typing import Any, NamedTuple, Self

import numpy as np
from numba import njit

EDGE_SLACK = np.float32(1 / 64)  # pixels around a triangle
INSIDE_SLACK = np.float32(1 / 32)  # share of a triangle's extent in depth: in small ones, it is interpolated roughly
_RUN = 341  # 1,023 corners
_INSIDE, _TURNED, _OUTSIDE = range(3)  # within the image; faces away, if it were not for rounding; partly outside
_LARGE = np.float32(1 / 4)  # square pixels: a triangle with more area has a depth at each of its samples
_FLAT = np.float32(1e-7)  # square pixels: a triangle with less area has no plane
BOX = -1  # in place of a mesh: 12 triangles, of which all are drawn, or none

_CUBE = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float32)
# Corners of each side, counter-clockwise from outside.
_SIDES = ((0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3))
_CUBE_FACES = np.array([[a, b, c] for a, b, c, _ in _SIDES] + [[a, c, d] for a, _, c, d in _SIDES], np.int32)


class Meshes(NamedTuple):
    """Arrays of a model. Faces index the vertices of their own mesh."""

    vertices: np.ndarray  # float32 [V, 3], by reference, as the next three
    faces: np.ndarray  # int32 [F, 3]
    normals: np.ndarray  # int32 [F, 3]
    texture: np.ndarray  # int32 [F or 0, 3]
    vertex_range: np.ndarray  # int64 [M, 2]: first and one past the last
    face_range: np.ndarray  # int64 [M, 2]
    textured: np.ndarray  # bool [M]
    # as the first two, of a box; here, since arrays that are constants would have everything compiled once more
    cube: np.ndarray = _CUBE
    cube_faces: np.ndarray = _CUBE_FACES

    @classmethod
    def of(cls, model: Any) -> Self:
        """Of an ``mjModel``."""
        vertex, face = model.mesh_vertadr.astype(np.int64), model.mesh_faceadr.astype(np.int64)
        return cls(
            model.mesh_vert,
            model.mesh_face,
            model.mesh_facenormal,
            model.mesh_facetexcoord,
            np.stack([vertex, vertex + model.mesh_vertnum], axis=1),
            np.stack([face, face + model.mesh_facenum], axis=1),
            model.mesh_texcoordadr >= 0,
        )


class Shapes(NamedTuple):
    """What is in a scene, the nearest first. One mesh may have several shapes."""

    mesh: np.ndarray  # int64 [G]: or BOX
    name: np.ndarray  # int64 [G]: index of a box in ``Scratch.kept``
    projection: np.ndarray  # float32 [G, 3, 4]: own coordinates to (pixel * distance, pixel * distance, distance)


class Slack(NamedTuple):
    """How roughly corners are known."""

    pixels: np.float32  # by which they may be moved; llvmpipe rounds to a grid of 1/256, so by half of that at least
    depth: np.float32  # share of a distance; depth buffers hold 24 bits or more


class Scratch(NamedTuple):
    """Memory of the search, used again for each image."""

    screen: np.ndarray  # float32 [largest mesh, 3]: pixel to the right, pixel upwards, distance
    nearest: np.ndarray  # float32 [S, H, W]: the inverse of the distance of what is seen at a sample
    kept: np.ndarray  # bool [F + boxes]
    kind: np.ndarray  # uint8 [F + boxes], of candidates: _INSIDE, _TURNED or _OUTSIDE
    hit_face: np.ndarray  # int32 [C]: candidates, a triangle at a sample each
    hit_sample: np.ndarray  # int32 [C]
    hit_inverse: np.ndarray  # float32 [C]
    chosen: np.ndarray  # int64 [F + _RUN]: what ``narrow`` keeps of a mesh
    replaced: np.ndarray  # int32 [F, 9]: rows of faces, normals and texture that ``narrow`` has overwritten

    @classmethod
    def of(cls, meshes: Meshes, boxes: int, samples: int, size: int) -> Self:
        """For images of this size. Memory pages that no triangle needs are never touched."""
        faces, largest = len(meshes.faces), int(np.diff(meshes.vertex_range).max(initial=len(_CUBE)))
        candidates = 4 * faces + 16 * samples * size * size
        return cls(
            np.empty((largest, 3), np.float32),
            np.empty((samples, size, size), np.float32),
            np.zeros(faces + boxes, np.bool_),
            np.zeros(faces + boxes, np.uint8),
            np.empty(candidates, np.int32),
            np.empty(candidates, np.int32),
            np.empty(candidates, np.float32),
            np.empty(faces + _RUN, np.int64),
            np.empty((faces, 9), np.int32),
        )


@njit(cache=True, error_model="numpy")
def find_visible(meshes: Any, shapes: Any, samples: Any, near: Any, slack: Any, scratch: Any) -> bool:
    """Mark the triangles and boxes that can be seen in ``scratch.kept``.

    ``scratch.nearest`` has to hold what else hides them, else zeros; they are added to it.
    samples: float32 [S, 2], places within a pixel, between 0 and 1.
    near: distance at which the view begins; what reaches before it stays.
    slack: a ``Slack``, of less than ``EDGE_SLACK``.
    Returns False, with nothing marked, if there is not enough memory for the candidates.
    """
    hits = 0
    for g in range(len(shapes.mesh)):
        mesh, matrix = shapes.mesh[g], shapes.projection[g]
        if mesh == BOX:
            _project(meshes.cube, matrix, scratch.screen)
            faces, first, last, name = meshes.cube_faces, 0, 12, shapes.name[g]
        else:
            first, last = meshes.vertex_range[mesh]
            _project(meshes.vertices[first:last], matrix, scratch.screen)
            first, last = meshes.face_range[mesh]
            faces, name = meshes.faces, -1
        hits = _cover(faces, first, last, name, samples, near, slack, scratch, hits)
        if hits > len(scratch.hit_face):
            scratch.kept[:] = False
            return False
    nearest = scratch.nearest.reshape(-1)
    for i in range(hits):
        if scratch.hit_inverse[i] >= nearest[scratch.hit_sample[i]] * (np.float32(1) - slack.depth):
            scratch.kept[scratch.hit_face[i]] = True
    return True


@njit(cache=True, error_model="numpy")
def _project(vertices: Any, matrix: Any, screen: Any) -> None:
    (a, b, c, d), (e, f, g, h), (i, j, k, m) = matrix[0], matrix[1], matrix[2]
    for v in range(len(vertices)):
        x, y, z = vertices[v, 0], vertices[v, 1], vertices[v, 2]
        distance = i * x + j * y + k * z + m
        inverse = np.float32(1) / distance
        screen[v, 0] = (a * x + b * y + c * z + d) * inverse
        screen[v, 1] = (e * x + f * y + g * z + h) * inverse
        screen[v, 2] = distance


@njit(cache=True, error_model="numpy")
def _leaves_view(faces: Any, screen: Any, near: Any, size: Any) -> bool:
    """Whether a corner of these triangles is outside the image, or too near."""
    zero = np.float32(0)
    for face in faces:
        for v in face:
            x, y, distance = screen[v, 0], screen[v, 1], screen[v, 2]
            if x < zero or y < zero or x > size or y > size or distance < near:
                return True
    return False


@njit(cache=True, error_model="numpy")
def _cover(
    faces: Any, first: int, last: int, box: int, samples: Any, near: Any, slack: Any, scratch: Any, hits: int
) -> int:
    """Append the samples that triangles may colour to the candidates, if there is room; their new number.

    The candidates have the numbers of the faces, or all that of a ``box``.
    """
    screen, nearest = scratch.screen, scratch.nearest.reshape(-1)
    size, room = scratch.nearest.shape[1], len(scratch.hit_face)
    kept, kind = scratch.kept, scratch.kind
    hit_face, hit_sample, hit_inverse = scratch.hit_face, scratch.hit_sample, scratch.hit_inverse
    edge, zero, one, two, end = EDGE_SLACK, np.float32(0), np.float32(1), np.float32(2), np.float32(size)
    known_run, is_clipped = -1, False
    for face in range(first, last):
        name = face if box < 0 else box
        i, j, k = faces[face, 0], faces[face, 1], faces[face, 2]
        x0, y0, w0, x1, y1, w1 = screen[i, 0], screen[i, 1], screen[i, 2], screen[j, 0], screen[j, 1], screen[j, 2]
        x2, y2, w2 = screen[k, 0], screen[k, 1], screen[k, 2]
        if not (w0 > near and w1 > near and w2 > near):
            kept[name], kind[name] = True, _OUTSIDE
            continue
        left, right = min(x0, min(x1, x2)) - edge, max(x0, max(x1, x2)) + edge
        low, high = min(y0, min(y1, y2)) - edge, max(y0, max(y1, y2)) + edge
        if right < zero or high < zero or left > end or low > end:
            continue
        area = (x1 - x0) * (y2 - y0) - (x2 - x0) * (y1 - y0)
        if area < -two * edge * (right - left + high - low):  # it faces away, whichever way its corners are rounded
            continue
        ax, ay, bx, by, cx, cy = x1 - x0, y1 - y0, x2 - x1, y2 - y1, x0 - x2, y0 - y2
        reach = two * (right - left + high - low)  # a short side turns, and moves most at its triangle's far end
        slack_a, slack_b = (abs(ax) + abs(ay) + reach) * slack.pixels, (abs(bx) + abs(by) + reach) * slack.pixels
        slack_c = (abs(cx) + abs(cy) + reach) * slack.pixels
        r0, r1, r2 = one / w0, one / w1, one / w2
        closest, is_large = max(r0, max(r1, r2)), area > _LARGE
        per_area = one / max(abs(area), _FLAT)
        if is_large:  # how much it changes within the reach of rounding
            across, up = by * r0 + cy * r1 + ay * r2, bx * r0 + cx * r1 + ax * r2
            spread = (abs(across) + abs(up)) * per_area * EDGE_SLACK
        else:  # a thin triangle's plane turns, so that its depth is anything
            spread = (slack_a + slack_b + slack_c) * per_area + INSIDE_SLACK
            spread *= closest - min(r0, min(r1, r2))
        kind[name] = _INSIDE if left > zero and low > zero and right < end and high < end else _OUTSIDE
        if area <= zero:
            kind[name] = _TURNED
        for row in range(max(0, int(np.floor(low))), min(size - 1, int(np.floor(high))) + 1):
            for column in range(max(0, int(np.floor(left))), min(size - 1, int(np.floor(right))) + 1):
                for s in range(len(samples)):
                    px, py = np.float32(column) + samples[s, 0], np.float32(row) + samples[s, 1]
                    if px < left or px > right or py < low or py > high:
                        continue
                    ea = ax * (py - y0) - ay * (px - x0)
                    eb = bx * (py - y1) - by * (px - x1)
                    ec = cx * (py - y2) - cy * (px - x2)
                    if ea < -slack_a or eb < -slack_b or ec < -slack_c:
                        continue
                    if area <= zero and box < 0:
                        run = (face - first) // _RUN
                        if run != known_run:
                            start, known_run = first + run * _RUN, run
                            is_clipped = _leaves_view(faces[start : min(start + _RUN, last)], screen, near, end)
                        if is_clipped:
                            continue
                    inside = ea > slack_a and eb > slack_b and ec > slack_c
                    inverse = closest  # near an edge of a small triangle, the nearest corner's
                    if inside or is_large:  # linear in the image
                        inverse = (eb * r0 + ec * r1 + ea * r2) * per_area
                    place = (s * size + row) * size + column
                    if inverse + spread < nearest[place] * (one - slack.depth):
                        continue
                    if hits < room:
                        hit_face[hits], hit_sample[hits], hit_inverse[hits] = name, place, inverse + spread
                    hits += 1
                    if inside and inverse - spread > nearest[place]:
                        nearest[place] = inverse - spread  # it surely hides what is farther
    return hits


@njit(cache=True, error_model="numpy")
def narrow(meshes: Any, mesh: int, scratch: Any) -> int:
    """Move the marked faces of a mesh to its beginning, and take their marks away; ``widen`` undoes it.

    Returns the number of faces to draw. Those that face away by their exact corners get a run without any that leaves
    the image, which repeats one of them to fill it.
    """
    first, last = meshes.face_range[mesh]
    kept, kind, chosen = scratch.kept, scratch.kind, scratch.chosen
    turned = outside = 0
    for face in range(first, last):
        turned += kept[face] and kind[face] == _TURNED
        outside += kept[face] and kind[face] == _OUTSIDE
    apart = turned > 0 and outside > 0
    count = 0
    for face in range(first, last):
        if kept[face] and not (apart and kind[face] == _OUTSIDE):
            chosen[count] = face
            count += 1
    if apart:
        while count % _RUN:
            chosen[count] = chosen[0]
            count += 1
        for face in range(first, last):
            if kept[face] and kind[face] == _OUTSIDE:
                chosen[count] = face
                count += 1
    for face in range(first, last):
        kept[face] = False
    if count > last - first:  # a small mesh, of which nearly everything is seen
        count = last - first
        for row in range(count):
            chosen[row] = first + row
    for row in range(count):
        chosen[row] -= first
    _place(meshes.faces[first:last], chosen[:count], scratch.replaced[first:last, 0:3])
    _place(meshes.normals[first:last], chosen[:count], scratch.replaced[first:last, 3:6])
    if meshes.textured[mesh]:
        _place(meshes.texture[first:last], chosen[:count], scratch.replaced[first:last, 6:9])
    return int(count)


@njit(cache=True, error_model="numpy")
def _place(values: Any, chosen: Any, replaced: Any) -> None:
    """Copy rows of three to the beginning, whose old ones go to ``replaced``."""
    count = len(chosen)
    _copy(values, replaced, count)
    for row in range(count):
        source = chosen[row]
        for k in range(3):
            values[row, k] = replaced[source, k] if source < count else values[source, k]


@njit(cache=True, error_model="numpy")
def _copy(source: Any, target: Any, rows: int) -> None:
    """Of three columns; loops, since slices take ten seconds to compile."""
    for row in range(rows):
        for k in range(3):
            target[row, k] = source[row, k]


@njit(cache=True, error_model="numpy")
def widen(meshes: Any, mesh: int, scratch: Any, count: int) -> None:
    """Restore the faces of a mesh that ``narrow`` has reduced to ``count``."""
    first, last = meshes.face_range[mesh]
    _copy(scratch.replaced[first:last, 0:3], meshes.faces[first:last], count)
    _copy(scratch.replaced[first:last, 3:6], meshes.normals[first:last], count)
    if meshes.textured[mesh]:
        _copy(scratch.replaced[first:last, 6:9], meshes.texture[first:last], count)
