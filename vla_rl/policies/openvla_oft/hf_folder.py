"""Finds and checks the files of an OpenVLA checkpoint in the layout in which it is published; does not load torch.

config.json                   sizes, data set statistics (norm_stats)
dataset_statistics.json       of a fine-tune; replaces norm_stats
tokenizer.json
modeling_prismatic.py         its text tells OpenVLA-OFT from OpenVLA (hf_variant)
model.safetensors             or several files and model.safetensors.index.json
value_head.safetensors        written by ``vla-rl export``; RL4VLA and RLinf keep a value head among the weights
training_state.pt             of RL4VLA, next to adapters: the value head
proprio_projector--STEP_checkpoint.pt     of OpenVLA-OFT; this and the next two also converted to safetensors
action_head--STEP_checkpoint.pt           the same; L1 regression
vision_backbone--STEP_checkpoint.pt       the same; towers that the prompt modulates (FiLM), with low-rank adapters
action_noise.safetensors      written by ``vla-rl export``: what an L1 head lacks to be a distribution

A folder with adapter_config.json and adapter_model.safetensors or .bin (library peft) has adapters for the checkpoint
that ``base_model_name_or_path`` names. OpenVLA-OFT saves them in ``lora_adapter``, and one folder above it statistics
and heads: either of the two folders names the checkpoint. No code of a checkpoint is run (see ``pickled``).
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
    Adapters,
    check_plain,
    read_towers,
    sort_adapters,
)
from vla_rl.policies.openvla_oft.hf_files import (
    Stored,
    find_parts,
    read_headers,
    read_json,
    read_part,
    read_weights,
)
from vla_rl.policies.openvla_oft.hf_names import VALUE_HEAD, canonical, is_ignored

CONFIG, STATISTICS, TOKENIZER = "config.json", "dataset_statistics.json", "tokenizer.json"
CODE = "modeling_prismatic.py"
VALUE_HEAD_FILE, TRAINING_STATE = "value_head.safetensors", "training_state.pt"
PROPRIO_FILE, HEAD_FILE = "proprio_projector.safetensors", "action_head.safetensors"
TOWERS_FILE, NOISE_FILE = "vision_backbone.safetensors", "action_noise.safetensors"
_OFT_ADAPTERS = "lora_adapter"  # the folder in which OpenVLA-OFT saves them
_MODEL_TYPE, _CLASS = "openvla", "OpenVLAForActionPrediction"
_DOWNLOADED = ["*.json", "*.safetensors", "tokenizer.model", "*.py", "*_checkpoint.pt", "*_model.bin", TRAINING_STATE]


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
    adapter_folder: Path | None = None  # of the library peft; None: ``adapters`` are those of ``film_file``
    parallel: bool = False  # whether it is OpenVLA-OFT's by its layout, whatever code lies with the weights


def is_published(checkpoint: str | Path) -> bool:
    """Whether this names a checkpoint in the published layout: a folder, or an id on the model hub."""
    path = Path(checkpoint).expanduser()
    if not path.is_dir():
        return is_hub_id(checkpoint)
    return _places(path)[0] is not None or _is_openvla(json_or_empty(path / CONFIG)) or any(path.glob("action_head--*"))


def has_adapters(checkpoint: str | Path) -> bool:
    """Whether the folder has unmerged adapters of the library peft, of which ``open_published`` reads the base."""
    return _places(Path(checkpoint).expanduser())[0] is not None


def head_of(checkpoint: str | Path) -> HeadName:
    """What predicts the actions of a checkpoint in either layout, by its files.

    One that cannot be read, or that is on the hub only, counts as having tokens: opening it says what is wrong.
    """
    path = Path(checkpoint).expanduser()
    folder, above = _places(path)
    about, adapters = json_or_empty(path / "architecture.json"), json_or_empty((folder or path) / ADAPTER_CONFIG)
    if "architecture" in about:
        found: object = about["architecture"]
        return "l1" if isinstance(found, dict) and found.get("head") == "l1" else "tokens"
    if any(above.glob("action_head*")):
        return "l1"
    named = adapters.get("base_model_name_or_path")
    base = _base_folder(folder or path, named) if isinstance(named, str) and named else path
    return "tokens" if has_adapters(base) or base == path else head_of(base)


def open_published(checkpoint: str | Path) -> PublishedFolder:
    """Find all files of a checkpoint and read the headers of its weights.

    Raises UserError, which names the file that is missing, damaged or of a kind that is not read.
    """
    path = _resolve(checkpoint)
    adapters, above = _places(path)
    if adapters is not None:
        return _open_adapters(adapters, above)
    parts = find_parts(path)
    if parts and not (path / CONFIG).is_file():
        raise UserError(
            f"{path}: parts of a checkpoint ({', '.join(sorted(parts))}) without its weights; copy {CONFIG} and "
            f"model*.safetensors of the merged model there, or {_OFT_ADAPTERS} with its {ADAPTER_CONFIG}"
        )
    config = read_json(path / CONFIG)
    if not _is_openvla(config):
        raise UserError(
            f"{path / CONFIG}: model_type={config.get('model_type')!r}, expected {_MODEL_TYPE!r}: "
            "another model; name the folder of an OpenVLA checkpoint"
        )
    named = {canonical(name): stored for name, stored in read_weights(path).items() if not is_ignored(name)}
    weights = {name: stored for name, stored in named.items() if not name.startswith(VALUE_HEAD)}
    inside = {name: stored for name, stored in named.items() if name not in weights}
    film_file, towers, film_adapters = read_towers(parts)
    return PublishedFolder(
        path,
        config,
        _read_statistics(path, config),
        weights | towers,
        inside | _read_value_head(path),
        read_part(parts, "proprio_projector"),
        _read_action_head(path, parts),
        film_adapters,
        film_file,
    )


def _places(path: Path) -> tuple[Path | None, Path]:
    """The folder of unmerged adapters, if they make the checkpoint, and that of its statistics and heads."""
    if (path / ADAPTER_CONFIG).is_file():
        above = path.absolute().parent
        of_oft = path.absolute().name == _OFT_ADAPTERS or any(above.glob("*--*_checkpoint.*"))
        return path, above if of_oft and not (path / STATISTICS).is_file() else path
    if (path / _OFT_ADAPTERS / ADAPTER_CONFIG).is_file() and not any(path.glob("model*.safetensors*")):
        return path / _OFT_ADAPTERS, path
    return None, path


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


def _open_adapters(path: Path, above: Path) -> PublishedFolder:
    """``above``: where statistics and heads are."""
    config = read_json(path / ADAPTER_CONFIG)
    if above != path and not (above / STATISTICS).is_file():
        raise UserError(
            f"{path}: OpenVLA-OFT saves the statistics and heads of these adapters in the folder above, but "
            f"{above / STATISTICS} is missing; copy the whole checkpoint, not {_OFT_ADAPTERS} alone"
        )
    check_plain(config, path / ADAPTER_CONFIG)
    base = config.get("base_model_name_or_path")
    if not base:
        raise UserError(
            f"{path / ADAPTER_CONFIG}: base_model_name_or_path={base!r}; set it to the folder of the checkpoint that "
            "the adapters were trained on"
        )
    base = _base_folder(path, base)
    if has_adapters(base):
        raise UserError(f"{path / ADAPTER_CONFIG}: {base} has adapters itself; merge those first (vla-rl export)")
    try:
        folder = open_published(base)
    except UserError as error:
        raise UserError(f"{path / ADAPTER_CONFIG}, base_model_name_or_path: {error}") from error
    if folder.adapters is not None:
        raise UserError(
            f"{path / ADAPTER_CONFIG}: {base} has adapters in its vision backbone; merge those first (vla-rl export)"
        )
    matrices, value_head, embeddings = sort_adapters(path)
    parts = find_parts(above)
    film_file, towers, film_adapters = read_towers(parts)
    return PublishedFolder(
        folder.path,
        folder.config,
        read_json(above / STATISTICS) if (above / STATISTICS).is_file() else folder.statistics,
        folder.weights | embeddings | towers,
        folder.value_head | value_head | _read_value_head(above),
        read_part(parts, "proprio_projector") or folder.proprio,
        _read_action_head(above, parts) or folder.action_head,
        Adapters(config, matrices | (film_adapters.matrices if film_adapters else {})),
        film_file or folder.film_file,
        path,
        above != path,
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
    """By our names. RL4VLA's training_state.pt has it as vh, next to the states of optimizers."""
    if (file := path / VALUE_HEAD_FILE).is_file():
        return {canonical(key): stored for key, stored in read_headers(file).items()}
    stored = read_headers(path / TRAINING_STATE) if (path / TRAINING_STATE).is_file() else {}
    return {canonical(f"{VALUE_HEAD}{key[3:]}"): tensor for key, tensor in stored.items() if key.startswith("vh.")}


def _read_action_head(path: Path, parts: dict[str, Path]) -> dict[str, Stored]:
    head = {key.removeprefix("model."): stored for key, stored in read_part(parts, "action_head").items()}
    if any(key.startswith("noise_predictor.") for key in head):
        raise UserError(f"{path}: action_head is one for diffusion; supported: tokens and L1 regression")
    noise = path / NOISE_FILE
    return head | (read_headers(noise) if head and noise.is_file() else {})
