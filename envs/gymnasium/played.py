"""One environment of gymnasium, whose failures name it and close it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium
import numpy as np

from envs.base import EnvError
from envs.gymnasium.config import GymnasiumConfig
from envs.gymnasium.sight import RENDER
from envs.gymnasium.spaces import as_array
from envs.gymnasium.vector_of_one import VectorOfOne
from vla_rl.core.errors import RecoverableError
from vla_rl.core.plugins import import_named


class EnvFailed(EnvError, RecoverableError):
    """An environment has raised an error: a new one may do better."""


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Let each EnvError begin with the environment's id; an EnvFailed does."""
    try:
        yield
    except EnvFailed:
        raise
    except EnvError as error:
        raise EnvError(f"env.id={name}: {error}") from error


class Played(gymnasium.Wrapper):
    """The environment that ``config`` describes. Raises EnvError if it cannot be made, EnvFailed if it fails later."""

    def __init__(self, config: GymnasiumConfig) -> None:
        super().__init__(_make(config))
        self.id, self.is_open = config.id, True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See gymnasium."""
        found: tuple[Any, dict[str, Any]] = self._call("reset", 2, seed=seed)
        return found

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See gymnasium."""
        dtype = np.dtype(self.action_space.dtype)
        command = (np.rint(action) if dtype.kind in "iu" else action).astype(dtype)
        observation, reward, terminated, truncated, info = self._call("step", 5, command)
        paid = as_array(reward)
        if paid.size != 1 or paid.dtype.kind not in "biuf" or not isinstance(info, dict):
            raise EnvError(f"step() gives the reward {reward!r} and the info {info!r}: one number, and a dictionary")
        return observation, float(paid.item()), bool(terminated), bool(truncated), info

    def render(self) -> Any:
        """See gymnasium. Raises EnvError where it would draw the next episode."""
        if isinstance(self.env, VectorOfOne) and self.env.resets_itself:
            raise EnvError(
                "render() draws the next episode after the last step of one (AutoresetMode.SAME_STEP): name an image "
                "of the observation in env.image, or make the vector with AutoresetMode.NEXT_STEP"
            )
        return self._call("render", None)

    def close(self) -> None:
        """Safe to call twice."""
        if self.is_open:
            self.is_open = False
            self.env.close()

    def _call(self, method: str, length: int | None, *arguments: Any, **keys: Any) -> Any:
        try:
            found = getattr(self.env, method)(*arguments, **keys)
            if length is not None and (not isinstance(found, tuple) or len(found) != length):
                raise TypeError(f"it gives {type(found).__name__} and not {length} values, as gymnasium's API has it")
            return found
        except Exception as error:  # of whatever kind the environment raises
            with suppress(Exception):
                self.close()
            text = f"env.id={self.id}: {method}() has failed, {type(error).__name__}: {str(error)[:300]}"
            raise EnvFailed(text) from error


def _make(config: GymnasiumConfig) -> gymnasium.Env:
    from envs.gymnasium.registration import register

    register()
    options: dict[str, Any] = dict(config.options)
    if config.image is None or any(RENDER in text for text in config.image):
        options.setdefault("render_mode", "rgb_array")
    try:
        try:
            return _make_one(config.id, options, config.max_episode_steps)
        except TypeError as error:
            if config.image is not None or "render_mode" in config.options or "'render_mode'" not in str(error):
                raise
            del options["render_mode"]  # its observation may have images
            return _make_one(config.id, options, config.max_episode_steps)
    except Exception as error:  # of whatever kind the environment raises
        raise EnvError(
            f"env.id={config.id} with {options}: gymnasium cannot make it ({type(error).__name__}: {str(error)[:300]})"
            "; install its package, and write MODULE:ID if a module has to be imported first"
        ) from error


def _make_one(name: str, options: dict[str, Any], limit: int | None) -> gymnasium.Env:
    module, _, plain = name.rpartition(":")
    if module:
        import_named(module)
    registered = gymnasium.registry.get(plain)
    vector = registered is not None and registered.entry_point is None and registered.vector_entry_point is not None
    # what a vector's registration limits, it limits itself; others have the limit of whoever plays them
    if limit is not None and (not vector or (registered is not None and registered.max_episode_steps is not None)):
        options["max_episode_steps"] = limit
    if vector:
        return VectorOfOne(gymnasium.make_vec(plain, num_envs=1, vectorization_mode="vector_entry_point", **options))
    env: gymnasium.Env = gymnasium.make(plain, disable_env_checker=True, **options)
    return env
