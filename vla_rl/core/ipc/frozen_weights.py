"""Frozen weights that a learner and its inference servers hold only once: the learner shares them, servers attach.

On a GPU the weights stay in the learner's memory (CUDA IPC); on CPU cores they move to a file in shared memory, which
goes with the run's folder. Only weights that never change are shared: trained weights are synced by version
(``weights``), because an inference batch must not see them change. An attached policy keeps nothing alive: it must end,
or stop acting, before the learner ends.
"""

import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
from torch import Tensor, nn

from vla_rl.core.ipc.shared_memory import SharedArrays

_ALIGNMENT = 64  # bytes
_Layout = dict[str, tuple[torch.dtype, torch.Size, int]]  # dtype, shape and first byte of each tensor in a file


def share_frozen_weights(policy: nn.Module, path: Path | None = None) -> bytes:
    """A message with which one other process on this device, or on this machine's cores, can attach.

    ``path``: the file in shared memory; needed for weights on the host, which move there at the first call.
    """
    frozen = _frozen(policy)
    if all(p.is_cuda for p in frozen.values()):
        return bytes(ForkingPickler.dumps({name: p.detach() for name, p in frozen.items()}))
    if path is None:
        raise ValueError("frozen weights on the host need a file to be shared in")
    layout, nbytes = _layout(frozen)
    if not path.exists():
        file = SharedArrays.create(path, {"weights": ((nbytes,), "|u1")})
        for name, view in _views(file, layout).items():
            frozen[name].data = view.copy_(frozen[name].detach())
    return pickle.dumps((path, layout))


def attach_frozen_weights(policy: nn.Module, message: bytes) -> None:
    """Replace the frozen weights of ``policy`` by shared ones and free its own, if it has any.

    Trained weights that are meta tensors become zeros on the same device, for a weight sync to fill. Raises ValueError
    if the weights differ.
    """
    content = pickle.loads(message)  # of another process of this run
    shared: dict[str, Tensor] = content if isinstance(content, dict) else _attach(*content)
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


def _layout(tensors: dict[str, nn.Parameter]) -> tuple[_Layout, int]:
    """Where each tensor is in a file, and the size of that."""
    layout: _Layout = {}
    offset = 0
    for name, tensor in tensors.items():
        layout[name] = (tensor.dtype, tensor.shape, offset)
        offset += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    return layout, offset


def _attach(path: Path, layout: _Layout) -> dict[str, Tensor]:
    return _views(SharedArrays.attach(path), layout)


def _views(file: SharedArrays, layout: _Layout) -> dict[str, Tensor]:
    memory = torch.from_numpy(file["weights"])
    return {
        name: memory[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for name, (dtype, shape, offset) in layout.items()
    }


def _replace(policy: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    setattr(policy.get_submodule(path), last, parameter)


def _frozen(policy: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in policy.named_parameters() if not p.requires_grad}


def _form(tensor: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)
