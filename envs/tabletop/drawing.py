"""Draws the tabletop, seen from the front and above, so that height shows as the distance from the shadow.

Plain numpy, anti-aliased (a motion of a fraction of a pixel changes pixels), at any size: the same code draws the
policy's images and the larger frames of a video.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from envs.tabletop.tasks import FAMILIES, PLATE_RADIUS, ZONE_HALF
from envs.tabletop.world import BLOCK_HALF, BLOCK_HEIGHT, GRASP, TIP_LOW

Color = tuple[int, int, int]

# Screen coordinates are fractions of the image, x to the right and y downwards.
_LEFT, _NEAR = 0.04, 0.955  # where the table's near left corner appears
_ACROSS, _DEPTH, _UP = 0.92, 0.76, 0.8  # screen lengths of one table width to the right, away, and up
_RIM = 0.015  # width of edges and outlines

_BLOCK_RGB: dict[str, Color] = {
    "red": (214, 48, 49),
    "green": (46, 160, 67),
    "blue": (40, 92, 220),
    "yellow": (250, 210, 20),
    "purple": (150, 70, 180),
}
_WALL, _TABLE, _TABLE_EDGE = (72, 84, 98), (202, 176, 142), (124, 98, 72)
_ZONE_OUTLINE, _ZONE = (70, 54, 42), (236, 226, 206)
_PLATE_OUTLINE, _PLATE = (128, 138, 150), (244, 246, 248)
_SHADOW, _SHADOW_ALPHA = (30, 22, 16), 0.55
_ARM, _HAND, _FINGER = (228, 232, 238), (60, 64, 76), (20, 22, 28)
_FRONT_SHADE = 0.62  # brightness of a block's front face against its top

_FINGER_WIDTH, _FINGER_LENGTH = 0.026, 0.09
_GAP_CLOSED, _GAP_HELD, _GAP_OPEN = 0.004, BLOCK_HALF - 0.004, BLOCK_HALF + 0.016  # from the middle to each finger
_HAND_HALF, _HAND_HEIGHT = 0.1, 0.035
_ARM_HALF, _ARM_LENGTH = 0.03, 0.16


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that is drawn, in table widths."""

    tip: np.ndarray  # [3]
    aperture: float
    held: int  # block between the fingers, -1: none
    blocks: np.ndarray  # [B, 2]
    colors: Sequence[str]  # [B]
    goal: np.ndarray  # [2]
    family: int  # index into FAMILIES; says what marks the goal


