"""Small tensors of fixed numbers that forward passes read. Making one copies from the host, and a GPU waits for it."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """float32 [n] on the device, made once. Do not write to it."""
    return torch.tensor(values, dtype=torch.float32, device=device)
