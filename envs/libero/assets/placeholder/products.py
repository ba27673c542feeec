"""Families of placeholder products: a few lengths and colours make a carton, a can, a bottle, a bowl, a mug, a book."""

from dataclasses import dataclass

import numpy as np

from envs.libero.assets.placeholder.shapes import (
    LIFT,
    Bar,
    Block,
    Color,
    Column,
    Geom,
    Group,
    Point,
    Profile,
    Ring,
    Shape,
    Turned,
    Wedge,
)

PRINT = 0.0006  # metres by which a printed band is raised above its surface, so that it is drawn


@dataclass(frozen=True, slots=True)
class Carton:
    """A box of groceries, with a printed band around its middle."""

    size: Point
    color: Color
    band: Color

    def geoms(self) -> list[Geom]:
        x, y, z = self.size
        band = (x * 0.4, y + PRINT, z + PRINT) if x >= y else (x + PRINT, y * 0.4, z + PRINT)
        return _geoms(Block(self.size, (0, 0, z / 2), self.color), Block(band, (0, 0, z / 2), self.band, solid=False))


@dataclass(frozen=True, slots=True)
class GableCarton:
    """A milk carton: a square column with a gabled top and a printed band."""

    side: float
    shoulder: float  # height of the column
    height: float
    color: Color
    band: Color
    gable: Color

    def geoms(self) -> list[Geom]:
        side, low, top = self.side, self.shoulder, self.height
        return _geoms(
            Block((side, side, low), (0, 0, low / 2), self.color),
            Block((side + PRINT, side + PRINT, low * 0.45), (0, 0, low / 2), self.band, solid=False),
            Wedge(side, side, top - low - 0.008, (0, 0, low), self.gable),
            Block((side, 0.004, 0.012), (0, 0, top - 0.006), self.gable, solid=False),
            Block((side, side * 0.3, top - low), (0, 0, (top + low) / 2)),
        )


@dataclass(frozen=True, slots=True)
class Can:
    """A tin with a paper label."""

    radius: float
    height: float
    metal: Color
    label: Color
    stripe: Color

    def geoms(self) -> list[Geom]:
        r, h = self.radius, self.height
        return _geoms(
            Turned(((r, 0.0), (r, h), (r * 0.93, h), (r * 0.93, h - 0.003)), self.metal),
            Turned(((r * 1.01, h * 0.06), (r * 1.01, h * 0.92)), self.label),
            Turned(((r * 1.02, h * 0.38), (r * 1.02, h * 0.62)), self.stripe),
            Column(r, 0.0, h),
        )


@dataclass(frozen=True, slots=True)
class Bottle:
    """A sauce bottle with an oval body, a neck, a label and a cap."""

    half_width: float
    half_depth: float
    shoulder: float  # height up to which the body has its full width
    neck: float  # radius
    height: float
    color: Color
    label: Color
    cap: Color
    cap_height: float = 0.03

    def geoms(self) -> list[Geom]:
        w, s, n, h = self.half_width, self.shoulder, self.neck, self.height
        squash = self.half_depth / w
        top = h - self.cap_height
        body = ((w * 0.93, 0.0), (w, 0.006), (w, s * 0.8), (w * 0.85, s), (n, top))
        side = 2 * self.half_depth * 0.95
        return _geoms(
            Turned(body, self.color, squash=squash),
            Turned(((w * 1.01, s * 0.2), (w * 1.01, s * 0.72)), self.label, squash=squash),
            Turned(((n, top), (n, h - 0.003), (n * 0.85, h)), self.cap),
            Block((2 * w * 0.9, side, s), (0, 0, s / 2)),
            Block((2 * n * 0.9, 2 * n * 0.9, h - s), (0, 0, (h + s) / 2)),
        )


@dataclass(frozen=True, slots=True)
class Vessel:
    """A bowl, plate, pan or cup: a turned wall, open at the top.

    ``outer`` is drawn; solid are a square foot under the floor and a ring of panels from ``grip`` to the rim.
    """

    outer: Profile  # outer face, from the edge of the foot to the rim
    wall: float
    floor: float  # height of the inner floor
    color: Color
    inside: Color  # of the floor
    grip: tuple[float, float] | None = None  # (radius, height) where the ring of panels starts; None: at the foot
    solid_wall: float = 0.005
    sides: int = 8

    def geoms(self) -> list[Geom]:
        foot_r, foot_z = self.outer[0]
        inner = [(r - self.wall, z) for r, z in reversed(self.outer) if z > self.floor + 0.001]
        radii, heights = zip(*self.outer, strict=True)
        floor_r = float(np.interp(self.floor, heights, radii)) - self.wall
        low_r, low_z = self.grip or self.outer[0]
        side = 1.6 * foot_r  # its corners are a little outside the round foot: about as hard to tip over
        return _geoms(
            Turned((*self.outer, *inner, (floor_r, self.floor)), self.color),
            Turned(((floor_r * 0.96, self.floor), (floor_r * 0.96, self.floor + PRINT)), self.inside),
            Block((side, side, self.floor - foot_z), (0, 0, (self.floor + foot_z) / 2)),
            Ring((low_r, low_z + LIFT), self.outer[-1], self.solid_wall, self.sides),
        )


