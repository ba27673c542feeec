"""An environment's actions: for each number its name, its limits, and whether it is a gripper.

Data sets and published checkpoints may state a gripper otherwise than the environment does. So each dimension declares
both, and ``ActionSpace.from_data`` and ``to_data`` convert; all other numbers are the same on both sides.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True, slots=True)
class Gripper:
    """The numbers that open and that close a gripper. Raises ValueError unless they are finite and differ."""

    open: float
    closed: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.open) and math.isfinite(self.closed)) or self.open == self.closed:
            raise ValueError(f"a gripper needs two different numbers, not open={self.open}, closed={self.closed}")


OPENVLA = Gripper(open=1.0, closed=0.0)  # the RLDS data sets of the OpenVLA papers
ROBOSUITE = Gripper(open=-1.0, closed=1.0)  # LIBERO's demonstrations, LeRobot's data sets of LIBERO


@dataclass(frozen=True, slots=True)
class ActionDim:
    """One number of an action. Raises ValueError unless its limits are finite and in order.

    Attributes:
        name: such as "dx" or "joint_3".
        low, high: limits in the environment's unit; it clips what lies outside.
        turn: a rotation.
        gripper: what opens and closes a gripper, if it is one.
        data: the same in data sets and in checkpoints of others; None: as the environment has it.
    """

    name: str
    low: float = -1.0
    high: float = 1.0
    turn: bool = False
    gripper: Gripper | None = None
    data: Gripper | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high)) or self.low >= self.high:
            raise ValueError(f"action {self.name}: need finite low < high, not {self.low} and {self.high}")


@dataclass(frozen=True, slots=True)
class ActionSpace:
    """All A numbers of an action. Raises ValueError for none, or for names that are not unique."""

    dims: tuple[ActionDim, ...]

    def __post_init__(self) -> None:
        if not self.dims or len(set(self.names)) != len(self.dims):
            raise ValueError(f"an action needs numbers with names of their own, not {list(self.names)}")

    def __len__(self) -> int:
        return len(self.dims)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dim.name for dim in self.dims)

    @property
    def low(self) -> np.ndarray:
        """float64 [A]."""
        return np.array([dim.low for dim in self.dims])

    @property
    def high(self) -> np.ndarray:
        """float64 [A]."""
        return np.array([dim.high for dim in self.dims])

    @property
    def grippers(self) -> tuple[int, ...]:
        """The numbers of the dimensions that are grippers."""
        return tuple(i for i, dim in enumerate(self.dims) if dim.gripper is not None)

    @property
    def scaled(self) -> tuple[bool, ...]:
        """For each dimension whether policies scale it to -1 .. 1: all but grippers from 0 to 1, as OpenVLA does."""
        return tuple(dim.gripper is None or (dim.low, dim.high) != (0.0, 1.0) for dim in self.dims)

    @property
    def noise_scale(self) -> np.ndarray:
        """float64 [A]: half of each range; 0 for grippers, which noise would open."""
        return np.where([dim.gripper is None for dim in self.dims], (self.high - self.low) / 2, 0.0)

    def clip(self, actions: np.ndarray) -> np.ndarray:
        """What an environment makes of actions [..., A] outside of its limits, in the dtype of ``actions``."""
        return np.clip(actions, self.low, self.high).astype(np.asarray(actions).dtype)

    def data_grippers(self, stated: Gripper | None = None) -> dict[int, Gripper]:
        """The grippers of data sets by dimension: all as ``stated``; without it, as declared."""
        return {i: stated or dim.data or dim.gripper for i, dim in enumerate(self.dims) if dim.gripper is not None}

    def affine(self, grippers: Mapping[int, Gripper] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """float64 [A] each: a number of a data set, times the first, plus the second, is the environment's.

        ``grippers``: of the data set; None: as declared.
        """
        scale, shift = np.ones(len(self)), np.zeros(len(self))
        for i, there in (self.data_grippers() if grippers is None else grippers).items():
            here = self.dims[i].gripper
            assert here is not None
            scale[i] = (here.closed - here.open) / (there.closed - there.open)
            shift[i] = here.open - scale[i] * there.open
        return scale, shift

    def from_data(self, actions: np.ndarray, grippers: Mapping[int, Gripper] | None = None) -> np.ndarray:
        """float32 [..., A] of a data set's; its grippers beyond open and closed are clipped."""
        scale, shift = self.affine(grippers)
        found = np.asarray(actions, np.float64) * scale + shift
        i = list(self.grippers)
        found[..., i] = found[..., i].clip(self.low[i], self.high[i])
        return found.astype(np.float32)

    def to_data(self, actions: np.ndarray) -> np.ndarray:
        """float64 [..., A], as declared: the inverse of ``from_data``."""
        scale, shift = self.affine()
        return (np.asarray(actions, np.float64) - shift) / scale

    def described(self) -> str:
        """JSON for files: names, and the numbers that open and that close each gripper there."""
        grippers = {str(i): [g.open, g.closed] for i, g in self.data_grippers().items()}
        return json.dumps({"names": list(self.names), "grippers": grippers})

    def grippers_of(self, described: str) -> dict[int, Gripper]:
        """The grippers of a file that says so. Raises ValueError if they are not those of this space."""
        found = {int(i): Gripper(*ends) for i, ends in json.loads(described)["grippers"].items()}
        if sorted(found) != list(self.grippers):
            raise ValueError(
                f"its actions have grippers in the dimensions {sorted(found)}, the environment's in "
                f"{list(self.grippers)} (counted from 0)"
            )
        return found

    @classmethod
    def from_box(cls, low: Sequence[float], high: Sequence[float], grippers: Mapping[int, str]) -> Self:
        """Of the limits of a Box. ``grippers``: by dimension, whether a larger number "opens" or "closes" it."""
        dims = []
        for i, (a, b) in enumerate(zip(low, high, strict=True)):
            ends = {"opens": (b, a), "closes": (a, b)}.get(grippers.get(i, ""))
            dims.append(ActionDim(f"action_{i}", float(a), float(b), gripper=Gripper(*ends) if ends else None))
        return cls(tuple(dims))


def end_effector(data: Gripper = ROBOSUITE) -> ActionSpace:
    """OpenVLA's seven numbers: displacement, rotation, and a gripper from 0 = closed to 1 = open.

    Data sets and checkpoints for such an arm have the gripper as ``data`` says.
    """
    moves = [ActionDim(name) for name in ("dx", "dy", "dz")]
    turns = [ActionDim(name, turn=True) for name in ("droll", "dpitch", "dyaw")]
    return ActionSpace((*moves, *turns, ActionDim("gripper", 0.0, 1.0, gripper=OPENVLA, data=data)))


def assumed(numbers: int) -> ActionSpace:
    """Of an environment that is not known: OpenVLA's, or as many numbers without a meaning."""
    arm = end_effector()
    return arm if numbers == len(arm) else ActionSpace(tuple(ActionDim(f"action_{i}") for i in range(numbers)))
