"""What a policy can see and do in an environment of gymnasium, read from its spaces."""

import math
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envs.base import EnvError
from envs.base.vector_env import resized

RENDER = "render"
_WHOLE = ""  # key of an observation that is no dictionary


def leaves(space: spaces.Space, above: str = _WHOLE) -> Iterator[tuple[str, spaces.Space]]:
    """The parts of an observation space by key; ``a/b`` for b within a."""
    if isinstance(space, spaces.Dict):
        for name, inner in space.items():
            yield from leaves(inner, f"{above}/{name}" if above else name)
    else:
        yield above, space


def part(observation: Any, key: str) -> np.ndarray:
    """The part of an observation with this key."""
    for name in key.split("/") if key else ():
        observation = observation[name]
    return np.asarray(observation)


def is_image(space: spaces.Space) -> bool:
    """uint8 [H, W, 3], or [3, H, W]."""
    shape = space.shape
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and shape is not None and _is_image_shape(shape)


def _is_image_shape(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and min(shape[:2]) >= 1 and (shape[2] == 3 or (shape[0] == 3 and shape[1] > 3))


def is_vector(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Box) and not is_image(space) and np.issubdtype(space.dtype, np.floating)


def image_keys(env: gymnasium.Env, wanted: str | None) -> tuple[str, ...]:
    """Keys of the views. Raises EnvError if the observation has no such image."""
    found = [key for key, space in leaves(env.observation_space) if is_image(space)]
    if wanted is None:
        keys = tuple(found) or (RENDER,)
    else:
        keys = tuple(key.strip() for key in wanted.split(","))
    if unknown := [key for key in keys if key != RENDER and key not in found]:
        raise EnvError(
            f"env.image={','.join(unknown)}: the observation has no such uint8 image [H, W, 3]; it has "
            f"{', '.join(found) or 'none'}; `render` takes what render() draws"
        )
    return keys


def state_keys(env: gymnasium.Env, wanted: tuple[str, ...] | None) -> tuple[str, ...]:
    """Keys of the vectors. Raises EnvError if the observation has no such vector."""
    found = [key for key, space in leaves(env.observation_space) if is_vector(space)]
    keys = tuple(found) if wanted is None else wanted
    if unknown := [key for key in keys if key not in found]:
        raise EnvError(
            f"env.state={','.join(unknown)}: the observation has no such vector; it has {', '.join(found) or 'none'}"
        )
    return keys


def state_size(env: gymnasium.Env, keys: tuple[str, ...]) -> int:
    shapes = {key: space.shape or () for key, space in leaves(env.observation_space)}
    sizes: list[int] = [math.prod(shapes[key]) for key in keys]
    return sum(sizes)


def action_limits(env: gymnasium.Env) -> tuple[np.ndarray, np.ndarray]:
    """float64 [A] each. Raises EnvError for anything but a Box with one dimension."""
    space = env.action_space
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise EnvError(f"its actions are {space}: policies here act in a Box with one dimension, [A]")
    return space.low.astype(np.float64), space.high.astype(np.float64)


def as_view(image: np.ndarray, size: int) -> np.ndarray:
    """uint8 [size, size, 3] of an image [H, W, 3] or [3, H, W]."""
    if image.shape[-1] != 3:
        image = np.moveaxis(image, 0, -1)
    return resized(np.asarray(image, np.uint8)[None], size)[0]
