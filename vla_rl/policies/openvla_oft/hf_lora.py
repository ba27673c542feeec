"""Adapters of a published folder with which ``policy.lora`` goes on, unmerged; loads torch only to fill them in.

A fused layer, such as ``attn.qkv``, is three layers here, which begin with the same A, and a third of B each.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vla_rl.core.errors import UserError
from vla_rl.policies.openvla_oft.config import LORA_PARTS, LoraConfig
from vla_rl.policies.openvla_oft.hf_adapters import Adapters, scaling
from vla_rl.policies.openvla_oft.hf_files import Stored
from vla_rl.policies.openvla_oft.hf_folder import PublishedFolder
from vla_rl.policies.openvla_oft.hf_names import FUSED, Source, counted, sources

if TYPE_CHECKING:
    from torch import Tensor

    from vla_rl.policies.openvla_oft.architecture import Architecture
    from vla_rl.policies.openvla_oft.trunk import OpenVLA

logger = logging.getLogger(__name__)
Trained = dict[str, tuple[Source, tuple[Stored, Stored]]]  # by our weight: where it comes from, A and B of that


def divide(folder: PublishedFolder, architecture: Architecture) -> tuple[PublishedFolder, Trained]:
    """The folder with the adapters that are merged at loading, and those that are trained.

    Merged are those of layers that get none here: the convolution of patches, and layers that no forward pass uses.
    """
    if folder.adapter_folder is None or folder.adapters is None:
        return folder, {}
    matrices = {name: pair for name, pair in folder.adapters.matrices.items() if len(pair[0].shape) == 2}
    ours = sources(architecture).items()
    trained = {weight: (source, matrices[source.name]) for weight, source in ours if source.name in matrices}
    names = {source.name for source, _ in trained.values()}
    merged = {name: pair for name, pair in folder.adapters.matrices.items() if name not in names}
    return replace(folder, adapters=Adapters(folder.adapters.config, merged)), trained


def contradictions(folder: PublishedFolder, architecture: Architecture, lora: LoraConfig) -> list[str]:
    """What ``policy.lora`` says otherwise than the adapters of ``folder`` that would be trained."""
    found: dict[str, set[Any]] = {"rank": set(), "alpha": set(), "targets": set()}
    config, trained = (folder.adapters.config if folder.adapters else {}), divide(folder, architecture)[1]
    least = min((a.shape[0] for _, (a, _) in trained.values()), default=0)
    for ours, (source, (a, _)) in trained.items():
        rank, scale = a.shape[0], scaling(config, source.name, a.shape[0])
        rank = least if source.pick in FUSED and rank == len(FUSED) * least else rank  # see ``_part``
        found["rank"].add(rank)
        found["alpha"].add(round(scale * rank, 6))
        found["targets"] |= {target for target, parts in LORA_PARTS.items() if ours.partition(".")[0] in parts}
    wanted = {"rank": {lora.rank}, "alpha": {lora.alpha}, "targets": set(lora.targets)}
    return [
        f"its adapters need policy.lora.{key}={sorted(values) if len(values) > 1 else values.pop()} (or merge them by "
        "vla-rl export)"
        for key, values in found.items()
        if trained and values != wanted[key]
    ]


def fill_adapters(policy: OpenVLA, folder: PublishedFolder) -> None:
    """Give the adapters of ``policy`` the values of those in ``folder``, so that it acts as if they were merged.

    Layers that have none in the folder keep theirs, which begin as nothing. Raises UserError.
    """
    import torch

    from vla_rl.policies.openvla_oft.hf_weights import WeightReader

    reader, trained = WeightReader(folder), divide(folder, policy.architecture)[1]
    with torch.no_grad():
        for ours, (source, pair) in trained.items():
            layer = policy.adapted[ours.removesuffix(".weight")]
            into_a, into_b = (matrices["default"].weight for matrices in (layer.lora_A, layer.lora_B))
            a, b = _part(source, reader.read(pair[0]), reader.read(pair[1]), len(into_a))
            into_a.copy_(a)
            into_b.copy_(b)
    policy.goes_on = bool(trained)
    if trained and (new := sorted({f"{path}.weight" for path in policy.adapted} - trained.keys())):
        text = "%s: %d layers of policy.lora.targets have no adapter there, and get a new one: %s"
        logger.warning(text, folder.adapter_folder, len(new), ", ".join(counted(new)))


def _part(source: Source, a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank] of our part of a layer."""
    if source.pick not in FUSED:
        return a, b
    number, parts = source.pick.value, len(FUSED)
    rows = b.chunk(parts)[number]
    if len(a) == rank:
        return a, rows
    columns = rows.chunk(parts, dim=1)  # written by ``vla-rl export``: B is diagonal
    if any(columns[other].any() for other in range(parts) if other != number):
        text = "query, key and value of one adapter cannot be taken apart; merge it by vla-rl export"
        raise UserError(f"{source.name}: rank {len(a)}, and policy.lora.rank={rank}: {text}")
    return a.chunk(parts)[number], columns[number]
