"""Small seamless pictures for floors, walls and table tops, from noise with a fixed seed."""

import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from envs.libero.assets.placeholder.shapes import Color

SIZE = 128  # pixels


def write_texture(file: Path, pattern: str, color: Color) -> None:
    """Write one PNG; ``pattern`` is "plaster", "wood", "tiles" or "planks" (KeyError for others)."""
    rng = np.random.default_rng(zlib.crc32(file.name.encode()))
    shade = {"plaster": _plaster, "wood": _wood, "tiles": _tiles, "planks": _planks}[pattern](rng)
    pixels = np.clip(shade[..., None] * np.array(color) * 255, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(file)


def _noise(rng: np.random.Generator, along_x: float, along_y: float) -> np.ndarray:
    """float [SIZE, SIZE] of unit variance, periodic, with correlation lengths in pixels."""
    fx, fy = np.fft.fftfreq(SIZE)[None, :] * along_x, np.fft.fftfreq(SIZE)[:, None] * along_y
    spectrum = np.fft.fft2(rng.standard_normal((SIZE, SIZE))) / (1 + fx**2 + fy**2) ** 1.5
    spectrum[0, 0] = 0
    field = np.fft.ifft2(spectrum).real
    return field / field.std()


def _plaster(rng: np.random.Generator) -> np.ndarray:
    return 1 + 0.015 * _noise(rng, 3, 3) + 0.02 * _noise(rng, 25, 25)


def _wood(rng: np.random.Generator) -> np.ndarray:
    return 1 + 0.035 * _noise(rng, 120, 4) + 0.03 * _noise(rng, 200, 30)


def _tiles(rng: np.random.Generator) -> np.ndarray:
    count, joint = 4, 1
    shade = 1 + 0.015 * _noise(rng, 6, 6)
    for row in range(count):
        for column in range(count):
            low, left = row * SIZE // count, column * SIZE // count
            shade[low : low + SIZE // count, left : left + SIZE // count] *= 1 + 0.03 * rng.standard_normal()
            shade[low : low + joint, left : left + SIZE // count] *= 0.75
            shade[low : low + SIZE // count, left : left + joint] *= 0.75
    return shade


def _planks(rng: np.random.Generator) -> np.ndarray:
    count = 8
    shade = 1 + 0.03 * _noise(rng, 60, 3)
    width = SIZE // count
    for row in range(count):
        low = row * width
        end = int(rng.integers(SIZE))
        plank = np.roll(np.arange(SIZE), -end)
        shade[low : low + width] *= 1 + 0.04 * rng.standard_normal()
        shade[low : low + width, plank[0]] *= 0.7
        shade[low] *= 0.75
    return shade
