"""Parametric shapes that the placeholder objects are built from.

A shape turns a few lengths (metres) into primitives. Some are drawn: boxes, capsules, low-poly meshes. Others collide:
boxes and capsules only, because MuJoCo gives boxes several contact points at once, so that objects come to rest.
Shapes are upright: z points up, and the bottom of an object is at z = 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

import numpy as np

Color = tuple[float, float, float]
Point = tuple[float, float, float]
Profile = tuple[tuple[float, float], ...]  # (radius, height) of a turned surface, from the bottom up

SEGMENTS = 20  # facets around a turned surface
LIFT = 0.001  # metres between walls and the ground, so that few contacts carry an object


@dataclass(frozen=True, slots=True)
class Mesh:
    """Triangles of a closed surface, counter-clockwise seen from outside."""

    vertices: np.ndarray  # float64 [n, 3], metres
    faces: np.ndarray  # int64 [m, 3]


@dataclass(frozen=True, slots=True)
class Geom:
    """One primitive in the frame of its body."""

    kind: Literal["box", "capsule", "mesh"]
    pos: np.ndarray  # [3]
    rot: np.ndarray  # [3, 3]
    size: tuple[float, ...] = ()  # box: half extents; capsule: radius and half length; mesh: none
    color: Color | None = None  # None: not drawn
    solid: bool = True
    mesh: Mesh | None = None

    def moved(self, rot: np.ndarray, shift: np.ndarray) -> Self:
        """The same primitive after ``x -> rot @ x + shift``."""
        return replace(self, pos=rot @ self.pos + shift, rot=rot @ self.rot)


class Shape(Protocol):
    def geoms(self) -> list[Geom]: ...


def rotation(axis: Literal["x", "y", "z"], degrees: float) -> np.ndarray:
    """[3, 3]: right-handed rotation about a coordinate axis."""
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    i, j = {"x": (1, 2), "y": (2, 0), "z": (0, 1)}[axis]
    matrix = np.eye(3)
    matrix[i, i], matrix[i, j], matrix[j, i], matrix[j, j] = c, -s, s, c
    return matrix


@dataclass(frozen=True, slots=True)
class Block:
    """A box, by its full extents; optionally turned about one axis through its centre."""

    size: Point
    at: Point  # centre
    color: Color | None = None
    solid: bool = True
    turn: tuple[Literal["x", "y", "z"], float] | None = None  # axis, degrees

    def geoms(self) -> list[Geom]:
        rot = rotation(*self.turn) if self.turn else np.eye(3)
        x, y, z = self.size
        return [Geom("box", np.array(self.at), rot, (x / 2, y / 2, z / 2), self.color, self.solid)]


@dataclass(frozen=True, slots=True)
class Bar:
    """A rod with round ends."""

    start: Point
    end: Point
    radius: float
    color: Color | None = None
    solid: bool = True

    def geoms(self) -> list[Geom]:
        start, end = np.array(self.start), np.array(self.end)
        length = float(np.linalg.norm(end - start))
        z = (end - start) / length
        x = np.cross(z, (0.0, 1.0, 0.0) if abs(z[1]) < 0.9 else (1.0, 0.0, 0.0))
        x /= np.linalg.norm(x)
        rot = np.stack([x, np.cross(z, x), z], axis=1)
        return [Geom("capsule", (start + end) / 2, rot, (self.radius, length / 2), self.color, self.solid)]


@dataclass(frozen=True, slots=True)
class Turned:
    """A surface of revolution about the vertical through ``at``, drawn only; ``squash`` scales its depth (y)."""

    profile: Profile
    color: Color
    at: Point = (0.0, 0.0, 0.0)
    squash: float = 1.0

    def geoms(self) -> list[Geom]:
        mesh = turned_mesh(self.profile, self.squash)
        return [Geom("mesh", np.array(self.at), np.eye(3), (), self.color, solid=False, mesh=mesh)]


@dataclass(frozen=True, slots=True)
class Wedge:
    """A prism with a triangular cross-section, drawn only: ``width`` along x, ``depth`` at the base, a ridge on top."""

    width: float
    depth: float
    height: float
    at: Point  # centre of the base
    color: Color

    def geoms(self) -> list[Geom]:
        w, d, h = self.width / 2, self.depth / 2, self.height
        vertices = np.array([(-w, -d, 0), (-w, d, 0), (-w, 0, h), (w, -d, 0), (w, d, 0), (w, 0, h)])
        faces = np.array([(0, 2, 1), (3, 4, 5), (0, 1, 4), (0, 4, 3), (1, 2, 5), (1, 5, 4), (2, 0, 3), (2, 3, 5)])
        return [Geom("mesh", np.array(self.at), np.eye(3), (), self.color, solid=False, mesh=Mesh(vertices, faces))]


@dataclass(frozen=True, slots=True)
class Column:
    """A solid round thing, not drawn: a hexagonal prism of three boxes across each other, on a square foot.

    Only the foot touches what it stands on: four contacts instead of twelve.
    """

    radius: float
    bottom: float
    top: float

    def geoms(self) -> list[Geom]:
        low = self.bottom + LIFT
        half = (self.radius * np.sqrt(3) / 2, self.radius / 2, (self.top - low) / 2)
        centre = np.array([0.0, 0.0, (self.top + low) / 2])
        side = 1.5 * self.radius
        foot = Block((side, side, (self.top - self.bottom) / 4), (0, 0, self.bottom + (self.top - self.bottom) / 8))
        return [*foot.geoms(), *(Geom("box", centre, rotation("z", turn), half) for turn in (0.0, 60.0, 120.0))]


@dataclass(frozen=True, slots=True)
class Ring:
    """A solid round wall, not drawn: a ring of panels between two circles of (radius, height) on its outer face."""

    low: tuple[float, float]
    high: tuple[float, float]
    wall: float
    sides: int = 8

    def geoms(self) -> list[Geom]:
        shrink = 1.015 * float(np.cos(np.pi / self.sides))  # the polygon's corners lie just outside the circle
        (r0, z0), (r1, z1) = self.low, self.high
        length = float(np.hypot(r1 - r0, z1 - z0))
        lean = np.degrees(np.arctan2(r1 - r0, z1 - z0))
        # A panel as wide as the side of the polygon around the larger circle; neighbours overlap below it.
        half = (self.wall / 2, float(max(r0, r1) * shrink * np.tan(np.pi / self.sides)), length / 2)
        tilt = rotation("y", lean)
        middle = np.array([(r0 + r1) / 2 * shrink, 0.0, (z0 + z1) / 2]) - tilt @ np.array([self.wall / 2, 0.0, 0.0])
        turns = [rotation("z", 360.0 * k / self.sides) for k in range(self.sides)]
        return [Geom("box", turn @ middle, turn @ tilt, half) for turn in turns]


@dataclass(frozen=True, slots=True)
class Group:
    """Several shapes, shifted together."""

    shapes: tuple[Shape, ...]
    at: Point

    def geoms(self) -> list[Geom]:
        return [geom.moved(np.eye(3), np.array(self.at)) for shape in self.shapes for geom in shape.geoms()]


def turned_mesh(profile: Sequence[tuple[float, float]], squash: float = 1.0) -> Mesh:
    """Closed mesh of a profile that starts and ends on the axis (points are added there where it does not)."""
    points = list(profile)
    if points[0][0] > 0:
        points.insert(0, (0.0, points[0][1]))
    if points[-1][0] > 0:
        points.append((0.0, points[-1][1]))
    angles = 2 * np.pi * np.arange(SEGMENTS) / SEGMENTS
    circle = np.stack([np.cos(angles), squash * np.sin(angles)], axis=1)
    rings = [np.column_stack([r * circle, np.full(SEGMENTS, z)]) for r, z in points[1:-1]]
    vertices = np.concatenate([[[0.0, 0.0, points[0][1]]], *rings, [[0.0, 0.0, points[-1][1]]]])
    first, last = 0, len(vertices) - 1
    here, following = np.arange(SEGMENTS), (np.arange(SEGMENTS) + 1) % SEGMENTS
    faces = [np.column_stack([np.full(SEGMENTS, first), 1 + following, 1 + here])]
    for k in range(len(rings) - 1):
        low, high = 1 + k * SEGMENTS, 1 + (k + 1) * SEGMENTS
        faces.append(np.column_stack([low + here, low + following, high + following]))
        faces.append(np.column_stack([low + here, high + following, high + here]))
    top = 1 + (len(rings) - 1) * SEGMENTS
    faces.append(np.column_stack([top + here, top + following, np.full(SEGMENTS, last)]))
    return Mesh(vertices, np.concatenate(faces))
