"""What the spaces of an environment of gymnasium mean: parts of observations, pictures, numbers, actions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envs.base import EnvError
from envs.base.vector_env import resized
from envs.gymnasium.config import GymnasiumConfig
from vla_rl.core.actions import ActionSpace

_WHOLE = "observation"  # name of an observation that is a single array
_CHANNELS = (1, 3, 4)
_SMALLEST, _SMALLEST_GRAY = 5, 16  # sides of what may be a picture; smaller arrays are numbers
_MOST_NUMBERS = 1024  # in a part of the state
_USEFUL = 1e6  # bounds beyond it are none
_TOLERANCE = 0.01  # share of the declared range by which a pixel may leave it


@dataclass(frozen=True)
class Picture:
    """How an array becomes a view. ``low`` and ``high``: what becomes 0 and 255."""

    channels_first: bool
    channels: int
    low: float
    high: float

    @classmethod
    def of(cls, space: spaces.Space) -> "Picture | str | None":
        """For the arrays of a space; why they cannot be seen, if they look like images; None for everything else."""
        shape = space.shape or ()
        gray = len(shape) == 2
        smallest = _SMALLEST_GRAY if gray else _SMALLEST
        if not isinstance(space, spaces.Box) or len(shape) < 2 or sorted(shape)[-2] < smallest:
            return None
        if len(shape) > 3:
            return "a stack of frames, or no image"
        first = not gray and shape[0] in _CHANNELS and min(shape[1:]) >= _SMALLEST
        if not gray and not first and not (shape[2] in _CHANNELS and min(shape[:2]) >= _SMALLEST):
            return "neither 1, 3 nor 4 channels"
        low, high = float(space.low.min()), float(space.high.max())
        if space.dtype == np.uint8 and high > 1:
            low, high = 0.0, 255.0
        elif not 0 < high - low <= _USEFUL:
            return "no bounds that say what is black and white"
        elif low != space.low.max() or high != space.high.min():
            return "other bounds for each pixel"
        return cls(first, 1 if gray else shape[0 if first else 2], low, high)

    def view(self, array: np.ndarray, size: int, name: str) -> np.ndarray:
        """uint8 [size, size, 3]. Raises EnvError for values beyond the declared bounds."""
        array = np.moveaxis(array, 0, -1) if self.channels_first else array.reshape(*array.shape[:2], -1)
        array = array[..., :3]
        if array.dtype != np.uint8 or self.high != 255:
            array = (np.asarray(array, np.float64) - self.low) / (self.high - self.low)
            if not (array.min() >= -_TOLERANCE and array.max() <= 1 + _TOLERANCE):  # nor NaN
                raise EnvError(f"{name} has values outside of {self.low:g}..{self.high:g}, which its space declares")
            array = np.rint(array.clip(0, 1) * 255).astype(np.uint8)
        return resized(np.broadcast_to(array, (*array.shape[:2], 3))[None], size)[0]


@dataclass(frozen=True)
class Part:
    """A part of an observation that is no dictionary or tuple. ``name``: a/b for b within a, a/0 in a tuple."""

    name: str
    path: tuple[Any, ...]
    space: spaces.Space
    picture: Picture | str | None  # see ``Picture.of``

    def __str__(self) -> str:
        box = isinstance(self.space, spaces.Box)
        kind = f"{self.space.dtype} {list(self.space.shape or ())}" if box else str(self.space)[:80]
        return f"{kind}: {self.picture}" if isinstance(self.picture, str) else kind

    def of(self, observation: Any) -> np.ndarray:
        """Its array. Raises EnvError if the observation lacks it, or it has another shape than the space says."""
        try:
            for step in self.path:
                observation = observation[step]
        except (KeyError, IndexError, TypeError):
            raise EnvError(f"an observation has no {self.name}, which its observation_space declares") from None
        array = as_array(observation)
        if array.shape != self.space.shape:
            raise EnvError(f"{self.name} has the shape {array.shape}, and {self.space.shape} in observation_space")
        return array

    @property
    def is_choice(self) -> bool:
        return isinstance(self.space, (spaces.Discrete, spaces.MultiDiscrete))

    @property
    def has_numbers(self) -> bool:
        """Whether it can be part of a state: numbers, flags, or choices, which become one-hot."""
        vector = isinstance(self.space, spaces.Box) and len(self.space.shape) <= 2 and self.picture is None
        known = vector or self.is_choice or isinstance(self.space, spaces.MultiBinary)
        return known and 1 <= spaces.flatdim(self.space) <= _MOST_NUMBERS

    def numbers(self, observation: Any) -> np.ndarray:
        """float64 [n]. Raises EnvError as ``of``, and for a choice that there is not."""
        array = self.of(observation)
        if self.is_choice and not self.space.contains(array.astype(self.space.dtype)[()]):
            raise EnvError(f"{self.name} is {array}, which is not in {self.space}")
        return np.asarray(spaces.flatten(self.space, array) if self.is_choice else array, np.float64).ravel()

    def bounds(self) -> np.ndarray:
        """float64 [n, 2]: the declared low and high ends of its numbers; NaN where they are infinite or huge."""
        flat: Any = spaces.flatten_space(self.space)
        found = np.stack([flat.low, flat.high], axis=1).astype(np.float64)
        found[(abs(found) > _USEFUL).any(axis=1) | (found[:, 0] >= found[:, 1])] = np.nan
        return found


def as_array(value: Any) -> np.ndarray:
    """In main memory: of a number, an array, or a tensor of any device."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def parts_of(space: spaces.Space, path: tuple[Any, ...] = ()) -> Iterator[Part]:
    """The parts of an observation, in the order of the space."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for key, within in space.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
            yield from parts_of(within, (*path, key))
    else:
        yield Part("/".join(map(str, path)) or _WHOLE, path, space, Picture.of(space))


def action_space(env: gymnasium.Env, config: GymnasiumConfig) -> ActionSpace:
    """Of the environment's Box, or of ``env.action_limits``, which may only be narrower.

    Raises EnvError for anything but a Box with one dimension, and for limits that are infinite or do not fit.
    """
    space = env.action_space
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise EnvError(f"its actions are {space}: policies here act in a Box with one dimension, [A]")
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    if config.action_limits is not None:
        given = config.action_limits * (len(low) if len(config.action_limits) == 1 else 1)
        if len(given) != len(low) or any(a < x or b > y for (a, b), x, y in zip(given, low, high, strict=True)):
            raise EnvError(f"env.action_limits={list(given)} do not fit its actions, {space}: lie within them")
        low, high = np.array(given).T
    if not (abs(np.array([low, high])) <= _USEFUL).all():
        raise EnvError(f"its actions have no limits, {space}: set env.action_limits=[[LOW,HIGH]], or a pair for each")
    if any(i >= len(low) for i in config.grippers):
        raise EnvError(f"env.grippers={config.grippers}: the last number of its actions is {len(low) - 1}")
    try:
        return ActionSpace.from_box(low.tolist(), high.tolist(), config.grippers)
    except ValueError as error:
        raise EnvError(f"its actions are {space}: {error}") from None