@dataclass(frozen=True, slots=True)
class Rods:
    """A handle: a chain of rods."""

    points: tuple[Point, ...]
    radius: float
    color: Color

    def geoms(self) -> list[Geom]:
        pairs = zip(self.points, self.points[1:], strict=False)
        return _geoms(*(Bar(start, end, self.radius, self.color) for start, end in pairs))


@dataclass(frozen=True, slots=True)
class Mug:
    """A cup around the vertical at x = ``centre`` with a handle that reaches to x = ``reach``."""

    outer: Profile
    centre: float
    reach: float
    color: Color
    inside: Color

    def geoms(self) -> list[Geom]:
        side = 1.0 if self.reach > self.centre else -1.0
        radii, heights = zip(*self.outer, strict=True)
        far, top = side * (abs(self.reach - self.centre) - 0.006), self.outer[-1][1]
        high, low = (side * (float(np.interp(share * top, heights, radii)) + 0.002) for share in (0.82, 0.28))
        arc = ((high, 0, 0.82 * top), (far, 0, 0.78 * top), (far, 0, 0.42 * top), (low, 0, 0.28 * top))
        cup = Vessel(self.outer, 0.004, self.outer[0][1] + 0.006, self.color, self.inside, solid_wall=0.006)
        return Group((cup, Rods(arc, 0.006, self.color)), (self.centre, 0, 0)).geoms()


@dataclass(frozen=True, slots=True)
class Book:
    """An upright book, its boards facing x, its spine towards -y."""

    size: Point
    at: tuple[float, float]  # centre
    color: Color
    pages: Color

    def geoms(self) -> list[Geom]:
        (x, y, z), (cx, cy), board = self.size, self.at, 0.003
        return _geoms(
            Block(self.size, (cx, cy, z / 2)),
            Block((x - 2 * board, y - 0.005, z - 0.006), (cx, cy, z / 2), self.pages, solid=False),
            Block((board, y, z), (cx - (x - board) / 2, cy, z / 2), self.color, solid=False),
            Block((board, y, z), (cx + (x - board) / 2, cy, z / 2), self.color, solid=False),
            Block((x, board, z), (cx, cy - (y - board) / 2, z / 2), self.color, solid=False),
        )


@dataclass(frozen=True, slots=True)
class OpenBox:
    """A box without a lid."""

    size: Point  # outer extents
    at: tuple[float, float]  # centre
    wall: float
    floor: float  # thickness of the floor
    color: Color
    inside: Color  # of the floor

    def geoms(self) -> list[Geom]:
        (x, y, z), w = self.size, self.wall
        height, middle = z - LIFT, (z + LIFT) / 2
        walls: tuple[Shape, ...] = (
            Block((x - 2 * w, y - 2 * w, self.floor), (0, 0, self.floor / 2), self.inside),
            Block((w, y, height), (-(x - w) / 2, 0, middle), self.color),
            Block((w, y, height), ((x - w) / 2, 0, middle), self.color),
            Block((x - 2 * w, w, height), (0, -(y - w) / 2, middle), self.color),
            Block((x - 2 * w, w, height), (0, (y - w) / 2, middle), self.color),
        )
        return Group(walls, (*self.at, 0)).geoms()


@dataclass(frozen=True, slots=True)
class Drawer:
    """A drawer that opens towards -y, with a handle of one rod on two posts."""

    size: Point  # outer extents of the tray behind the front panel
    at: Point  # centre of the tray's underside
    front: tuple[float, float]  # width and height of the front panel
    color: Color
    inside: Color
    metal: Color

    def geoms(self) -> list[Geom]:
        (x, y, z), (width, height), w = self.size, self.front, 0.0054
        tray = OpenBox((x, y, z), (0, 0), w, 0.008, self.inside, self.inside)
        face, middle = -y / 2, z / 2
        shapes: tuple[Shape, ...] = (
            tray,
            Block((width, w, height), (0, face - w / 2, middle), self.color),
            Block((0.089, 0.0154, 0.0164), (-0.006, face - 0.0296, middle), self.metal),
            Block((0.010, 0.0165, 0.011), (-0.039, face - 0.0137, middle), self.metal),
            Block((0.010, 0.0165, 0.011), (0.026, face - 0.0137, middle), self.metal),
        )
        return Group(shapes, self.at).geoms()


def _geoms(*shapes: Shape) -> list[Geom]:
    return [geom for shape in shapes for geom in shape.geoms()]
