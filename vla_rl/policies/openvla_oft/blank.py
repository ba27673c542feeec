"""A policy whose weights have shapes but no memory, and ways to give it some, straight on a device and in a dtype.

A 7B policy is 30 GB in float32: it must not be built on the host, in every process, before it goes to its device.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds
from vla_rl.policies.openvla_oft.architecture import Architecture
from vla_rl.policies.openvla_oft.kinds import policy_class
from vla_rl.policies.openvla_oft.prompt import PromptTokenizer
from vla_rl.policies.openvla_oft.trunk import OpenVLA

_VALUE_STD = 0.01  # of the value head's last layer, so that values start near 0


def blank_policy(
    architecture: Architecture, codec: ActionCodec, tokenizer: PromptTokenizer, proprio: Bounds | None
) -> OpenVLA:
    """All weights are meta tensors; buffers, which no checkpoint holds, have their values. Raises ValueError."""
    with no_init_weights(), _weights_on_meta():
        return policy_class(architecture)(architecture, codec, tokenizer, proprio)


@torch.no_grad()
def fill(policy: nn.Module, value: Callable[[str, Tensor], Tensor]) -> None:
    """Replace every meta weight by ``value(name, weight)``, of the same shape."""
    for path, module in policy.named_modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None and weight.is_meta:
                full = f"{path}.{name}" if path else name
                module._parameters[name] = nn.Parameter(value(full, weight), requires_grad=weight.requires_grad)


def move_buffers(policy: nn.Module, device: torch.device) -> None:
    """After ``fill``, which leaves them where they are."""
    for module in policy.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def draw_weights(policy: OpenVLA, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Give all meta weights random values on the device; each weight has a generator of its own, by seed and name.

    Numbers differ between kinds of devices. Norms and scales are 1, biases 0, the language model has the spread of its
    architecture, other matrices 1 / sqrt(inputs).
    """

    def drawn(name: str, weight: Tensor) -> Tensor:
        tensor = torch.empty(weight.shape, dtype=dtype, device=device)
        if weight.ndim == 1:
            return tensor.fill_(float(("norm" in name and not name.endswith("bias")) or "scale" in name))
        std = weight[0].numel() ** -0.5
        if name.startswith(("language_model.", "lm_head.")):
            std = policy.architecture.llm.initializer_range
        elif name.startswith("value_head.") and len(weight) == 1:
            std = _VALUE_STD
        number = zlib.crc32(f"{seed} {name}".encode())  # 32 bits: generators on the CPU ignore others
        generator = torch.Generator(device).manual_seed(number)
        return tensor.normal_(std=std, generator=generator)

    fill(policy, drawn)
    move_buffers(policy, device)


@contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Within the block, modules keep only the shapes of new parameters; one at a time has memory."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
