"""What a policy sees of an environment of gymnasium: chosen by ``env.image`` and ``env.state``, or whatever fits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from envs.base import EnvError
from envs.gymnasium.config import GymnasiumConfig
from envs.gymnasium.spaces import Part, Picture, as_array, bounds, has_numbers, numbers, parts_of, picture_of

RENDER = "render"


@dataclass(frozen=True)
class Sight:
    """The views and the state. ``left_out``: each part that is not seen, and why."""

    views: dict[str, tuple[Part, Picture] | None]  # None: what render() draws
    state: tuple[Part, ...]
    left_out: tuple[str, ...]

    @classmethod
    def choose(cls, space: spaces.Space, config: GymnasiumConfig) -> "Sight":
        """Raises EnvError if what the configuration names cannot be seen, or no image can without being named."""
        parts = parts_of(space)
        pictures = {name: picture_of(part.space) for name, part in parts.items()}
        usable = {name: (parts[name], found) for name, found in pictures.items() if isinstance(found, Picture)}
        problems = {name: f"{parts[name]}: {why}" for name, why in pictures.items() if isinstance(why, str)}
        if config.image is None and not usable and problems:
            listed = "; ".join(f"{name}, {why}" for name, why in problems.items())
            raise EnvError(
                f"none of its images can be used ({listed}): make them uint8 [H, W, 3] in a wrapper, or set "
                f"env.image={RENDER} for what render() draws"
            )
        wanted = _names(config.image, parts) or tuple(usable) or (RENDER,)
        for name in wanted:
            if name not in usable and name != RENDER:
                raise EnvError(
                    f"env.image={name}: {problems.get(name, 'the observation has no such image')}; it has "
                    f"{', '.join(usable) or 'none'} (uint8, or bounds that say what is black and white; [H, W, C], "
                    f"[C, H, W] or [H, W]; 1, 3 or 4 channels); `{RENDER}` takes what render() draws"
                )
        fit = [name for name, part in parts.items() if has_numbers(part.space)]
        chosen = tuple(fit) if config.state is None else config.state
        for name in chosen:
            if name not in fit:
                about = f"{parts[name]} is no vector" if name in parts else "the observation has no such vector"
                raise EnvError(f"env.state={name}: {about}; it has {', '.join(fit) or 'none'}")
        left_out = {name: problems.get(name, str(part)) for name, part in parts.items()}
        left_out = {name: why for name, why in left_out.items() if name not in {*wanted, *chosen}}
        notes = tuple(f"{name} ({why})" for name, why in left_out.items())
        return cls({name: usable.get(name) for name in wanted}, tuple(parts[name] for name in chosen), notes)

    def images(self, observation: Any, render: Callable[[], Any], size: int) -> np.ndarray:
        """uint8 [V, size, size, 3]. Raises EnvError."""
        views = []
        for name, found in self.views.items():
            array = found[0].of(observation) if found else as_array(render())
            picture: Any = found[1] if found else picture_of(spaces.Box(0, 255, array.shape, np.uint8))
            if found is None and (array.dtype != np.uint8 or not isinstance(picture, Picture)):
                raise EnvError(f"render() gives {array.dtype} {array.shape}, not uint8 [H, W, 3]: set env.image")
            views.append(picture.view(array, size, name))
        return np.stack(views)

    def numbers(self, observation: Any) -> np.ndarray:
        """float64 [P]. Raises EnvError."""
        return np.concatenate([np.zeros(0), *(numbers(part, observation) for part in self.state)])

    def bounds(self) -> np.ndarray:
        """float64 [P, 2], as declared; NaN where nothing useful is."""
        return np.concatenate([np.zeros((0, 2)), *(bounds(part) for part in self.state)])

    def notes(self) -> tuple[str, ...]:
        """What is seen, and what is not."""
        four = {name for name, found in self.views.items() if found and found[1].channels == 4}
        images = ", ".join(f"{name} (the fourth channel dropped)" if name in four else name for name in self.views)
        state = f"{', '.join(part.name for part in self.state) or 'none'}; {len(self.bounds())} numbers"
        left_out = [f"left out: {'; '.join(self.left_out)}"] if self.left_out else []
        return (f"images: {images}; state: {state}", *left_out)


def _names(image: str | tuple[str, ...] | None, parts: dict[str, Part]) -> tuple[str, ...]:
    """A text with commas is several names, unless a part has it as its name."""
    if image is None or isinstance(image, tuple):
        return image or ()
    return (image,) if image in parts else tuple(name.strip() for name in image.split(","))
