"""Ways in which images may be stored otherwise than a simulator draws them."""

from collections.abc import Callable, Mapping

import numpy as np

AS_IT_IS = "as it is"
# On uint8 [..., H, W, 3]; each undoes itself.
IMAGE_CONVENTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    AS_IT_IS: lambda images: images,
    "rotated by 180 degrees": lambda images: images[..., ::-1, ::-1, :],
    "upside down": lambda images: images[..., ::-1, :, :],
    "mirrored left to right": lambda images: images[..., :, ::-1, :],
    "blue and red swapped": lambda images: images[..., ::-1],
}
