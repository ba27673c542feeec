"""Writes a policy in the published layout: what the original code, and ``hf_reader``, load.

Our model leaves out what a forward pass never uses: the last block and norm of the towers, and SigLIP's pooling. These
come from a source, the published checkpoint that training began with, and so do the other files: configuration, code,
tokenizer, image processor.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vla_rl.core.errors import UserError
from vla_rl.core.files import replacing
from vla_rl.policies.openvla_oft.action_codec import Bounds
from vla_rl.policies.openvla_oft.hf_adapters import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS, film_name
from vla_rl.policies.openvla_oft.hf_files import INDEX, read_headers, weight_files
from vla_rl.policies.openvla_oft.hf_folder import (
    CONFIG,
    HEAD_FILE,
    NOISE_FILE,
    PROPRIO_FILE,
    STATISTICS,
    TOWERS_FILE,
    VALUE_HEAD_FILE,
    PublishedFolder,
)
from vla_rl.policies.openvla_oft.hf_names import (
    FUSED,
    LOG_NOISE,
    VALUE_HEAD,
    canonical,
    counted,
    published_shapes,
    sources,
)
from vla_rl.policies.openvla_oft.hf_statistics import read_bounds
from vla_rl.policies.openvla_oft.hf_variant import config_of
from vla_rl.policies.openvla_oft.hf_weights import WeightReader, to_published
from vla_rl.policies.openvla_oft.regression import OpenVLARegression
from vla_rl.policies.openvla_oft.trunk import OpenVLA

_OWN_FILES = {CONFIG, STATISTICS, INDEX, ADAPTER_CONFIG}  # written anew
_BINARY = {".safetensors", ".bin", ".pt", ".pth"}
_VALUE_NAMES = {"0": "head_l1", "2": "head_l2", "4": "head_l3"}  # RL4VLA's
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def write_published(policy: OpenVLA, source: PublishedFolder, output: Path, unnorm_key: str | None = None) -> None:
    """Write a policy without adapters as a whole checkpoint, with the files and shards of ``source``.

    The value head goes to a file of its own, because OpenVLA's classes have none. ``unnorm_key``: name of the
    statistics; by default that of the source's equal ones. Raises UserError.
    """
    _check_source(policy, source)
    statistics = _statistics(policy, source, unnorm_key)
    trained = dict(to_published(policy.architecture, policy.state_dict()))
    restored = WeightReader(source)

    def tensor(name: str) -> Tensor:
        return trained[name]() if name in trained else restored.weight(name)

    with replacing(output) as partial:
        partial.mkdir()
        _write_weights(source.path, partial, tensor)
        config = config_of(policy.architecture, source)
        for key in ("torch_dtype", "dtype"):
            if key in config:
                config[key] = _DTYPES[policy.dtype]
        _write_json(partial / CONFIG, config)
        for file in source.path.iterdir():
            if file.is_file() and file.suffix not in _BINARY and file.name not in _OWN_FILES:
                shutil.copyfile(file, partial / file.name)
        if source.film_file is not None:
            _write_towers(source, source.film_file, partial, tensor)
        _write_beside(policy, partial, statistics)


def write_adapters(
    policy: OpenVLA,
    adapters: Mapping[str, Tensor],
    alpha: int,
    source: PublishedFolder,
    output: Path,
    unnorm_key: str | None = None,
) -> None:
    """Write adapters (``lora.adapter_state``) as a folder of the library peft, which names ``source`` as their base.

    Query, key and value have adapters of their own here, but are one layer there: its A has the three A one below the
    other, its B has the three B on its diagonal. Raises UserError.
    """
    _check_source(policy, source)
    if source.adapters is not None:
        raise UserError(
            f"{source.path}: the source has adapters itself; write a whole checkpoint (--format openvla-oft)"
        )
    _check_base(policy, source)
    statistics = _statistics(policy, source, unnorm_key)
    matrices, ranks = _join_adapters(policy, adapters)
    rank = min(ranks.values())
    larger = {name: value for name, value in ranks.items() if value != rank}
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "auto_mapping": None,
        "base_model_name_or_path": str(source.path.absolute()),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(ranks),
        "rank_pattern": larger,
        "alpha_pattern": {name: alpha * value // rank for name, value in larger.items()},  # the same quotient
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }
    with replacing(output) as partial:
        partial.mkdir()
        save_file(matrices, partial / ADAPTER_WEIGHTS, {"format": "pt"})
        _write_json(partial / ADAPTER_CONFIG, config)
        _write_beside(policy, partial, statistics)


def _check_source(policy: OpenVLA, source: PublishedFolder) -> None:
    expected = published_shapes(policy.architecture)
    wrong = [
        name for name, shape in expected.items() if name not in source.weights or source.weights[name].shape != shape
    ]
    if wrong:
        raise UserError(
            f"{source.path}: another architecture than the policy's, {', '.join(counted(wrong))} differ; "
            "name the published checkpoint that training began with"
        )


def _check_base(policy: OpenVLA, source: PublishedFolder) -> None:
    """Weights that never have an adapter must be the source's, else the adapters belong to another checkpoint."""
    reader, state = WeightReader(source), policy.state_dict()
    for ours in ("dino.embeddings.cls_token", "language_model.norm.weight"):
        theirs = reader.weight(sources(policy.architecture)[ours].name)
        if not torch.equal(state[ours].cpu(), theirs.to(state[ours].dtype)):
            raise UserError(
                f"{source.path} is not the checkpoint that the adapters were trained on, {ours} differs; name that one "
                "with --source, or write whole weights with --format openvla-oft"
            )


