"""Reads and writes π0 in the layout in which lerobot saves and publishes it. Importing this file does not load torch.

config.json                 cameras, lengths, normalization
model.safetensors           weights by openpi's names, embeddings as those of the tied last layer
policy_preprocessor.json    names the file with mean and deviation of the data set
tokenizer.json              PaliGemma's, to be put there: lerobot takes it from the hub
value_head.safetensors      written by ``vla-rl export``

Verified against lerobot's own network, processors and files: tests/policies/pi0/test_published.py.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from vla_rl.core.actions import ActionSpace, assumed
from vla_rl.core.cameras import wrist_last
from vla_rl.core.errors import UserError
from vla_rl.core.files import replacing
from vla_rl.policies.base.checkpoint_folder import (
    WEIGHTS,
    CheckpointError,
    check_names,
    checkpoint_file,
    naming,
    read_json,
    undamaged,
)
from vla_rl.policies.base.steering import steered_files
from vla_rl.policies.pi0.input_format import InputFormat
from vla_rl.policies.pi0.statistics import Statistics

if TYPE_CHECKING:
    from torch import Tensor

    from vla_rl.policies.pi0.model import Pi0

CONFIG, PREPROCESSOR, TOKENIZER = "config.json", "policy_preprocessor.json", "tokenizer.json"
VALUE_HEAD = "value_head.safetensors"
_STATE, _ACTION = "observation.state", "action"
_VISION_HEADS, _KEY_VALUE_HEADS = 16, 1  # of every π0 that was published; shapes do not tell them
_GEMMA, _EXPERT = "paligemma_with_expert.paligemma.model.", "paligemma_with_expert.gemma_expert.model."
_EMBEDDING, _TIED = f"{_GEMMA}language_model.embed_tokens.weight", "paligemma_with_expert.paligemma.lm_head.weight"
_UNUSED = "paligemma_with_expert.gemma_expert.lm_head.weight"
_PLACES = {
    "model.model.vlm.": _GEMMA,
    "model.model.dit.": _EXPERT,
    "model.embed_action_time.": "",
    "model.action_out_proj.": "action_out_proj.",
}  # our names, theirs


@dataclass(frozen=True, slots=True)
class Published:
    """A folder's description."""

    settings: dict[str, Any]  # arguments of the library's ``PI0Config``
    views: int
    state_dim: int  # numbers of proprioception that it reads; 0: none
    input_format: InputFormat


def is_published(folder: str | Path) -> bool:
    """Whether this is a folder that describes a π0 as lerobot does."""
    try:
        return read_json(Path(folder), CONFIG).get("type") == "pi0"
    except CheckpointError:
        return False


def open_published(folder: Path) -> Published:
    """Raises CheckpointError, which names what is missing or not supported."""
    config = read_json(folder, CONFIG)
    with naming(folder / CONFIG):
        _check_supported(config)
        features = config["input_features"]
        cameras = [n for n, f in features.items() if f["type"] == "VISUAL" and "empty_camera" not in n]
        if cameras != wrist_last(cameras):
            raise ValueError(f"its cameras are {', '.join(cameras)}: here, the wrist's comes after the scene's")
        state_dim = features[_STATE]["shape"][0] if _STATE in features else 0
        settings = {
            "chunk_size": config["chunk_size"],
            "max_state_dim": config["max_state_dim"],
            "max_action_dim": config["max_action_dim"],
            "min_period": config["min_period"],
            "max_period": config["max_period"],
        }
        input_format = InputFormat("line", config["tokenizer_max_length"], antialias=False)
    checkpoint_file(folder, PREPROCESSOR)
    if not (folder / TOKENIZER).is_file():
        raise CheckpointError(
            f"{folder / TOKENIZER} is missing: copy tokenizer.json of google/paligemma-3b-pt-224 into the folder"
        )
    shapes = {name: tuple(shape) for name, (_, shape) in _stored(folder).items()}
    with naming(folder / WEIGHTS):
        settings |= _model_parts(shapes)
    return Published(settings, len(cameras), state_dim, input_format)


