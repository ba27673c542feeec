"""What a critic's networks give for a rating: the number itself, or a distribution over bins whose mean it is."""

import torch
from torch import Tensor, nn

from algos.td_losses import bin_targets, hl_gauss_loss, td_loss

_LEAST = 1e-4  # of a bin's probability, at the start


class Scalar(nn.Module):
    """One output, trained by squared errors."""

    outputs = 1

    def first(self) -> Tensor:
        """[outputs], of which the rating is 0."""
        return torch.zeros(1)

    def value(self, found: Tensor) -> Tensor:
        """[N, members, outputs] -> [N, members]."""
        return found.squeeze(2)

    def loss(self, found: Tensor, aim: Tensor) -> Tensor:
        """Towards ``aim`` [N]; ``found`` as for ``value``."""
        return td_loss(self.value(found), aim)


class Bins(nn.Module):
    """HL-Gauss (arXiv:2403.03950): logits of bins, trained by cross-entropy. As ``Scalar``."""

    edges: Tensor

    def __init__(self, low: float, high: float, bins: int) -> None:
        """``bins`` of equal width between ``low`` and ``high``, where all ratings lie."""
        super().__init__()
        self.outputs = bins
        self.register_buffer("edges", torch.linspace(low, high, bins + 1))

    def first(self) -> Tensor:
        return bin_targets(torch.zeros(1), self.edges)[0].clamp(min=_LEAST).log()

    def value(self, found: Tensor) -> Tensor:
        return found.softmax(dim=2) @ (0.5 * (self.edges[1:] + self.edges[:-1]))

    def loss(self, found: Tensor, aim: Tensor) -> Tensor:
        return hl_gauss_loss(found, aim, self.edges)


Readout = Scalar | Bins
