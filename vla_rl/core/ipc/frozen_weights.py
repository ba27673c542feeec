"""Frozen weights that a learner and its inference servers hold once: one lends them, the others borrow.

On a GPU they stay where the learner has them (CUDA IPC), on processor cores they move to shared memory. Only what never
changes is lent: weights that train are handed over by version (``weights``), for an inference batch must not see them
change. A borrower keeps nothing alive: it must end before the lender does, or stop acting.
"""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor, nn


def lend(policy: nn.Module) -> bytes:
    """A message by which one other process on this device, or on this machine's cores, maps the frozen weights."""
    # by name, which any process can open; the default hands descriptors on to children only
    torch.multiprocessing.set_sharing_strategy("file_system")
    return bytes(ForkingPickler.dumps({name: p.detach() for name, p in _frozen(policy).items()}))


def borrow(policy: nn.Module, message: bytes) -> None:
    """Let the frozen weights of ``policy`` be the lender's; its own are freed. Raises ValueError where they differ."""
    lent: dict[str, Tensor] = pickle.loads(message)
    own = _frozen(policy)
    wrong = [name for name in own.keys() | lent.keys() if _form(own.get(name)) != _form(lent.get(name))]
    if wrong:
        raise ValueError(f"{len(wrong)} frozen weights are not as the lender's, such as {min(wrong)}")
    for name, parameter in own.items():
        parameter.data = lent[name]


def _frozen(policy: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in policy.named_parameters() if not p.requires_grad}


def _form(tensor: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)
