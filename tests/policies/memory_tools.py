"""Bytes that a policy really holds, counted by autograd's own hooks and by watching storages live and die."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers.initialization import no_init_weights

from tests.policies.policy_helpers import CODEC, INSTRUCTIONS, PROPRIO, rate
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.openvla_oft.architecture import Architecture
from vla_rl.policies.openvla_oft.config import LoraConfig
from vla_rl.policies.openvla_oft.lora import add_adapters
from vla_rl.policies.openvla_oft.model import OpenVLAOFT
from vla_rl.policies.openvla_oft.prompt import PromptTokenizer, build_tiny_tokenizer


def shapes_only(architecture: Architecture, lora: LoraConfig | None, dtype: torch.dtype) -> OpenVLAOFT:
    """A policy of meta tensors: shapes without memory."""
    tokenizer = PromptTokenizer(build_tiny_tokenizer(INSTRUCTIONS, architecture.text_vocab_size), architecture)
    with torch.device("meta"):
        with no_init_weights():
            policy = OpenVLAOFT(architecture, CODEC, tokenizer, PROPRIO if architecture.proprio_dim else None)
        if lora is not None:
            add_adapters(policy, lora, 0)
    return policy.to(dtype)


def on_fake_cpu(policy: OpenVLAOFT) -> OpenVLAOFT:
    """Within FakeTensorMode: its tensors seem to be on the CPU, which chooses the fused attention; meta does not."""
    for module in policy.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                fake = torch.empty(weight.shape, dtype=weight.dtype)
                module._parameters[name] = nn.Parameter(fake, requires_grad=weight.requires_grad)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    policy.set_instructions(INSTRUCTIONS)
    return policy


def loss_of(policy: OpenVLAOFT, rows: int) -> Tensor:
    """A loss of everything that algorithms use of the outputs, for blank observations."""
    arch = policy.architecture
    images = torch.zeros(rows, arch.views, arch.image_size, arch.image_size, 3, dtype=torch.uint8)
    task, elapsed = torch.zeros(rows, dtype=torch.long), torch.zeros(rows)
    output = rate(policy, PolicyInput(images, torch.zeros(rows, arch.proprio_dim), task, elapsed))
    return output.logprobs.sum() + output.entropy.sum() + output.values.sum()


def saved_bytes_each(policy: OpenVLAOFT) -> float:
    """Bytes that autograd saves for each further observation."""
    return (_saved_bytes(policy, 6) - _saved_bytes(policy, 2)) / 4


def peak_bytes_each(policy: OpenVLAOFT, *, backward: bool) -> float:
    """Bytes at the peak of a forward (and backward) pass for each further observation; with few, others have it."""
    return (_peak_bytes(policy, 64, backward) - _peak_bytes(policy, 32, backward)) / 32


def _saved_bytes(policy: OpenVLAOFT, rows: int) -> int:
    own = {weight.untyped_storage()._cdata for weight in policy.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in own:
            saved[storage] = tensor  # which keeps it alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(policy, rows)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _peak_bytes(policy: OpenVLAOFT, rows: int, backward: bool) -> int:
    for weight in policy.parameters():
        weight.grad = torch.empty_like(weight) if backward and weight.requires_grad else None
    with LiveBytes() as live, torch.set_grad_enabled(backward):
        loss = loss_of(policy, rows)
        if backward:
            loss.backward()
    return live.peaks["cpu"]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators make, as long as they live, by kind of device."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, Any] = {}
        self._now: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._live:
                self._made(storage, tensor.device.type)
        return result

    def _made(self, storage: torch.UntypedStorage, device: str) -> None:
        key, nbytes = storage._cdata, storage.nbytes()

        def gone(_: object) -> None:
            del self._live[key]
            self._now[device] -= nbytes

        self._live[key] = weakref.ref(storage, gone)
        self._now[device] += nbytes
        self.peaks[device] = max(self.peaks[device], self._now[device])
