"""Finds and checks the files of an OpenVLA checkpoint in the layout in which it is published; does not load torch.

config.json                   sizes, data set statistics (norm_stats)
dataset_statistics.json       of a fine-tune; replaces norm_stats
tokenizer.json
modeling_prismatic.py         its text tells OpenVLA-OFT from OpenVLA (hf_variant)
model.safetensors             or several files and model.safetensors.index.json
value_head.safetensors        written by ``vla-rl export``; RL4VLA and RLinf keep a value head among the weights
proprio_projector*.safetensors    of OpenVLA-OFT, converted
action_head*.safetensors      the same; L1 regression
vision_backbone--*.safetensors    the same; towers that the prompt modulates (FiLM), with low-rank adapters
action_noise.safetensors      written by ``vla-rl export``: what an L1 head lacks to be a distribution

A folder with adapter_config.json and adapter_model.safetensors (library peft) has adapters for the checkpoint that
``base_model_name_or_path`` names. Nothing here is ever unpickled, and no code of a checkpoint is run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_rl.core.errors import UserError
from vla_rl.core.files import json_or_empty
from vla_rl.policies.base.hub import is_hub_id
from vla_rl.policies.openvla_oft.architecture import HeadName
from vla_rl.policies.openvla_oft.hf_adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Adapters,
    check_plain,
    read_towers,
    sort_adapters,
)
from vla_rl.policies.openvla_oft.hf_files import CONVERT, Stored, read_headers, read_json, read_part, read_weights
from vla_rl.policies.openvla_oft.hf_names import VALUE_HEAD, canonical, is_ignored

CONFIG, STATISTICS, TOKENIZER = "config.json", "dataset_statistics.json", "tokenizer.json"
CODE = "modeling_prismatic.py"
VALUE_HEAD_FILE = "value_head.safetensors"
PROPRIO_FILE, HEAD_FILE = "proprio_projector.safetensors", "action_head.safetensors"
NOISE_FILE = "action_noise.safetensors"
_MODEL_TYPE, _CLASS = "openvla", "OpenVLAForActionPrediction"
_DOWNLOADED = ["*.json", "*.safetensors", "tokenizer.model", "*.py"]


@dataclass(frozen=True, slots=True)
class PublishedFolder:
    """The files of a checkpoint, by what they hold."""

    path: Path  # of weights, config and tokenizer
    config: Mapping[str, Any]
    statistics: Mapping[str, Any]  # by name of the data set
    weights: dict[str, Stored]  # by the names in openvla-7b
    value_head: dict[str, Stored] = field(default_factory=dict)  # by our names
    proprio: dict[str, Stored] = field(default_factory=dict)  # fc1.weight, ...
    action_head: dict[str, Stored] = field(default_factory=dict)  # layer_norm1.weight, ...; log_noise
    adapters: Adapters | None = None
    film_file: Path | None = None  # the towers' weights, where the prompt modulates them


def is_published(checkpoint: str | Path) -> bool:
    """Whether this names a checkpoint in the published layout: a folder, or an id on the model hub."""
    path = Path(checkpoint).expanduser()
    if not path.is_dir():
        return is_hub_id(checkpoint)
    if (path / ADAPTER_CONFIG).is_file():
        return True
    return _is_openvla(json_or_empty(path / CONFIG))


def head_of(checkpoint: str | Path) -> HeadName:
    """What predicts the actions of a checkpoint in either layout, by its files.

    One that cannot be read, or that is on the hub only, counts as having tokens: opening it says what is wrong.
    """
    path = Path(checkpoint).expanduser()
    about, adapters = (json_or_empty(path / name) for name in ("architecture.json", ADAPTER_CONFIG))
    if "architecture" in about:
        found: object = about["architecture"]
        return "l1" if isinstance(found, dict) and found.get("head") == "l1" else "tokens"
    if any(path.glob("action_head*")):
        return "l1"
    base = adapters.get("base_model_name_or_path")
    return head_of(_base_folder(path, base)) if isinstance(base, str) and base else "tokens"


def open_published(checkpoint: str | Path) -> PublishedFolder:
    """Find all files of a checkpoint and read the headers of its weights.

    Raises UserError, which names the file that is missing, damaged or of a kind that is not read.
    """
    path = _resolve(checkpoint)
    if (path / ADAPTER_CONFIG).is_file():
        return _open_adapters(path)
    config = read_json(path / CONFIG)
    if not _is_openvla(config):
        raise UserError(
            f"{path / CONFIG}: model_type={config.get('model_type')!r}, expected {_MODEL_TYPE!r}: "
            "another model; name the folder of an OpenVLA checkpoint"
        )
    _refuse_other_heads(path)
    named = {canonical(name): stored for name, stored in read_weights(path).items() if not is_ignored(name)}
    weights = {name: stored for name, stored in named.items() if not name.startswith(VALUE_HEAD)}
    inside = {name: stored for name, stored in named.items() if name not in weights}
    value_head = inside | _read_value_head(path)
    film_file, towers, adapters = read_towers(path)
    return PublishedFolder(
        path,
        config,
        _read_statistics(path, config),
        weights | towers,
        value_head,
        read_part(path, "proprio_projector"),
        _read_action_head(path),
        adapters,
        film_file,
    )


def _is_openvla(config: Mapping[str, Any]) -> bool:
    classes = config.get("architectures") or ()
    return config.get("model_type") == _MODEL_TYPE or _CLASS in classes or "vision_backbone_id" in config


def _resolve(checkpoint: str | Path) -> Path:
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        return path
    if not is_hub_id(checkpoint):
        raise UserError(f"checkpoint folder {path} does not exist: check the path")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"{checkpoint} is no folder; to download it, install huggingface_hub, or name a folder"
        ) from None
    try:
        return Path(snapshot_download(str(checkpoint), allow_patterns=_DOWNLOADED))
    except Exception as error:  # the library raises errors of its HTTP client and of several packages
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{checkpoint}: no such folder, and the model hub could not be asked for it ({type(error).__name__}: "
            f"{reason}); download it where there is a network, and name its folder"
        ) from error


def _open_adapters(path: Path) -> PublishedFolder:
    config = read_json(path / ADAPTER_CONFIG)
    check_plain(config, path / ADAPTER_CONFIG)
    base = config.get("base_model_name_or_path")
    if not base:
        raise UserError(
            f"{path / ADAPTER_CONFIG}: base_model_name_or_path={base!r}; set it to the folder of the checkpoint that "
            "the adapters were trained on"
        )
    base = _base_folder(path, base)
    if (base / ADAPTER_CONFIG).is_file():
        raise UserError(f"{path / ADAPTER_CONFIG}: {base} has adapters itself; merge those first (vla-rl export)")
    try:
        folder = open_published(base)
    except UserError as error:
        raise UserError(f"{path / ADAPTER_CONFIG}, base_model_name_or_path: {error}") from error
    if folder.adapters is not None:
        raise UserError(
            f"{path / ADAPTER_CONFIG}: {base} has adapters in its vision backbone; merge those first (vla-rl export)"
        )
    if not (path / ADAPTER_WEIGHTS).is_file():
        pickled = path / "adapter_model.bin"
        raise UserError(
            f"{pickled}: pickled weights are not read, they can run any code; {CONVERT}"
            if pickled.is_file()
            else f"{path / ADAPTER_WEIGHTS} is missing; copy the adapters again"
        )
    matrices, value_head, embeddings = sort_adapters(path / ADAPTER_WEIGHTS)
    statistics = read_json(path / STATISTICS) if (path / STATISTICS).is_file() else folder.statistics
    return PublishedFolder(
        folder.path,
        folder.config,
        statistics,
        folder.weights | embeddings,
        folder.value_head | value_head | _read_value_head(path),
        folder.proprio | read_part(path, "proprio_projector"),
        folder.action_head | _read_action_head(path),
        Adapters(config, matrices),
    )


def _base_folder(path: Path, base: str) -> Path:
    """The folder that adapters in ``path`` name as their base. A relative name may also be relative to ``path``."""
    named = Path(base).expanduser()
    within = path / named
    return within if not named.is_dir() and within.is_dir() else named


def _read_statistics(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    file = path / STATISTICS
    return read_json(file) if file.is_file() else dict(config.get("norm_stats") or {})


def _read_value_head(path: Path) -> dict[str, Stored]:
    file = path / VALUE_HEAD_FILE
    return {canonical(key): stored for key, stored in read_headers(file).items()} if file.is_file() else {}


def _read_action_head(path: Path) -> dict[str, Stored]:
    head = {key.removeprefix("model."): stored for key, stored in read_part(path, "action_head").items()}
    if any(key.startswith("noise_predictor.") for key in head):
        raise UserError(f"{path}: action_head is one for diffusion; supported: tokens and L1 regression")
    noise = path / NOISE_FILE
    return head | (read_headers(noise) if head and noise.is_file() else {})


def _refuse_other_heads(path: Path) -> None:
    """OpenVLA-OFT's diffusion."""
    for file in sorted(path.glob("noisy_action_projector--*")):
        raise UserError(
            f"{file}: the checkpoint has a head for diffusion, which is not implemented; name one with discrete tokens "
            "or with L1 regression"
        )