def _write_weights(source: Path, output: Path, tensor: Callable[[str], Tensor]) -> None:
    """The source's files, one after the other, with other contents and without a value head."""
    places: dict[str, str] = {}
    size = 0
    for file in weight_files(source):
        names = {key: canonical(key) for key in read_headers(source / file)}
        held = {key: tensor(name).contiguous().cpu() for key, name in names.items() if not name.startswith(VALUE_HEAD)}
        places |= dict.fromkeys(held, file)
        size += sum(content.nbytes for content in held.values())
        save_file(held, output / file, {"format": "pt"})  # transformers reads no file without this entry
    if (source / INDEX).is_file():
        _write_json(output / INDEX, {"metadata": {"total_size": size}, "weight_map": places})


def _write_towers(source: PublishedFolder, file: Path, output: Path, tensor: Callable[[str], Tensor]) -> None:
    """The file of towers with FiLM, with other contents. What its adapters had learned is in the weights: B is 0."""
    held, reader = {}, WeightReader(source)
    for key, stored in read_headers(file).items():
        if ".lora_A." in key:
            held[key] = reader.read(stored)
        elif ".lora_B." in key:
            held[key] = torch.zeros_like(reader.read(stored))
        else:
            held[key] = tensor(film_name(key)).contiguous().cpu()
    save_file(held, output / TOWERS_FILE, {"format": "pt"})


def _write_beside(policy: OpenVLA, output: Path, statistics: Mapping[str, Any]) -> None:
    """Statistics, other heads, projector of proprioception; and one set of permissions for all files."""
    _write_json(output / STATISTICS, statistics)
    head = {_value_name(name): tensor.contiguous() for name, tensor in policy.value_head.state_dict().items()}
    save_file(head, output / VALUE_HEAD_FILE, {"format": "pt"})
    if policy.proprio_projector is not None:
        save_file(policy.proprio_projector.state_dict(), output / PROPRIO_FILE, {"format": "pt"})
    if isinstance(policy, OpenVLARegression):
        weights = policy.action_head.state_dict()
        save_file({LOG_NOISE: weights.pop(LOG_NOISE)}, output / NOISE_FILE, {"format": "pt"})
        published = {f"model.{name}": tensor.contiguous() for name, tensor in weights.items()}
        save_file(published, output / HEAD_FILE, {"format": "pt"})
    for file in output.glob("*.safetensors"):
        shutil.copymode(output / STATISTICS, file)


def _value_name(name: str) -> str:
    layer, dot, kind = name.partition(".")
    return f"{VALUE_HEAD}{_VALUE_NAMES.get(layer, layer)}{dot}{kind}"


def _statistics(policy: OpenVLA, source: PublishedFolder, key: str | None) -> dict[str, Any]:
    """One entry of dataset_statistics.json: the source's, with the policy's percentiles."""
    bounds = (policy.codec.bounds, policy.proprio_bounds)
    if key is None:
        equal = [name for name in source.statistics if _agree(bounds, read_bounds(source.statistics, name))]
        if not equal:
            raise UserError(f"{source.path} has no statistics equal to the policy's; name new ones with --unnorm-key")
        key = equal[0]
    entry = dict(source.statistics.get(key) or {})
    for name, values in zip(("action", "proprio"), bounds, strict=True):
        if values is not None:
            entry[name] = {**(entry.get(name) or {}), **values.to_dict()}
    return {key: entry}


def _agree(ours: tuple[Bounds, Bounds | None], theirs: tuple[Bounds, Bounds | None]) -> bool:
    return ours[0] == theirs[0] and ours[1] in (None, theirs[1])


def _join_adapters(policy: OpenVLA, adapters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Matrices by the names of peft, and ranks by the published names of the layers."""
    known = sources(policy.architecture)
    paths = {name.removesuffix(".lora_A") for name in adapters if name.endswith(".lora_A")}
    if homeless := sorted(path for path in paths if f"{path}.weight" not in known):
        raise UserError(f"the adapter of {homeless[0]} has no place in an adapter folder; write --format openvla-oft")
    layers: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for weight, place in known.items():  # query, key and value in this order
        path = weight.removesuffix(".weight")
        if path in paths:
            pair = adapters[f"{path}.lora_A"], adapters[f"{path}.lora_B"]
            layers.setdefault(place.name.removesuffix(".weight"), []).append(pair)
    matrices, ranks = {}, {}
    for layer, pairs in layers.items():
        a, b = torch.cat([pair[0] for pair in pairs]), torch.block_diag(*(pair[1] for pair in pairs))
        matrices[f"{ADAPTER_PREFIX}{layer}.lora_A.weight"] = a.contiguous()
        matrices[f"{ADAPTER_PREFIX}{layer}.lora_B.weight"] = b.contiguous()
        ranks[layer] = len(a)
        assert len(pairs) in (1, len(FUSED)), layer
    return matrices, ranks


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
