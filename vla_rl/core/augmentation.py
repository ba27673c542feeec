"""Random changes of images that leave their meaning as it is."""

import numpy as np

from vla_rl.core.records import Array


def random_shift(images: Array, pixels: int, rng: np.random.Generator) -> Array:
    """Images moved by up to ``pixels`` in each direction, their borders repeated (DrQ-v2, arXiv:2107.09645).

    ``images`` uint8 [n, V, H, W, 3]; all views of a row move alike. Returns a new array.
    """
    if pixels == 0:
        return images.copy()
    n, _, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (pixels, pixels), (pixels, pixels), (0, 0)), mode="edge")
    moved = np.empty_like(images)
    for row, (down, right) in enumerate(rng.integers(0, 2 * pixels + 1, (n, 2))):
        moved[row] = padded[row, :, down : down + height, right : right + width]
    return moved