class _Canvas:
    """A square image; shapes in screen coordinates are blended onto it."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = pixels  # float32 [S, S, 3]
        self.size = len(pixels)

    def rectangle(self, left: float, top: float, right: float, bottom: float, rgb: Color) -> None:
        columns, across = self._cover(left, right)
        rows, down = self._cover(top, bottom)
        self._blend(rows, columns, down[:, None] * across, rgb)

    def ellipse(
        self, x: float, y: float, half_width: float, half_height: float, rgb: Color, alpha: float = 1.0
    ) -> None:
        columns, _ = self._cover(x - half_width, x + half_width)
        rows, _ = self._cover(y - half_height, y + half_height)
        u = (np.arange(columns.start, columns.stop, dtype=np.float32) + (0.5 - x * self.size)) / (
            half_width * self.size
        )
        v = (np.arange(rows.start, rows.stop, dtype=np.float32) + (0.5 - y * self.size)) / (half_height * self.size)
        inwards = (1.0 - np.sqrt(u * u + (v * v)[:, None])) * ((half_width + half_height) * self.size / 2.0)
        self._blend(rows, columns, (inwards + 0.5).clip(0.0, 1.0) * alpha, rgb)

    def _cover(self, low: float, high: float) -> tuple[slice, np.ndarray]:
        """The pixels that an interval touches along one axis, and the covered share of each."""
        low, high = max(low * self.size, 0.0), min(high * self.size, float(self.size))
        first, last = int(low), math.ceil(high)
        if last <= first:
            return slice(0, 0), np.zeros(0, np.float32)
        covered = np.ones(last - first, np.float32)
        covered[0] -= low - first
        covered[-1] -= last - high
        return slice(first, last), covered

    def _blend(self, rows: slice, columns: slice, weight: np.ndarray, rgb: Color) -> None:
        patch = self.pixels[rows, columns]
        patch += weight[..., None] * (_float_color(rgb) - patch)


@cache
def _float_color(rgb: Color) -> np.ndarray:
    return np.array(rgb, np.float32)


def draw(scene: Scene, size: int) -> np.ndarray:
    """uint8 [size, size, 3]."""
    canvas = _Canvas(_background(size).copy())
    _draw_goal(canvas, scene)
    _draw_blocks_and_gripper(canvas, scene)
    return (canvas.pixels + 0.5).astype(np.uint8)


@lru_cache(maxsize=4)
def _background(size: int) -> np.ndarray:
    """float32 [size, size, 3]: the empty table. Shared: copy it before drawing."""
    canvas = _Canvas(np.full((size, size, 3), _WALL, np.float32))
    left, right, top, bottom = _x(0.0), _x(1.0), _y(1.0), _y(0.0)
    canvas.rectangle(left - _RIM, top - _RIM, right + _RIM, bottom + 2 * _RIM, _TABLE_EDGE)
    canvas.rectangle(left, top, right, bottom, _TABLE)
    return canvas.pixels


def _x(x: float) -> float:
    return _LEFT + _ACROSS * x


def _y(y: float, z: float = 0.0) -> float:
    return _NEAR - _DEPTH * y - _UP * z


def _draw_goal(canvas: _Canvas, scene: Scene) -> None:
    x, y = scene.goal
    if FAMILIES[scene.family] == "push":
        for half, rgb in ((ZONE_HALF, _ZONE_OUTLINE), (ZONE_HALF - 2 * _RIM, _ZONE)):
            canvas.rectangle(_x(x - half), _y(y + half), _x(x + half), _y(y - half), rgb)
    elif FAMILIES[scene.family] == "pick_place":
        for radius, rgb in ((PLATE_RADIUS, _PLATE_OUTLINE), (PLATE_RADIUS - _RIM, _PLATE)):
            canvas.ellipse(_x(x), _y(y), radius * _ACROSS, radius * _DEPTH, rgb)


def _draw_blocks_and_gripper(canvas: _Canvas, scene: Scene) -> None:
    """From back to front. Nearer blocks hide low fingers; high fingers are in front of everything."""
    tip_x, tip_y, tip_z = (float(v) for v in scene.tip)
    standing = sorted((j for j in range(len(scene.blocks)) if j != scene.held), key=lambda j: -scene.blocks[j, 1])
    over_block = any(np.abs(scene.blocks[j] - scene.tip[:2]).max() <= BLOCK_HALF for j in standing)
    low = tip_z < BLOCK_HEIGHT
    behind = [j for j in standing if not low or scene.blocks[j, 1] >= tip_y - GRASP]

    if not over_block:
        _draw_shadow(canvas, tip_x, tip_y, 0.0)
    for j in behind:
        _draw_block(canvas, scene, j, 0.0)
    if over_block and not low:
        _draw_shadow(canvas, tip_x, tip_y, BLOCK_HEIGHT)
    if scene.held >= 0:
        _draw_block(canvas, scene, scene.held, tip_z - TIP_LOW[2])
    _draw_gripper(canvas, scene)
    for j in standing:
        if j not in behind:
            _draw_block(canvas, scene, j, 0.0)


def _draw_shadow(canvas: _Canvas, x: float, y: float, z: float) -> None:
    canvas.ellipse(_x(x), _y(y, z), 0.05, 0.032, _SHADOW, _SHADOW_ALPHA)


def _draw_block(canvas: _Canvas, scene: Scene, j: int, base: float) -> None:
    x, y = scene.blocks[j]
    left, right = _x(x - BLOCK_HALF), _x(x + BLOCK_HALF)
    far, near, floor = (
        _y(y + BLOCK_HALF, base + BLOCK_HEIGHT),
        _y(y - BLOCK_HALF, base + BLOCK_HEIGHT),
        _y(y - BLOCK_HALF, base),
    )
    red, green, blue = _BLOCK_RGB[scene.colors[j]]
    front = (int(red * _FRONT_SHADE), int(green * _FRONT_SHADE), int(blue * _FRONT_SHADE))
    canvas.rectangle(left, far, right, near, (red, green, blue))
    canvas.rectangle(left, near, right, floor, front)


def _draw_gripper(canvas: _Canvas, scene: Scene) -> None:
    x, (_, y, z) = _x(scene.tip[0]), scene.tip
    tips = _y(y, z - TIP_LOW[2])  # the fingers reach the table at the lowest position
    hand = tips - _FINGER_LENGTH * _UP
    gap = _GAP_HELD if scene.held >= 0 else _GAP_CLOSED + scene.aperture * (_GAP_OPEN - _GAP_CLOSED)
    arm_top = hand - (_HAND_HEIGHT + _ARM_LENGTH) * _UP
    canvas.rectangle(x - _ARM_HALF, arm_top, x + _ARM_HALF, hand, _ARM)
    for side in (-1.0, 1.0):
        inner, outer = side * gap * _ACROSS, side * (gap + _FINGER_WIDTH) * _ACROSS
        canvas.rectangle(x + min(inner, outer), hand, x + max(inner, outer), tips, _FINGER)
    canvas.rectangle(x - _HAND_HALF * _ACROSS, hand - _HAND_HEIGHT * _UP, x + _HAND_HALF * _ACROSS, hand, _HAND)
