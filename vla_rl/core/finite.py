"""Numbers that are not finite: found before they spread."""

from collections.abc import Iterable

import torch
from torch import Tensor

from vla_rl.core.errors import UserError


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor holds an infinity or a NaN. One pass over each, without further memory."""
    found = [_largest(tensor) for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    return not found or bool(torch.isfinite(torch.stack([x.float().cpu() for x in found])).all())


def require_finite(tensors: Iterable[Tensor], origin: str) -> None:
    """Raise UserError, which names ``origin``, if a weight is not finite."""
    if not all_finite(tensors):
        raise UserError(
            f"{origin} holds weights that are not finite (NaN or infinity): its training has diverged; choose another "
            "checkpoint, such as an earlier one of the run"
        )


class FiniteWatch:
    """Notes whether gradients were finite, while they are computed.

    A hook on each parameter sees what every backward pass adds to it, on this rank, however gradients are summed,
    sharded and offloaded afterwards.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], device: torch.device) -> None:
        self._largest = torch.zeros((), device=device)
        for parameter in parameters:
            parameter.register_hook(self._note)

    def _note(self, gradient: Tensor) -> None:
        if gradient.numel():
            torch.maximum(self._largest, _largest(gradient).float(), out=self._largest)

    def take(self) -> bool:
        """Whether all gradients since the last call were finite."""
        finite = bool(torch.isfinite(self._largest))
        self._largest.zero_()
        return finite


def _largest(tensor: Tensor) -> Tensor:
    """The largest magnitude; NaN if there is one."""
    return torch.linalg.vector_norm(tensor.detach(), float("inf"))
