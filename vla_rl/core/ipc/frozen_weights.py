"""Frozen weights that a learner and its inference servers hold only once: the learner shares them, servers attach.

On a GPU the weights stay in the learner's memory (CUDA IPC); on CPU cores they move to shared memory. Only weights that
never change are shared: trained weights are synced by version (``weights``), because an inference batch must not see
them change. An attached policy keeps nothing alive: it must end, or stop acting, before the learner ends.
"""

import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor, nn


def share_frozen_weights(policy: nn.Module) -> bytes:
    """A message with which one other process on this device, or on this machine's cores, can attach."""
    # by name, which any process can open; the default passes file descriptors to child processes only
    torch.multiprocessing.set_sharing_strategy("file_system")
    return bytes(ForkingPickler.dumps({name: p.detach() for name, p in _frozen(policy).items()}))


def attach_frozen_weights(policy: nn.Module, message: bytes) -> None:
    """Replace the frozen weights of ``policy`` by shared ones and free its own, if it has any.

    Trained weights that are meta tensors become zeros on the same device, for a weight sync to fill. Raises ValueError
    if the weights differ.
    """
    shared: dict[str, Tensor] = pickle.loads(message)
    own = _frozen(policy)
    wrong = [name for name in own.keys() | shared.keys() if _form(own.get(name)) != _form(shared.get(name))]
    if wrong:
        raise ValueError(f"{len(wrong)} frozen weights differ from the shared ones, such as {min(wrong)}")
    device = next(iter(shared.values())).device
    for name, parameter in list(policy.named_parameters()):
        if name in shared:
            _replace(policy, name, nn.Parameter(shared[name], requires_grad=False))
        elif parameter.is_meta:
            _replace(policy, name, nn.Parameter(torch.zeros_like(parameter, device=device)))


def _replace(policy: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    setattr(policy.get_submodule(path), last, parameter)


def _frozen(policy: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in policy.named_parameters() if not p.requires_grad}


def _form(tensor: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)
