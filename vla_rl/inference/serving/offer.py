"""What a served policy reads and answers, in the terms of clients: parts of a request become a row of the inference
server, and its action chunk becomes numbers as data sets of the simulator have them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.base.vector_env import resized
from vla_rl.core.records import Array, EnvSpec

_SHOWN = 10  # instructions of an error
_LARGEST = 1e6  # of a state, in whatever unit: beyond it, a network's numbers overflow


class RequestError(ValueError):
    """A request that cannot be answered. The text is for the client: the key, what came, and what is expected."""


@dataclass(frozen=True, slots=True)
class Row:
    """One observation, as in ``Observation``."""

    images: Array  # uint8 [V, H, W, 3]
    proprio: Array  # float32 [P]
    task: int


class Offer:
    """Reads requests for a policy of ``spec``, and words its answers."""

    def __init__(self, spec: EnvSpec, chunk_size: int) -> None:
        self.spec, self.chunk_size = spec, chunk_size
        self._tasks = {_plain(text): number for number, text in enumerate(spec.instructions)}

    def row(self, request: Mapping[Any, Any], images: Sequence[str], state: str, prompt: str) -> Row:
        """A row of the parts with these keys; ``images``: one key for each view, the main one first.

        Images of another size are resized (Lanczos). Raises RequestError.
        """
        views = [self._image(key, request.get(key)) for key in images]
        return Row(np.stack(views), self._state(state, request.get(state)), self._task(prompt, request.get(prompt)))

    def actions(self, chunk: Array) -> Array:
        """float64 [K, A] of a policy's chunk: clipped to the limits, grippers as data sets have them.

        Raises RequestError if the policy has no finite ones for this observation.
        """
        if not np.isfinite(chunk).all():
            raise RequestError("the policy's actions for this observation are not finite")
        space = self.spec.actions
        return space.to_data(space.clip(chunk))

    def _image(self, key: str, value: Any) -> Array:
        size = self.spec.image_size
        is_image = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3
        if not is_image or value.shape[0] != value.shape[1] or value.shape[2] != 3 or not len(value):
            raise RequestError(
                f"{key}: need a square image, upright, uint8 [{size}, {size}, 3] or of another size; came "
                f"{_described(value)}"
            )
        image: Array = resized(value[None], size)[0]
        return image

    def _state(self, key: str, value: Any) -> Array:
        width = self.spec.proprio_dim
        if not width:
            return np.zeros(0, np.float32)
        is_state = isinstance(value, np.ndarray) and value.dtype.kind in "iuf" and value.shape == (width,)
        if not is_state or not (np.abs(value) < _LARGEST).all():  # nor is a NaN
            text = f"need {width} finite numbers below {_LARGEST:.0e}, float32 [{width}]"
            raise RequestError(f"{key}: {text}; came {_described(value)}")
        state: Array = value.astype(np.float32)
        return state

    def _task(self, key: str, value: Any) -> int:
        known = self.spec.instructions
        number = self._tasks.get(_plain(value)) if isinstance(value, str) else None
        if number is None:
            texts = "; ".join(known[:_SHOWN]) + (f"; and {len(known) - _SHOWN} others" if len(known) > _SHOWN else "")
            raise RequestError(f"{key}: need an instruction that is served ({texts}); came {_described(value)}")
        return number


def _plain(text: str) -> str:
    """Case and spaces do not tell instructions apart."""
    return " ".join(text.lower().split())


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        largest = f", up to {np.abs(value).max():.3g}" if value.dtype.kind == "f" and value.size else ""
        return f"{value.dtype} {list(value.shape)}{largest}"
    if value is None:
        return "nothing"
    return f"{value[:100]!r}" if isinstance(value, str) else type(value).__name__
