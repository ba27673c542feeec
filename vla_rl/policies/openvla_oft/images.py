"""Converts camera images to the inputs of the two vision towers.

    uint8 image ─► JPEG and back ─► resize ─► crop to 90% of the area, resize back ─► normalize, for each tower
                   architecture.jpeg          architecture.center_crop
                                   architecture.resize                    architecture.crop_rounding

OpenVLA's data sets were written as JPEG, resized with a Lanczos filter, and cropped by TensorFlow; evaluation does the
same (openvla-oft, experiments/robot/openvla_utils.py). All but JPEG is computed where the images are.
"""

import io
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vla_rl.policies.base.constants import constant
from vla_rl.policies.openvla_oft.architecture import Architecture, Resize, Rounding

CROP_AREA = 0.9
_JPEG_QUALITY = 95  # the default of TensorFlow's ``encode_jpeg``
_LANCZOS_LOBES = 3


def prepare_images(images: Tensor, architecture: Architecture) -> tuple[Tensor, Tensor]:
    """Resize, crop and normalize images as the architecture says.

    Args:
        images: uint8 [N, H, W, 3]. Images of the architecture's size are not resampled.

    Returns:
        float32 [N, 3, size, size] for DINOv2 (its mean and standard deviation) and for SigLIP (to [-1, 1]).
    """
    if architecture.jpeg:
        images = jpeg_round_trip(images)
    pixels = resize(images.permute(0, 3, 1, 2).float(), architecture.image_size, architecture.resize)
    if architecture.center_crop:
        pixels = crop_center(pixels, architecture.crop_rounding)
    mean = constant(architecture.dino_mean, pixels.device).view(3, 1, 1) * 255
    std = constant(architecture.dino_std, pixels.device).view(3, 1, 1) * 255
    return (pixels - mean) / std, pixels / 127.5 - 1


def jpeg_round_trip(images: Tensor) -> Tensor:
    """uint8 [N, H, W, 3], each compressed to JPEG and back on the host, on as many threads as torch uses.

    Pillow's decoder differs from TensorFlow's, which takes a faster and less exact cosine transform, by one level on
    average.
    """
    arrays = images.cpu().numpy()
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        decoded = list(threads.map(_jpeg_round_trip, arrays))
    return torch.from_numpy(np.stack(decoded)).to(images.device)


def resize(pixels: Tensor, size: int, method: Resize) -> Tensor:
    """float [N, C, H, W] in 0..255 to [N, C, size, size], filtered against aliasing; Lanczos rounds to integers."""
    height, width = pixels.shape[-2:]
    if (height, width) == (size, size):
        return pixels
    if method == "bilinear":
        return F.interpolate(pixels, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
    rows, columns = (_lanczos_weights(old, size, pixels.device) for old in (height, width))
    return (rows @ pixels @ columns.T).round().clamp(0, 255)


def crop_center(pixels: Tensor, rounding: Rounding = "nearest") -> Tensor:
    """The middle 90% of the area of float [N, C, S, S] images in 0..255, resized back to S by bilinear sampling.

    The outermost samples lie on the crop's border, as in TensorFlow's ``crop_and_resize``. Results are integers: the
    nearest ones, or those of TensorFlow's ``convert_image_dtype``, which truncates 255.5 x for x in 0..1.
    """
    count, _, size, _ = pixels.shape
    half_side = CROP_AREA**0.5
    line = torch.linspace(-half_side, half_side, size, device=pixels.device, dtype=pixels.dtype)
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1).expand(count, size, size, 2)
    cropped = F.grid_sample(pixels, grid, mode="bilinear", align_corners=True)
    return ((cropped * (255.5 / 255)).floor() if rounding == "truncate" else cropped.round()).clamp(0, 255)


def _jpeg_round_trip(image: np.ndarray) -> np.ndarray:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=_JPEG_QUALITY)
    with Image.open(buffer) as decoded:
        return np.asarray(decoded.convert("RGB"))


@lru_cache(maxsize=8)
def _lanczos_weights(old: int, new: int, device: torch.device) -> Tensor:
    """float32 [new, old]: the part of each old pixel in each new one; the filter is as wide as the larger pixels.

    Pixel i lies at i + 1/2, as in TensorFlow's ``resize`` with ``antialias=True``.
    """
    scale = old / new
    places = (torch.arange(new, dtype=torch.float64) + 0.5) * scale
    distance = (torch.arange(old, dtype=torch.float64) + 0.5 - places.unsqueeze(1)) / max(scale, 1.0)
    weights = torch.sinc(distance) * torch.sinc(distance / _LANCZOS_LOBES) * (distance.abs() < _LANCZOS_LOBES)
    return (weights / weights.sum(1, keepdim=True)).float().to(device)
