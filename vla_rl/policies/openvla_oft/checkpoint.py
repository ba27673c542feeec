"""A policy checkpoint is a folder:

model.safetensors   weights, with adapters merged into them
architecture.json   format version and Architecture
tokenizer.json      the tokenizer
statistics.json     percentiles of actions and proprioception, as in OpenVLA's dataset_statistics.json
metadata.json       where the weights come from; free-form, for people and reports
adapters.safetensors    of a run with policy.lora: the adapters apart, for ``vla-rl export --format lora``
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vla_rl.core.errors import UserError
from vla_rl.core.files import replacing
from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds
from vla_rl.policies.openvla_oft.architecture import Architecture
from vla_rl.policies.openvla_oft.blank import blank_policy, fill, move_buffers
from vla_rl.policies.openvla_oft.lora import adapter_alpha, adapter_state, merged_state
from vla_rl.policies.openvla_oft.model import OpenVLAOFT
from vla_rl.policies.openvla_oft.prompt import PromptTokenizer

FORMAT_VERSION = 1
WEIGHTS, ARCHITECTURE, TOKENIZER = "model.safetensors", "architecture.json", "tokenizer.json"
STATISTICS, METADATA, ADAPTERS = "statistics.json", "metadata.json", "adapters.safetensors"
_NAMED_IN_ERRORS = 5
_MAY_LACK = {"value_head.time"}  # older checkpoints do not know the time; then it is 0


class CheckpointError(UserError):
    """A folder is not a usable checkpoint. The message names the file, what is wrong with it and the remedy."""


def save_policy(policy: OpenVLAOFT, folder: str | Path, metadata: Mapping[str, Any]) -> None:
    """Write a checkpoint. A reader sees the previous folder or the complete new one, never a partial one.

    Raises CheckpointError if ``metadata`` is not JSON-serializable, OSError if the disk fails.
    """
    folder = Path(folder)
    statistics = {"action": policy.codec.bounds.to_dict()}
    if policy.proprio_bounds is not None:
        statistics["proprio"] = policy.proprio_bounds.to_dict()
    architecture = {"format_version": FORMAT_VERSION, "architecture": policy.architecture.to_dict()}
    try:
        texts = {
            ARCHITECTURE: json.dumps(architecture, indent=2),
            STATISTICS: json.dumps(statistics, indent=2),
            METADATA: json.dumps(dict(metadata), indent=2),
            TOKENIZER: policy.tokenizer.to_json(),
        }
    except TypeError as error:
        raise CheckpointError(f"metadata of {folder} cannot be written as JSON: {error}") from error
    with replacing(folder) as partial:
        partial.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in merged_state(policy).items()}, partial / WEIGHTS)
        if policy.adapted:
            save_file(adapter_state(policy), partial / ADAPTERS, {"alpha": str(adapter_alpha(policy))})
        for name, text in texts.items():
            (partial / name).write_text(text + "\n", encoding="utf-8")
        for file in partial.glob("*.safetensors"):
            shutil.copymode(partial / METADATA, file)  # safetensors makes it readable by the owner only


def load_policy(folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> OpenVLAOFT:
    """Load a policy onto a device, tensor by tensor: the host never holds a copy of all weights.

    ``dtype``: None for the one that it was saved in. On the device "meta" its weights have no values. Call
    ``set_instructions`` before its first forward pass. Raises CheckpointError, which names files and tensors that are
    missing, unreadable or of another shape.
    """
    folder, device = Path(folder), torch.device(device)
    architecture = _read_architecture(folder)
    codec, proprio = _read_statistics(folder)
    tokenizer = _read_tokenizer(folder, architecture)
    weights = _file(folder, WEIGHTS)
    try:
        with _named(folder):
            policy = blank_policy(architecture, codec, tokenizer, proprio)
        _check_shapes(weights, policy)
        if device.type == "meta":
            return policy if dtype is None else policy.to(dtype)
        with safe_open(weights, framework="pt", device=str(device)) as file:
            there = set(file.keys())

            def read(name: str, weight: torch.Tensor) -> torch.Tensor:
                tensor = file.get_tensor(name) if name in there else torch.zeros(weight.shape, device=device)
                return tensor if dtype is None else tensor.to(dtype)

            fill(policy, read)
    except SafetensorError as error:
        raise CheckpointError(f"{weights} is damaged or truncated ({error}): copy the checkpoint again") from error
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
    return _read_json(Path(folder), METADATA)


def _file(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint folder {folder} does not exist: check the path")
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: {folder} is not a complete checkpoint")
    return path


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = _file(folder, name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): copy the checkpoint again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a mapping, found {type(content).__name__}")
    return content


def _read_architecture(folder: Path) -> Architecture:
    content = _read_json(folder, ARCHITECTURE)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder / ARCHITECTURE}: format_version={version!r}, this program reads {FORMAT_VERSION}: "
            "use the program version that wrote it, or save the checkpoint again"
        )
    with _named(folder / ARCHITECTURE):
        return Architecture.from_dict(content.get("architecture"))


def _read_statistics(folder: Path) -> tuple[ActionCodec, Bounds | None]:
    content = _read_json(folder, STATISTICS)
    with _named(folder / STATISTICS):
        proprio = Bounds.from_dict(content["proprio"]) if "proprio" in content else None
        return ActionCodec(Bounds.from_dict(content.get("action"))), proprio


def _read_tokenizer(folder: Path, architecture: Architecture) -> PromptTokenizer:
    path = _file(folder, TOKENIZER)
    with _named(path):
        return PromptTokenizer.from_json(path.read_text(encoding="utf-8"), architecture)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn a ValueError of the block into a CheckpointError that names ``path``."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _check_shapes(weights: Path, policy: OpenVLAOFT) -> None:
    with safe_open(weights, framework="pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    expected = {name: tuple(tensor.shape) for name, tensor in policy.state_dict().items()}
    problems = [f"{name} is missing" for name in expected if name not in found and name not in _MAY_LACK]
    problems += [f"{name} is unknown" for name in found if name not in expected]
    problems += [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        rest = len(problems) - _NAMED_IN_ERRORS
        listed = "; ".join(problems[:_NAMED_IN_ERRORS]) + (f"; and {rest} more" if rest > 0 else "")
        raise CheckpointError(f"{weights} does not fit its {ARCHITECTURE}: {listed}")
