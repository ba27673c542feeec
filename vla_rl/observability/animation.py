"""A run as an animation: episodes before and after training, beside the curve of success, which grows.

films, metrics ──▶ two pictures: with the curve and without ──▶ frames: films, and the curve up to now ──▶ a small file
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.files import replacing
from vla_rl.observability.plots import EFFORTS, Effort, Metrics, draw_success

if TYPE_CHECKING:
    from PIL.Image import Image

_WIDTH, _HEIGHT, _DPI = 960, 392, 100  # pixels, as all below
_BOX = (256, 308)  # width and height of a film with its captions
_TOP = 56  # the upper edge of films and curve
_LEFTS = (12, 280)  # of the films
_CURVE = (610, 336, 238)  # left, width and height of its axes
_FPS = 10
_SECONDS = 8.0  # longer films are played faster
_LAST_MS = 2500  # for which the end stands still
_SAVINGS = {  # quality (of a gif: colors), and each how many-th frame; the best that is small enough is taken
    ".webp": ((80, 1), (60, 1), (40, 1), (60, 2), (40, 2), (20, 2), (20, 4)),
    ".gif": ((256, 1), (128, 1), (64, 1), (128, 2), (64, 2), (32, 2), (32, 4)),
}


@dataclass(frozen=True, slots=True)
class Film:
    """A film of an evaluation, and what stands above it."""

    path: Path
    title: str


def draw_animation(
    films: Sequence[Film],
    metrics: Metrics,
    path: Path,
    title: str,
    over: Effort = EFFORTS["minutes"],
    most_bytes: int = 400_000,
) -> int:
    """Write two films side by side and the success of their run; returns the bytes of the file.

    Films begin together; the shorter one rests at its end. The curve has grown to its end when the longer one ends.
    ``path``: a ``.webp`` or ``.gif`` file of at most ``most_bytes``; to be small enough, it has a lower quality, then
    fewer frames. Raises UserError if a film cannot be read, if no setting is small enough, or if the file cannot be
    written.
    """
    if path.suffix.lower() not in _SAVINGS:
        raise UserError(f"{path}: an animation is a .webp or a .gif file; name one of these")
    measured = [_length(film.path) for film in films]
    longest, rate = max(length for length, _ in measured), max(rate for _, rate in measured)
    step = max(1, math.ceil(max(longest / (_SECONDS * _FPS), rate / _FPS)))
    shown = [_frames(film.path, step, length) for film, (length, _) in zip(films, measured, strict=True)]
    speed = step * _FPS / rate
    note = "the first episodes of each evaluation" + (f", at {speed:.2g} times their speed" if speed > 1 else "")
    curve, empty, columns = _still([film.title for film in films], metrics, title, note, over)
    count = max(map(len, shown))
    frames = []
    for i in range(count):
        frame, now = empty.copy(), columns[0] + round((columns[1] - columns[0]) * (i + 1) / count)
        frame[:, columns[0] : now] = curve[:, columns[0] : now]
        for left, film in zip(_LEFTS, shown, strict=True):
            _paste(frame, film[min(i, len(film) - 1)], left)
        frames.append(frame)
    data = _encoded(frames, path, most_bytes)
    try:
        with replacing(path) as partial:
            partial.write_bytes(data)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error}); name another file") from error
    return len(data)


@contextmanager
def _reading(film: Path) -> Iterator[Any]:
    """A reader of a film. What its library raises of a damaged one is a UserError."""
    import imageio

    try:
        with imageio.get_reader(film) as reader:
            yield reader
    except (OSError, RuntimeError, IndexError) as error:
        first = str(error).partition("\n")[0]  # its library waits for ten seconds, which a busy machine can exceed
        remedy = "name a run whose films are whole, or try again if the machine is busy"
        raise UserError(f"{film} cannot be read as a film ({first}); {remedy}") from error


def _length(film: Path) -> tuple[int, float]:
    """How many frames a film has, in all and a second."""
    with _reading(film) as reader:
        return reader.count_frames(), reader.get_meta_data()["fps"]


def _frames(film: Path, step: int, length: int) -> list[np.ndarray]:
    """Every ``step``-th frame and the last one, uint8 [H, W, 3], of the size in which they are shown."""
    with _reading(film) as reader:
        found = [_fitted(np.asarray(frame)) for i, frame in enumerate(reader) if i % step == 0 or i == length - 1]
    if not found:
        raise UserError(f"{film} holds no frame; name a run whose films are whole")
    return found


def _fitted(frame: np.ndarray) -> np.ndarray:
    """Enlarged by a whole factor, so that its pixels stay what they are, or reduced."""
    from PIL import Image

    height, width = frame.shape[:2]
    if factor := min(_BOX[0] // width, _BOX[1] // height):
        return frame.repeat(factor, axis=0).repeat(factor, axis=1)
    image = Image.fromarray(frame)
    image.thumbnail(_BOX)
    return np.asarray(image)


def _paste(picture: np.ndarray, frame: np.ndarray, left: int) -> None:
    """Into the box whose left edge is given, in the middle of its upper edge."""
    height, width = frame.shape[:2]
    left += (_BOX[0] - width) // 2
    picture[_TOP : _TOP + height, left : left + width] = frame


def _still(
    titles: Sequence[str], metrics: Metrics, title: str, note: str, over: Effort
) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """All that stands still, uint8 [H, W, 3], with the curves and without; and between which columns they lie."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = Figure((_WIDTH / _DPI, _HEIGHT / _DPI), dpi=_DPI)
    canvas = FigureCanvasAgg(drawing)
    drawing.text(0.5, 1 - 15 / _HEIGHT, title, ha="center", va="center", fontsize=11)
    for left, text in zip(_LEFTS, titles, strict=True):
        middle = (left + _BOX[0] / 2) / _WIDTH
        drawing.text(middle, 1 - (_TOP - 12) / _HEIGHT, text, ha="center", va="center", fontsize=9)
    drawing.text(_LEFTS[0] / _WIDTH, 14 / _HEIGHT, note, va="center", fontsize=8, color="dimgray")
    left, width, height = _CURVE
    bottom = _HEIGHT - _TOP - height
    axis = drawing.add_axes((left / _WIDTH, bottom / _HEIGHT, width / _WIDTH, height / _HEIGHT))
    draw_success(axis, metrics, over)
    axis.set_title("")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=7, frameon=False)
    pictures = []
    for visible in (True, False):
        for artist in (*axis.lines, *axis.collections):
            artist.set_visible(visible)
        canvas.draw()
        pictures.append(np.asarray(canvas.buffer_rgba())[..., :3].copy())
    return pictures[0], pictures[1], (math.floor(axis.bbox.x0), math.ceil(axis.bbox.x1))


