"""A policy checkpoint is a folder:

model.safetensors   weights, with adapters merged into them
architecture.json   format version and Architecture
tokenizer.json      the tokenizer
statistics.json     percentiles of actions and proprioception, as in OpenVLA's dataset_statistics.json
metadata.json       where the weights come from; free-form, for people and reports
adapters.safetensors    of a run with policy.lora: the adapters alone, for ``vla-rl export --format lora``
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vla_rl.policies.base.checkpoint_folder import (
    WEIGHTS,
    CheckpointError,
    Tensors,
    check_shapes,
    checkpoint_file,
    naming,
    read_json,
    undamaged,
    write_checkpoint,
)
from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds
from vla_rl.policies.openvla_oft.architecture import Architecture
from vla_rl.policies.openvla_oft.blank import blank_policy, fill, move_buffers
from vla_rl.policies.openvla_oft.lora import adapter_alpha, adapter_state, merged_state
from vla_rl.policies.openvla_oft.prompt import PromptTokenizer
from vla_rl.policies.openvla_oft.trunk import OpenVLA

FORMAT_VERSION = 1
ARCHITECTURE, STATISTICS, TOKENIZER = "architecture.json", "statistics.json", "tokenizer.json"
METADATA, ADAPTERS = "metadata.json", "adapters.safetensors"
_MAY_LACK = {"value_head.time"}  # older checkpoints do not know the time; then it is 0


def save_policy(policy: OpenVLA, folder: str | Path, metadata: Mapping[str, Any]) -> None:
    """Write a checkpoint; see ``write_checkpoint``, also for what it raises."""
    statistics = {"action": policy.codec.bounds.to_dict()}
    if policy.proprio_bounds is not None:
        statistics["proprio"] = policy.proprio_bounds.to_dict()
    architecture = {"format_version": FORMAT_VERSION, "architecture": policy.architecture.to_dict()}
    files: dict[str, Mapping | str] = {
        ARCHITECTURE: architecture,
        STATISTICS: statistics,
        TOKENIZER: policy.tokenizer.to_json(),
        METADATA: metadata,
    }
    weights = {WEIGHTS: Tensors(merged_state(policy))}
    if policy.adapted:
        weights[ADAPTERS] = Tensors(adapter_state(policy), {"alpha": str(adapter_alpha(policy))})
    write_checkpoint(Path(folder), weights, files)


def load_policy(
    folder: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    variant: Mapping[str, Any] | None = None,
) -> OpenVLA:
    """Load a policy onto a device, tensor by tensor: the host never holds a copy of all weights.

    Args:
        dtype: None for the one that it was saved in.
        device: on "meta" its weights have no values.
        variant: values of ``architecture.VARIANT`` that replace the checkpoint's.

    Call ``set_instructions`` before its first forward pass. Raises CheckpointError, which names files and tensors that
    are missing, unreadable or of another shape.
    """
    folder, device = Path(folder), torch.device(device)
    architecture = _read_architecture(folder).changed(variant or {})
    codec, proprio = _read_statistics(folder)
    tokenizer = _read_tokenizer(folder, architecture)
    weights = checkpoint_file(folder, WEIGHTS)
    with naming(folder):
        policy = blank_policy(architecture, codec, tokenizer, proprio)
    check_shapes(weights, policy.state_dict(), optional=_MAY_LACK, fits=ARCHITECTURE)
    if device.type == "meta":
        return policy if dtype is None else policy.to(dtype)
    with undamaged(weights), safe_open(weights, framework="pt", device=str(device)) as file:
        there = set(file.keys())

        def read(name: str, weight: torch.Tensor) -> torch.Tensor:
            tensor = file.get_tensor(name) if name in there else torch.zeros(weight.shape, device=device)
            return tensor if dtype is None else tensor.to(dtype)

        fill(policy, read)
    move_buffers(policy, device)
    return policy


def load_adapters(folder: str | Path) -> tuple[dict[str, torch.Tensor], int]:
    """The adapters of ``lora.adapter_state`` and their alpha. Raises CheckpointError if the checkpoint has none."""
    path = Path(folder) / ADAPTERS
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: all weights were trained, or an older version saved the checkpoint")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, int(file.metadata()["alpha"])  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged or truncated ({error}): copy the checkpoint again") from error


def load_metadata(folder: str | Path) -> dict[str, Any]:
    """The ``metadata`` given to ``save_policy``. Raises CheckpointError."""
    return read_json(Path(folder), METADATA)


def _read_architecture(folder: Path) -> Architecture:
    content = read_json(folder, ARCHITECTURE)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder / ARCHITECTURE}: format_version={version!r}, this program reads {FORMAT_VERSION}: "
            "use the program version that wrote it, or save the checkpoint again"
        )
    with naming(folder / ARCHITECTURE):
        return Architecture.from_dict(content.get("architecture"))


def _read_statistics(folder: Path) -> tuple[ActionCodec, Bounds | None]:
    content = read_json(folder, STATISTICS)
    with naming(folder / STATISTICS):
        proprio = Bounds.from_dict(content["proprio"]) if "proprio" in content else None
        return ActionCodec(Bounds.from_dict(content.get("action"))), proprio


def _read_tokenizer(folder: Path, architecture: Architecture) -> PromptTokenizer:
    path = checkpoint_file(folder, TOKENIZER)
    with naming(path):
        return PromptTokenizer.from_json(path.read_text(encoding="utf-8"), architecture)
