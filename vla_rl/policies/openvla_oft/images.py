"""Converts camera images to the inputs of the two vision towers."""

import io
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from vla_rl.policies.openvla_oft.architecture import IMAGENET_MEAN, IMAGENET_STD

CROP_AREA = 0.9  # openvla-oft, experiments/robot/openvla_utils.py
_JPEG_QUALITY = 95  # the default of the image library that wrote OpenVLA's data sets


def prepare_images(
    images: torch.Tensor,
    size: int,
    center_crop: bool,
    dino_mean: Sequence[float] = IMAGENET_MEAN,
    dino_std: Sequence[float] = IMAGENET_STD,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Resize, crop and normalize images on their device.

    Args:
        images: uint8 [N, H, W, 3].
        size: height and width of the towers' input; images of this size are not resampled.
        center_crop: keep the middle 90% of the area and resize it to ``size``, as OpenVLA's evaluation does.
        dino_mean, dino_std: of the three colours in 0..1.

    Returns:
        float32 [N, 3, size, size] for DINOv2 (by default ImageNet statistics) and for SigLIP (to [-1, 1]).
    """
    pixels = images.permute(0, 3, 1, 2).float()
    if pixels.shape[-2:] != (size, size):
        pixels = F.interpolate(pixels, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
    if center_crop:
        pixels = crop_center(pixels)
    mean = pixels.new_tensor(dino_mean).view(3, 1, 1) * 255
    std = pixels.new_tensor(dino_std).view(3, 1, 1) * 255
    return (pixels - mean) / std, pixels / 127.5 - 1


def crop_center(pixels: torch.Tensor, area: float = CROP_AREA) -> torch.Tensor:
    """The middle of float [N, C, S, S] images in 0..255, resized back to S by bilinear sampling and rounded.

    The outermost samples lie on the crop's border, as in TensorFlow's ``crop_and_resize``, which OpenVLA uses.
    """
    count, _, size, _ = pixels.shape
    half_side = area**0.5
    line = torch.linspace(-half_side, half_side, size, device=pixels.device, dtype=pixels.dtype)
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1).expand(count, size, size, 2)
    return F.grid_sample(pixels, grid, mode="bilinear", align_corners=True).round().clamp(0, 255)


def official_preprocess(image: np.ndarray, size: int = 224) -> np.ndarray:
    """JPEG round trip and Lanczos resize of a uint8 [H, W, 3] image, as in OpenVLA's data sets.

    For evaluations of an official checkpoint: apply it before the policy, whose ``center_crop`` does the rest.
    Pillow's JPEG and Lanczos differ from TensorFlow's by small rounding errors.
    """
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=_JPEG_QUALITY)
    buffer.seek(0)
    with Image.open(buffer) as decoded:
        return np.asarray(decoded.convert("RGB").resize((size, size), Image.Resampling.LANCZOS))
