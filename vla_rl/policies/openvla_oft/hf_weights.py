"""Reads the tensors of a published checkpoint, merges adapters into them, and converts them to ours and back.

A low-rank adapter of a fused layer, such as ``attn.qkv``, is merged before the layer is split: query, key and value
share its A, and each has a third of the rows of its B.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from vla_rl.policies.openvla_oft.architecture import Architecture
from vla_rl.policies.openvla_oft.hf_adapters import scaling
from vla_rl.policies.openvla_oft.hf_files import PICKLED, Stored
from vla_rl.policies.openvla_oft.hf_folder import PublishedFolder
from vla_rl.policies.openvla_oft.hf_names import FUSED, Pick, sources
from vla_rl.policies.openvla_oft.pickled import read_pickled

_CLASS, _POSITIONS = "dino.embeddings.cls_token", "dino.embeddings.position_embeddings"


class WeightReader:
    """Reads single tensors; each file is opened once."""

    def __init__(
        self, folder: PublishedFolder, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        """``dtype``: of ``weight``; None for that in which each is stored."""
        self._folder, self._device, self._dtype = folder, str(device), dtype
        self._files: dict[Path, Any] = {}

    def weight(self, name: str) -> Tensor:
        """A weight by its published name, with the adapter merged into it in float32 if it has one."""
        tensor = self.read(self._folder.weights[name])
        dtype = self._dtype or tensor.dtype
        adapters = self._folder.adapters
        if adapters is None or name not in adapters.matrices:
            return tensor.to(dtype)
        a, b = (self.read(stored).float() for stored in adapters.matrices[name])
        delta = (b.flatten(1) @ a.flatten(1)).view(tensor.shape) * scaling(adapters.config, name, a.shape[0])
        return (tensor.float() + delta).to(dtype)

    def read(self, stored: Stored) -> Tensor:
        if (opened := self._files.get(stored.file)) is None:
            pickled = stored.file.suffix in PICKLED
            opened = read_pickled(stored.file) if pickled else safe_open(stored.file, "pt", device=self._device)
            self._files[stored.file] = opened
        if isinstance(opened, dict):
            return opened[stored.key].contiguous().to(self._device, copy=True)
        return opened.get_tensor(stored.key)


def to_ours(arch: Architecture, weight: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Our weights from published ones, without value head and proprioception. Each is read once."""
    state = {}
    for name, targets in _by_source(arch).items():
        tensor = weight(name)
        for ours, pick in targets.items():
            state[ours] = _take(tensor, pick)
    return state


def to_published(arch: Architecture, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The published weights that have a counterpart in ``state``; each is made when it is called for.

    DINOv2's class token has no position there: what training gave it is added to the token, which is the same.
    """
    positions = state[_POSITIONS]
    state = {**state, _CLASS: state[_CLASS] + positions[:, :1]}
    for name, targets in _by_source(arch).items():
        yield name, partial(_put, [state[ours] for ours in targets], next(iter(targets.values())))


def _by_source(arch: Architecture) -> dict[str, dict[str, Pick]]:
    """By published name: our names in the order of their parts."""
    grouped: dict[str, dict[str, Pick]] = defaultdict(dict)
    for ours, source in sources(arch).items():
        grouped[source.name][ours] = source.pick
    return grouped


def _take(tensor: Tensor, pick: Pick) -> Tensor:
    if pick in FUSED:
        return tensor.chunk(3)[pick.value].clone()
    if pick is Pick.POSITIONS:
        return tensor[0].clone()
    if pick is Pick.POSITIONS_AFTER_CLASS:
        return torch.cat([torch.zeros_like(tensor[:, :1]), tensor], dim=1)
    return tensor


def _put(parts: list[Tensor], pick: Pick) -> Tensor:
    """The inverse of ``_take``; ``pick`` is that of the first part."""
    if pick in FUSED:
        return torch.cat(parts)
    (tensor,) = parts
    if pick is Pick.POSITIONS:
        return tensor.unsqueeze(0)
    return tensor[:, 1:] if pick is Pick.POSITIONS_AFTER_CLASS else tensor
