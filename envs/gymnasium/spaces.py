"""What a policy can see and do in an environment of gymnasium, read from its spaces."""

import math
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envs.base import EnvError
from envs.base.vector_env import resized
from envs.gymnasium.config import GymnasiumConfig
from vla_rl.core.actions import ActionSpace

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
    if not np.isfinite([low, high]).all():
        raise EnvError(f"its actions have no limits, {space}: set env.action_limits=[[LOW,HIGH]], or a pair for each")
    if any(i >= len(low) for i in config.grippers):
        raise EnvError(f"env.grippers={config.grippers}: the last number of its actions is {len(low) - 1}")
    try:
        return ActionSpace.from_box(low.tolist(), high.tolist(), config.grippers)
    except ValueError as error:
        raise EnvError(f"its actions are {space}: {error}") from None


def as_view(image: np.ndarray, size: int) -> np.ndarray:
    """uint8 [size, size, 3] of an image [H, W, 3] or [3, H, W]."""
    if image.shape[-1] != 3:
        image = np.moveaxis(image, 0, -1)
    return resized(np.asarray(image, np.uint8)[None], size)[0]
