"""An environment that a package offers only as a ``gymnasium.vector.VectorEnv``, one environment wide.

The environments of a vector step together. Here each starts, ends and waits for the policy by itself, so each is a
vector of its own. What a vector gains by its width is lost; everything else works.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from envs.gymnasium.spaces import as_array

_LAST = ("final_obs", "final_observation")  # gymnasium 1.0 and later; before


class VectorOfOne(gymnasium.Env):
    """The only environment of ``vector``, whose ``num_envs`` is 1.

    ``resets_itself``: whether the step that ends an episode starts the next one, as its metadata or an info said.
    """

    def __init__(self, vector: VectorEnv) -> None:
        self._vector = vector
        self.observation_space = vector.single_observation_space
        self.action_space = vector.single_action_space
        self.spec, self.render_mode = vector.spec, vector.render_mode
        mode = (vector.metadata or {}).get("autoreset_mode")
        self.resets_itself = getattr(mode, "value", mode) == AutoresetMode.SAME_STEP.value

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See gymnasium."""
        observation, info = self._vector.reset(seed=seed, options=options)
        return _first(observation), _first_info(info)

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See gymnasium. A vector that resets itself in the step that ends an episode tells the end in its info."""
        observation, reward, terminated, truncated, info = self._vector.step(np.asarray(action)[None])
        seen, about = _first(observation), _first_info(info)
        ended = bool(_first(terminated)) or bool(_first(truncated))
        last_info, last = about.pop("final_info", None), [about.pop(key, None) for key in _LAST]
        if ended:  # else these are of nobody
            about = last_info or about  # which is of the next episode then
            found = next((one for one in last if one is not None), None)
            self.resets_itself |= found is not None
            seen = seen if found is None else found
        return seen, float(_first(reward)), bool(_first(terminated)), bool(_first(truncated)), about

    def render(self) -> Any:
        """See gymnasium."""
        frames: Any = self._vector.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        """See gymnasium."""
        self._vector.close()


def _first(value: Any) -> Any:
    """Without the leading dimension: of an array or tensor, or of a dictionary or tuple of them."""
    if isinstance(value, dict):
        return {key: _first(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_first(part) for part in value)
    row = value[0]
    return as_array(row) if hasattr(row, "detach") else row


def _first_info(info: dict[str, Any]) -> dict[str, Any]:
    """``_key`` tells of which environments ``key`` holds a value (gymnasium's convention for vectors)."""
    known = {key: value for key, value in info.items() if not (key.startswith("_") and key[1:] in info)}
    told = {key: value for key, value in known.items() if f"_{key}" not in info or bool(_first(info[f"_{key}"]))}
    return {key: _first(value) if key in _LAST else _first_of_info(value) for key, value in told.items()}


def _first_of_info(value: Any) -> Any:
    """Also of what is not one value for each environment: it stays as it is."""
    if isinstance(value, dict):
        return _first_info(value)
    return _first(value) if getattr(value, "shape", ()) or (isinstance(value, list) and value) else value
