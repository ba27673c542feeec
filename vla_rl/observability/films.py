"""Films of episodes, with captions above the frames: instruction, step, value, and at the end the verdict.

A frame is enlarged by a whole factor, so that each of its pixels stays one square, and no caption covers any of them.
Players lay their controls over the lower edge: captions there could not be read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vla_rl.core.records import Array, EnvSpec, EpisodeResult
from vla_rl.observability.verdicts import verdict

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

_LEAST = 256  # pixels of the shorter side of an enlarged frame
_HELD_S = 1.5  # how long the last frame stays, with the verdict
_MOST_LINES = 4  # of an instruction
_BACK, _TEXT, _MUTED = (20, 22, 26), (233, 234, 236), (169, 173, 181)
_SUCCESS, _FAILURE = (24, 105, 57), (163, 40, 32)  # behind a verdict


def write_film(path: Path, episodes: Sequence[EpisodeResult], spec: EnvSpec) -> None:
    """An H.264 video of episodes that have frames, one after the other, in real time; playable everywhere.

    Raises what imageio does, such as OSError, and ValueError for frames of changing size or an ending that is no
    film's. An older file then stays.
    """
    import imageio

    # a name with the same ending, by which the format is chosen; ``remove_partial`` finds what a crash leaves
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", suffix=".partial", dir=path.parent) as folder:
        whole = Path(folder) / path.name
        with imageio.get_writer(whole, fps=spec.fps, codec="libx264", macro_block_size=2) as writer:
            for frame in film_frames(episodes, spec):
                writer.append_data(frame)  # type: ignore[attr-defined]
        whole.replace(path)


def film_seconds(episode: EpisodeResult, spec: EnvSpec) -> float:
    """How long an episode takes in a film."""
    return (len(episode.frames) + _held(spec)) / spec.fps


def _held(spec: EnvSpec) -> int:
    """Further frames with the verdict."""
    return round(_HELD_S * spec.fps)


def film_frames(episodes: Sequence[EpisodeResult], spec: EnvSpec) -> Iterator[Array]:
    """The frames of a film, uint8 [H, W, 3] with even sides, one for each control step and some for the verdict."""
    factor = enlargement(episodes[0].frames[0])
    width = _even(factor * episodes[0].frames[0].shape[1])
    caption = _Caption(width, [spec.instructions[result.episode.task] for result in episodes])
    for result in episodes:
        instruction = spec.instructions[result.episode.task]
        last = len(result.frames)
        for step, frame in enumerate(result.frames, 1):
            value = result.values[step - 1] if result.values else None
            told = caption.drawn(instruction, f"step {step} of {spec.max_episode_steps}", value, result, step == last)
            whole = _below(told, enlarged(frame, factor))
            yield whole
        for _ in range(_held(spec)):
            yield whole


def enlargement(frame: Array) -> int:
    """The smallest whole factor that makes both sides of a frame [H, W, 3] long enough."""
    return -(-_LEAST // min(frame.shape[:2]))


def enlarged(frame: Array, factor: int) -> Array:
    """A frame [H, W, 3] whose pixels have become squares."""
    return frame.repeat(factor, axis=0).repeat(factor, axis=1)


def _below(caption: Array, frame: Array) -> Array:
    """Caption and frame in one image with even sides, as H.264 wants them."""
    height, width = _even(frame.shape[0]), _even(frame.shape[1])
    image = np.full((height, width, 3), _BACK, np.uint8)
    image[: frame.shape[0], : frame.shape[1]] = frame
    return np.concatenate([caption, image])


def _even(length: int) -> int:
    return length + length % 2


class _Caption:
    """The strip above the frames of a film; equally high for all of its episodes."""

    def __init__(self, width: int, instructions: Sequence[str]) -> None:
        size = max(13, width // 24)
        self._font = _font(size)
        self._line, self._margin = round(1.4 * size), size // 2
        self._lines = {text: self._wrapped(text, width - 2 * self._margin) for text in dict.fromkeys(instructions)}
        self._rows = max(map(len, self._lines.values()))
        self._width = width
        self._height = _even(self._margin + (self._rows + 2) * self._line + self._margin // 2)

    def drawn(self, instruction: str, step: str, value: float | None, result: EpisodeResult, ended: bool) -> Array:
        """uint8 [H, W, 3]."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (self._width, self._height), _BACK)
        draw = ImageDraw.Draw(image)
        for row, line in enumerate(self._lines[instruction]):
            draw.text((self._margin, self._top(row)), line, _TEXT, self._font)
        draw.text((self._margin, self._top(self._rows)), step, _MUTED, self._font)
        if value is not None:
            place = (self._width - self._margin, self._top(self._rows))
            draw.text(place, f"value {value:.2f}", _MUTED, self._font, anchor="ra")
        if ended:
            self._judge(draw, result)
        return np.asarray(image)

    def _judge(self, draw: ImageDraw, result: EpisodeResult) -> None:
        color = _SUCCESS if result.success else _FAILURE
        top = self._top(self._rows + 1)
        draw.rectangle((0, top - self._margin // 3, self._width, self._height), color)
        draw.text((self._margin, top), verdict(result), (255, 255, 255), self._font)

    def _top(self, row: int) -> int:
        return self._margin + row * self._line

    def _wrapped(self, text: str, width: int) -> list[str]:
        """Lines that fit; what is beyond the last of them is cut off, and so is a word that is too long."""
        lines = [""]
        for word in text.split():
            longer = f"{lines[-1]} {word}".strip()
            if self._font.getlength(longer) <= width or not lines[-1]:
                lines[-1] = longer
            else:
                lines.append(word)
        shown = lines[:_MOST_LINES]
        if len(lines) > _MOST_LINES:
            shown[-1] += " …"
        return [self._cut(line, width) for line in shown]

    def _cut(self, line: str, width: int) -> str:
        if self._font.getlength(line) <= width:
            return line
        kept = line.rstrip("… ")
        while kept and self._font.getlength(f"{kept}…") > width:
            kept = kept[:-1]
        return f"{kept}…"


def _font(size: int) -> FreeTypeFont:
    """DejaVu Sans, which matplotlib brings: it also has Cyrillic and Greek letters."""
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")), size)
