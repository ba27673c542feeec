"""Master weights (arXiv:1710.03740): an optimizer's float32 copies of weights that a model holds in bfloat16."""

from collections.abc import Iterable

import torch
from torch import nn


class MasterWeights:
    """For optimizers without DeepSpeed. Weights in float32 are their own masters.

    Gradients are accumulated in float32, too: each of many micro-batches may be too small for bfloat16's 8 bits.
    """

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self._weights = list(weights)
        self.float32: list[nn.Parameter] = []  # what the optimizer steps on
        for weight in self._weights:
            low = weight.dtype != torch.float32
            if low:
                weight.grad_dtype = torch.float32
            self.float32.append(nn.Parameter(weight.detach().float()) if low else weight)

    def zero_grad(self) -> None:
        for weight in (*self._weights, *self.float32):
            weight.grad = None

    def take_gradients(self) -> None:
        """Call after the last backward pass, before the optimizer's step."""
        for weight, master in zip(self._weights, self.float32, strict=True):
            master.grad = weight.grad

    @torch.no_grad()
    def write_back(self) -> None:
        """Call after the optimizer's step."""
        for weight, master in zip(self._weights, self.float32, strict=True):
            if master is not weight:
                weight.copy_(master)
