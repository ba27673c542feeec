"""The tabletop's state and physics: a gripper above square blocks, quasi-static, vectorized over rows.

Lengths are in table widths: the table is the unit square, x to the right, y away from the viewer, z up. One control
step moves the finger tips by at most ``MAX_STEP`` along each axis. The rules are few:

* Below ``BLOCK_HEIGHT`` the fingers push a block that they touch: it moves as they do, without slipping off.
* Coming down on a block the fingers stop on its top, unless they are open and straddle it.
* Straddled blocks are dragged along; closing the fingers around a block grasps it, opening them drops it where it is.
* A moving block shoves other blocks out of its way, one deep (what they would shove in turn is left overlapping).

Shape letters: n rows, B blocks of a row; block 0 is the one that the instruction names.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

MAX_STEP = 0.04  # table widths; one control step along one axis at |action| = 1
BLOCK_HALF = 0.055  # half the side of a block
BLOCK_HEIGHT = 0.07
TIP_LOW = np.array([0.0, 0.0, 0.02])  # where the finger tips can go
TIP_HIGH = np.array([1.0, 1.0, 0.25])
CONTACT = 0.075  # fingers closer than this to the centre of a block touch it
GRASP = 0.04  # open fingers closer than this to the centre of a block straddle it
OPEN = 0.5  # apertures above this count as open
APERTURE_STEP = 0.4  # fastest change of the aperture in one control step
SETTLED_STEP = MAX_STEP / 2  # a control step shorter than this counts as no motion
REACHED = 0.05  # finger tips closer than this, in x and y, have reached a block

_ROUNDING = 1e-9  # a dragged block lies at GRASP up to rounding


@dataclass(slots=True)
class World:
    """Positions of everything, one row per environment."""

    tip: np.ndarray  # float64 [n, 3], between the finger tips
    aperture: np.ndarray  # float64 [n], 0 = closed .. 1 = open
    held: np.ndarray  # int64 [n], block between the fingers, -1: none
    blocks: np.ndarray  # float64 [n, B, 2], centres
    placed: np.ndarray  # float64 [n, B, 2], centres at the start of the episode
    settled: np.ndarray  # int64 [n, B], control steps for which the tips have been still over each block
    goal: np.ndarray  # float64 [n, 2], centre of the zone or plate

    @classmethod
    def empty(cls, rows: int, blocks: int) -> Self:
        return cls(
            tip=np.zeros((rows, 3)),
            aperture=np.zeros(rows),
            held=np.full(rows, -1),
            blocks=np.zeros((rows, blocks, 2)),
            placed=np.zeros((rows, blocks, 2)),
            settled=np.zeros((rows, blocks), np.int64),
            goal=np.zeros((rows, 2)),
        )


def advance(world: World, rows: np.ndarray, actions: np.ndarray) -> None:
    """Advance the given rows by one control step, in place. ``actions``: [n, 7], clipped to their limits."""
    before = world.tip[rows]
    tip = np.clip(before + np.clip(actions[:, :3], -1.0, 1.0) * MAX_STEP, TIP_LOW, TIP_HIGH)
    was_open = world.aperture[rows] > OPEN
    change = np.clip(actions[:, 6], 0.0, 1.0) - world.aperture[rows]
    world.aperture[rows] += np.clip(change, -APERTURE_STEP, APERTURE_STEP)
    is_open = world.aperture[rows] > OPEN
    old = world.blocks[rows]
    held = world.held[rows]

    free = held < 0
    was_low = before[:, 2] < BLOCK_HEIGHT
    gap = _distance(old, tip[:, None, :2])
    around = _straddled(old, before, tip, gap, free & was_open)
    mine = np.arange(old.shape[1]) == held[:, None]
    below = gap < np.where(free, CONTACT, 2 * BLOCK_HALF)[:, None]
    landed = ~was_low & (tip[:, 2] < BLOCK_HEIGHT) & (below & ~around & ~mine).any(axis=1)
    tip[landed, 2] = BLOCK_HEIGHT

    low = tip[:, 2] < BLOCK_HEIGHT
    around &= low[:, None]
    touched = (gap < CONTACT) & ~around & (low & free)[:, None]
    blocks = _pushed(old, before, tip, gap, touched, around)

    closing = was_open & ~is_open & around.any(axis=1)
    now_held = np.where(closing, np.where(around, gap, np.inf).argmin(axis=1), np.where(is_open, -1, held))
    carried = np.flatnonzero((now_held >= 0) | ~free)
    index = np.where(now_held >= 0, now_held, held)[carried]
    blocks[carried, index] = tip[carried, :2]
    np.clip(blocks, BLOCK_HALF, 1.0 - BLOCK_HALF, out=blocks)
    _shove(blocks, old, np.where(now_held >= 0, now_held, held), airborne=(now_held >= 0) & ~low)

    world.tip[rows] = tip
    world.held[rows] = now_held
    world.blocks[rows] = blocks
    still = (np.abs(tip[:, :2] - before[:, :2]).max(axis=1) <= SETTLED_STEP)[:, None]
    world.settled[rows] = np.where(still & (gap <= REACHED), world.settled[rows] + 1, 0)


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    delta = a - b
    return np.sqrt(np.einsum("...i,...i->...", delta, delta))


def _straddled(
    blocks: np.ndarray, before: np.ndarray, tip: np.ndarray, gap: np.ndarray, able: np.ndarray
) -> np.ndarray:
    """bool [n, B]: blocks between the open fingers, since before or because the fingers come down around them now."""
    inside = _distance(blocks, before[:, None, :2]) <= GRASP + _ROUNDING
    was_low = (before[:, 2] < BLOCK_HEIGHT)[:, None]
    return np.where(was_low, inside, gap <= GRASP) & able[:, None]


def _pushed(
    blocks: np.ndarray, before: np.ndarray, tip: np.ndarray, gap: np.ndarray, touched: np.ndarray, around: np.ndarray
) -> np.ndarray:
    """[n, B, 2]: the blocks after the fingers have pushed those they touch and dragged those they straddle.

    From the moment of contact, a pushed block moves as the fingers do. Contact without slip makes pushing stable, and
    so feasible in open loop.
    """
    if not (touched.any() or around.any()):
        return blocks.copy()
    away = blocks - tip[:, None, :2]
    drag = away * ((np.minimum(gap, GRASP) - gap) / np.maximum(gap, _ROUNDING))[..., None]
    motion = (tip - before)[:, None, :2]
    start = blocks - before[:, None, :2]
    towards = (start * motion).sum(axis=2)
    length = np.maximum((motion * motion).sum(axis=2), _ROUNDING)
    # the fingers are at distance CONTACT from the block after this share of the step
    root = np.sqrt(np.maximum(towards**2 - length * ((start * start).sum(axis=2) - CONTACT**2), 0.0))
    share = np.clip((towards - root) / length, 0.0, 1.0)
    push = motion * (1.0 - share)[..., None]
    blocks = blocks + np.where((touched & (towards > 0.0))[..., None], push, 0.0)
    return blocks + np.where(around[..., None], drag, 0.0)


def _shove(blocks: np.ndarray, old: np.ndarray, held: np.ndarray, airborne: np.ndarray) -> None:
    """In each row, the held block, or else the one that moved furthest, pushes others out of its way, in place."""
    if blocks.shape[1] == 1:
        return
    moved = np.abs(blocks - old).sum(axis=2)
    mover = np.where(held >= 0, held, moved.argmax(axis=1))
    acting = np.flatnonzero(~airborne & ((held >= 0) | (moved.max(axis=1) > 0.0)))
    if not len(acting):
        return
    mover = mover[acting]
    away = blocks[acting] - blocks[acting, mover][:, None]
    distance = np.sqrt(np.einsum("nbi,nbi->nb", away, away))
    overlap = np.maximum(2 * BLOCK_HALF - distance, 0.0)
    overlap[np.arange(len(acting)), mover] = 0.0
    blocks[acting] += away * (overlap / np.maximum(distance, _ROUNDING))[..., None]
    np.clip(blocks, BLOCK_HALF, 1.0 - BLOCK_HALF, out=blocks)