def _encoded(frames: Sequence[np.ndarray], path: Path, most_bytes: int) -> bytes:
    """The first of ``_SAVINGS`` that is small enough."""
    sizes = []
    for quality, every in _SAVINGS[path.suffix.lower()]:
        kept = [*frames[:-1:every], frames[-1]]
        data = _webp(kept, quality, every) if path.suffix.lower() == ".webp" else _gif(kept, quality, every)
        if len(data) <= most_bytes:
            return data
        sizes.append(len(data))
    raise UserError(f"{path} has at least {min(sizes) / 1000:.0f} kB, and --kilobytes allows {most_bytes / 1000:g}")


def _webp(frames: Sequence[np.ndarray], quality: int, every: int) -> bytes:
    return _saved([_image(frame) for frame in frames], every, "WEBP", quality=quality, method=4)


def _gif(frames: Sequence[np.ndarray], colors: int, every: int) -> bytes:
    """With the same colors in all frames, chosen from three of them, so that what stands still is stored once."""
    from PIL.Image import Dither

    sample = np.concatenate([frames[0], frames[len(frames) // 2], frames[-1]])
    palette = _image(sample).quantize(colors)
    images = [_image(frame).quantize(palette=palette, dither=Dither.NONE) for frame in frames]
    return _saved(images, every, "GIF", optimize=False)


def _saved(images: Sequence[Image], every: int, kind: str, **options: Any) -> bytes:
    durations = [1000 * every // _FPS] * (len(images) - 1) + [_LAST_MS]
    data = io.BytesIO()
    images[0].save(data, kind, save_all=True, append_images=images[1:], duration=durations, loop=0, **options)
    return data.getvalue()


def _image(frame: np.ndarray) -> Image:
    from PIL import Image

    return Image.fromarray(frame)
