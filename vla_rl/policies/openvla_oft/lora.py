"""LoRA (arXiv:2106.09685): low-rank adapters in a policy whose own weights are frozen, by the library peft.

    x ─┬─► W, frozen ─────────────────────┬─► y
       └─► A [rank, in] ─► B [out, rank] ─┘     times alpha / rank; B starts at 0

Only A, B and the value head require gradients. Optimizer, weight sync and a learner's state on disk hold only them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.policies.openvla_oft.config import LORA_PARTS, LoraConfig
from vla_rl.policies.openvla_oft.model import ActionHead
from vla_rl.policies.openvla_oft.trunk import OpenVLA

_ADAPTER = "default"  # peft's name for the first of possibly several


def add_adapters(policy: OpenVLA, config: LoraConfig, seed: int) -> None:
    """Freeze ``policy`` except its ``whole_parts``, and add an adapter to every linear layer of ``config.targets``.

    The outputs do not change: B is 0. A is normal with a standard deviation of 1 / rank, drawn by ``seed``, as in
    OpenVLA-OFT and RL4VLA. There is no dropout: it would make log-probabilities of sampling and training differ.
    """
    import peft

    parts = {part for target in config.targets for part in LORA_PARTS[target]}
    paths = [
        path for path, layer in policy.named_modules() if isinstance(layer, nn.Linear) and path.split(".")[0] in parts
    ]
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=paths, init_lora_weights="gaussian"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, policy, _ADAPTER)
    policy.adapted = {path: policy.get_submodule(path) for path in paths}
    for part in policy.whole_parts:
        part.requires_grad_(True)
    if "lm_head" in policy.adapted:
        _restrict_to_action_ids(policy, config.rank)


@torch.no_grad()
def merged_state(policy: OpenVLA) -> dict[str, Tensor]:
    """State dict of a policy without adapters that acts as ``policy`` does. Does not change ``policy``.

    Merged weights are on the host, since a device may have no room for a second model; the others are the policy's own.
    They are W + B A alpha / rank in the dtype of W; bfloat16 rounds away what is small in comparison with W.
    """
    state = policy.state_dict()
    for path, layer in policy.adapted.items():
        for name in layer.state_dict(prefix=f"{path}."):
            del state[name]
        base = layer.get_base_layer().state_dict(prefix=f"{path}.")
        base[f"{path}.weight"] = _merged(layer, base[f"{path}.weight"]).cpu()
        state.update(base)
    return state


class MergedAdapters:
    """Adapters added into the weights that they adapt, in a policy that only acts; call it after each change of them.

        x ─► W + B A alpha / rank ─► y

    The original weights move to the host, from where every call takes them: subtracting the last adapters would leave
    rounding errors behind.
    """

    def __init__(self, adapted: Mapping[str, Any]) -> None:
        """``adapted``: ``OpenVLA.adapted``."""
        self._layers = tuple(adapted.values())
        self._originals: list[Tensor] = []

    @torch.no_grad()
    def __call__(self) -> None:
        if not self._originals:
            self._originals = [_on_host(layer.get_base_layer().weight) for layer in self._layers]
            for layer in self._layers:
                layer.merged_adapters.append(_ADAPTER)  # peft then computes the layer itself and no adapter
        for layer, original in zip(self._layers, self._originals, strict=True):
            weight = layer.get_base_layer().weight
            weight.copy_(_merged(layer, original.to(weight.device, non_blocking=True)))


def adapter_state(policy: OpenVLA) -> dict[str, Tensor]:
    """The adapters alone: A [rank, in] and B [out, rank] as PATH.lora_A and PATH.lora_B, for each adapted layer."""
    return {
        f"{path}.lora_{matrix}": getattr(layer, f"lora_{matrix}")[_ADAPTER].weight.detach()
        for path, layer in policy.adapted.items()
        for matrix in "AB"
    }


def adapter_alpha(policy: OpenVLA) -> int:
    """The same for all layers; their outputs are scaled by alpha / rank."""
    (alpha,) = {layer.lora_alpha[_ADAPTER] for layer in policy.adapted.values()}
    return alpha


def _merged(layer: Any, weight: Tensor) -> Tensor:
    """W + B A alpha / rank, in the dtype of W; computed in float32."""
    a, b = (matrices[_ADAPTER].weight.float() for matrices in (layer.lora_A, layer.lora_B))
    return (weight.float() + b @ a * layer.scaling[_ADAPTER]).to(weight.dtype)


def _on_host(weight: Tensor) -> Tensor:
    """A copy in main memory; page-locked if the weight is on a GPU, which then reads it at full speed."""
    return torch.empty_like(weight, device="cpu", pin_memory=weight.is_cuda).copy_(weight)


def _restrict_to_action_ids(policy: OpenVLA, rank: int) -> None:
    """Compute the adapter of ``lm_head`` for the action ids only, as ``ActionHead`` does; other rows of B stay 0."""
    layers = policy.adapted["lm_head"].lora_B
    rows = ActionHead(policy.architecture, rank).to(layers[_ADAPTER].weight)
    nn.init.zeros_(rows.weight)
    layers[_ADAPTER] = rows