def read_statistics(folder: Path, space: ActionSpace | None = None) -> tuple[Statistics, Statistics | None]:
    """Of actions, as the environment has them, and of proprioception. Raises CheckpointError.

    ``space``: the environment's; None: ``assumed`` by the number of dimensions.
    """
    steps = read_json(folder, PREPROCESSOR)
    with naming(folder / PREPROCESSOR):
        (step,) = [s for s in steps["steps"] if s.get("registry_name") == "normalizer_processor"]
        path = checkpoint_file(folder, step["state_file"])
    with undamaged(path), safe_open(path, framework="np") as file:
        found = {key: file.get_tensor(key).astype(float) for key in file.keys()}  # noqa: SIM118
    with naming(path):
        eps = float(step["config"].get("eps", 1e-8))
        mean, std = found[f"{_ACTION}.mean"], found[f"{_ACTION}.std"] + eps
        scale, shift = (space or assumed(len(mean))).affine()
        mean, std = mean * scale + shift, std * scale
        proprio = None
        if f"{_STATE}.mean" in found:
            proprio = Statistics(tuple(found[f"{_STATE}.mean"]), tuple(found[f"{_STATE}.std"] + eps))
    return Statistics(tuple(mean), tuple(std)), proprio


def read_weights(folder: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """float32 weights of the network by our names; ``expected`` has those that the network needs.

    Raises CheckpointError, which lists what is missing, unknown or of another shape.
    """
    stored = _stored(folder)
    wanted = {ours: theirs for ours in expected if (theirs := _their_name(ours)) is not None}
    shapes = {theirs: tuple(expected[ours].shape) for ours, theirs in wanted.items()}
    check_names(folder / WEIGHTS, shapes, {name: shape for name, (_, shape) in stored.items()}, fits=CONFIG)
    path = folder / WEIGHTS
    with undamaged(path), safe_open(path, framework="pt") as file:
        found = {ours: file.get_tensor(stored[theirs][0]).float() for ours, theirs in wanted.items()}
    heads = folder / VALUE_HEAD
    if heads.is_file():
        with undamaged(heads), safe_open(heads, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys() if name in expected}  # noqa: SIM118
    return found


def write_published(policy: Pi0, source: Path, output: Path, space: ActionSpace | None = None) -> None:
    """Write what lerobot reads: the files of ``source``, a published folder, with the policy's weights.

    Weights keep the source's names and dtypes. The value head goes to ``value_head.safetensors``, which only this
    project reads. Raises CheckpointError if the source is of another size, UserError if its statistics are others.
    """
    from safetensors.torch import save_file

    found = read_statistics(source, space)
    if found != (policy.action_statistics, policy.proprio_statistics):
        raise UserError(
            f"{source}: actions or proprioception are normalized by other statistics than the policy's; name the "
            "folder that training began with: --source FOLDER"
        )
    ours = policy.state_dict()
    stored = _stored(source)
    names = {theirs: name for name in ours if (theirs := _their_name(name)) is not None}
    shapes = {theirs: tuple(ours[name].shape) for theirs, name in names.items()}
    check_names(source / WEIGHTS, shapes, {name: shape for name, (_, shape) in stored.items()}, fits=CONFIG)
    weights: dict[str, Tensor] = {}
    with undamaged(source / WEIGHTS), safe_open(source / WEIGHTS, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            kept, theirs = file.get_tensor(key), _canonical(key)
            weights[key] = ours[names[theirs]].to("cpu", kept.dtype, copy=True) if theirs in names else kept
    heads = {name: w.cpu() for name, w in ours.items() if _their_name(name) is None}
    own = steered_files(VALUE_HEAD, heads)
    with replacing(output) as unfinished:
        shutil.copytree(source, unfinished, ignore=shutil.ignore_patterns(WEIGHTS, VALUE_HEAD, ".*"))
        save_file(weights, unfinished / WEIGHTS, {"format": "pt"})
        for name, content in own.items():
            save_file(dict(content.tensors), unfinished / name)
        for name in (WEIGHTS, *own):  # safetensors: readable by the owner only
            shutil.copymode(unfinished / CONFIG, unfinished / name)


def _check_supported(config: Mapping[str, Any]) -> None:
    modes = {name: config["normalization_mapping"].get(name) for name in ("STATE", "ACTION")}
    if set(modes.values()) != {"MEAN_STD"}:
        raise ValueError(f"normalization_mapping is {modes}: only MEAN_STD is read")
    if config.get("use_relative_actions"):
        raise ValueError("use_relative_actions=true: actions relative to the state are not read")
    if config.get("use_peft"):
        raise ValueError("use_peft=true: merge the adapters with lerobot first")
    if config.get("n_obs_steps", 1) != 1:
        raise ValueError(f"n_obs_steps={config['n_obs_steps']}: one observation at a time is read here")


def _stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Key in the file and shape of each tensor, by openpi's name."""
    path, found = checkpoint_file(folder, WEIGHTS), {}
    with undamaged(path), safe_open(path, framework="np") as file:
        for key in file.keys():  # noqa: SIM118
            found[_canonical(key)] = (key, tuple(file.get_slice(key).get_shape()))
    found.pop(_UNUSED, None)
    return found


def _canonical(key: str) -> str:
    """openpi's name of a tensor in the file; of the tied last layer, that of the embedding."""
    name = key.removeprefix("model.").replace(".vision_tower.vision_model.", ".vision_tower.")
    return _EMBEDDING if name == _TIED else name


def _their_name(ours: str) -> str | None:
    """openpi's name of a tensor of the network; None for the heads that it does not have."""
    place = next((place for place in _PLACES if ours.startswith(place)), None)
    return None if place is None else _PLACES[place] + ours.removeprefix(place)


def _model_parts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Sizes of the parts, which openpi's code has by the names of variants. Raises KeyError, ValueError."""
    tower, language = f"{_GEMMA}vision_tower.", f"{_GEMMA}language_model."
    words, width = shapes[_EMBEDDING]
    vision, _, patch, _ = shapes[f"{tower}embeddings.patch_embedding.weight"]
    patches = shapes[f"{tower}embeddings.position_embedding.weight"][0]
    vision_config = {
        "model_type": "siglip_vision_model",
        "hidden_size": vision,
        "intermediate_size": shapes[f"{tower}encoder.layers.0.mlp.fc1.weight"][0],
        "num_hidden_layers": _count(shapes, f"{tower}encoder.layers."),
        "num_attention_heads": _VISION_HEADS,
        "image_size": math.isqrt(patches) * patch,
        "patch_size": patch,
        "vision_use_head": False,
    }
    text = _gemma(shapes, language) | {"vocab_size": words}
    vlm: dict[str, Any] = {"model_type": "paligemma", "vision_config": vision_config, "text_config": text}
    vlm |= {"projection_dim": width, "image_token_id": words}  # it has no row: images take its place
    return {"vlm_config": vlm, "dit_config": _gemma(shapes, _EXPERT)}


def _gemma(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> dict[str, Any]:
    attention = f"{prefix}layers.0.self_attn."
    rows, width = shapes[f"{attention}q_proj.weight"]
    head_dim = shapes[f"{attention}k_proj.weight"][0] // _KEY_VALUE_HEADS
    return {
        "model_type": "gemma",
        "hidden_size": width,
        "intermediate_size": shapes[f"{prefix}layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": _count(shapes, f"{prefix}layers."),
        "num_attention_heads": rows // head_dim,
        "num_key_value_heads": _KEY_VALUE_HEADS,
        "head_dim": head_dim,
    }


def _count(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> int:
    """Layers, whose names have their number after the prefix."""
    numbers = {match[1] for name in shapes if (match := re.match(re.escape(prefix) + r"(\d+)\.", name))}
    return len(numbers)
