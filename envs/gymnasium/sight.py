"""What a policy sees of an environment of gymnasium: chosen by ``env.image`` and ``env.state``, or whatever fits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from envs.base import EnvError
from envs.gymnasium.config import GymnasiumConfig
from envs.gymnasium.spaces import Part, Picture, as_array, parts_of

RENDER = "render"


@dataclass(frozen=True)
class Sight:
    """The views, None for what render() draws; the parts of the state; all of it for people."""

    views: dict[str, Part | None]
    state: tuple[Part, ...]
    notes: tuple[str, ...]

    @classmethod
    def choose(cls, space: spaces.Space, config: GymnasiumConfig) -> "Sight":
        """Raises EnvError if what the configuration names cannot be seen, or no image can without being named."""
        parts = {part.name: part for part in parts_of(space)}
        if len(parts) < len(list(parts_of(space))):
            raise EnvError(f"parts of the observation share names ({', '.join(parts)}): rename them in a wrapper")
        usable = [name for name, part in parts.items() if isinstance(part.picture, Picture)]
        unusable = [f"{name}, {part}" for name, part in parts.items() if isinstance(part.picture, str)]
        if config.image is None and not usable and unusable:
            raise EnvError(
                f"none of its images can be used ({'; '.join(unusable)}): make them uint8 [H, W, 3] in a wrapper, or "
                f"set env.image={RENDER} for what render() draws"
            )
        images = tuple(usable) or (RENDER,)
        if config.image is not None:  # a text with commas is several names, unless a part has it as its name
            split = ([text] if text in parts else text.split(",") for text in config.image)
            images = tuple(name if name in parts else name.strip() for names in split for name in names)
        for name in {*images} - {*usable, RENDER}:
            raise EnvError(
                f"env.image={name}: {parts.get(name, 'the observation has no such image')}; it has "
                f"{', '.join(usable) or 'none'} (uint8, or bounds that say what is black and white; [H, W, C], "
                f"[C, H, W] or [H, W]; 1, 3 or 4 channels); `{RENDER}` takes what render() draws"
            )
        fit = [name for name, part in parts.items() if part.has_numbers]
        state = tuple(fit) if config.state is None else config.state
        for name in {*state} - {*fit}:
            about = f"{parts[name]} is no vector" if name in parts else "the observation has no such vector"
            raise EnvError(f"env.state={name}: {about}; it has {', '.join(fit) or 'none'}")
        notes = [f"images: {', '.join(images)}; state: {', '.join(state) or 'none'}"]
        notes += [f"{name}: its fourth channel is dropped" for name in images if _has_four(parts.get(name))]
        if left_out := [f"{name} ({part})" for name, part in parts.items() if name not in {*images, *state}]:
            notes.append(f"left out: {'; '.join(left_out)}")
        views = {name: parts[name] if name in usable else None for name in images}
        return cls(views, tuple(parts[name] for name in state), tuple(notes))

    def images(self, observation: Any, render: Callable[[], Any], size: int) -> np.ndarray:
        """uint8 [V, size, size, 3]. Raises EnvError."""
        views = []
        for name, part in self.views.items():
            array = part.of(observation) if part else as_array(render())
            picture = part.picture if part else Picture.of(spaces.Box(0, 255, array.shape, np.uint8))
            if not isinstance(picture, Picture) or (part is None and array.dtype != np.uint8):
                raise EnvError(f"render() gives {array.dtype} {array.shape}, not uint8 [H, W, 3]: set env.image")
            views.append(picture.view(array, size, name))
        return np.stack(views)

    def numbers(self, observation: Any) -> np.ndarray:
        """float64 [P]. Raises EnvError."""
        return np.concatenate([np.zeros(0), *(part.numbers(observation) for part in self.state)])

    def bounds(self) -> np.ndarray:
        """float64 [P, 2], as declared; NaN where nothing useful is."""
        return np.concatenate([np.zeros((0, 2)), *(part.bounds() for part in self.state)])


def _has_four(part: Part | None) -> bool:
    return part is not None and isinstance(part.picture, Picture) and part.picture.channels == 4
