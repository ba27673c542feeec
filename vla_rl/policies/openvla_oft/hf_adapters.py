"""Low-rank adapters in the files of a checkpoint; does not load torch.

The library peft writes them to a folder of their own. OpenVLA-OFT with FiLM has them in the file of its towers.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.core.errors import UserError
from vla_rl.policies.openvla_oft.hf_files import Stored, read_headers, read_part
from vla_rl.policies.openvla_oft.hf_names import EMBEDDING, LM_HEAD, VALUE_HEAD, canonical

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_PREFIX = "base_model.model."
_PLAIN_LORA = {"peft_type": "LORA", "use_dora": False, "bias": "none", "lora_bias": False, "fan_in_fan_out": False}
_MATRIX = re.compile(r"(?P<layer>.+)\.lora_(?P<matrix>[AB])(\.default)?\.weight")
_SAVED_WHOLE = re.compile(r"\.modules_to_save(\.default)?(?=\.)")
_WRAPPED = re.compile(r"(\.blocks\.\d+)\.block(?=\.)")
_MOST_ALPHA = 16  # OpenVLA-OFT trains with alpha = min(rank, 16)
Pairs = dict[str, tuple[Stored, Stored]]  # A [rank, in, ...] and B [out, rank, ...] by the name of their weight


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank adapters by the name of the weight that they change."""

    config: Mapping[str, Any]
    matrices: Pairs


def check_plain(config: Mapping[str, Any], path: Path) -> None:
    """Raises UserError for adapters of other kinds; ``path``: of the file that holds ``config``."""
    for key, supported in _PLAIN_LORA.items():
        if config.get(key) not in (None, supported):
            raise UserError(
                f"{path}: {key}={config[key]!r}, supported: {supported!r}; merge the adapters with "
                "the library that made them, and name the merged checkpoint"
            )


def scaling(config: Mapping[str, Any], name: str, rank: int) -> float:
    """By which the library peft multiplies B A of the layer with this weight."""
    layer = name.removesuffix(".weight")
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", layer):
            alpha = value
            break
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def sort_adapters(path: Path) -> tuple[Pairs, dict[str, Stored], dict[str, Stored]]:
    """Matrices by the name of their weight, value head, and the embeddings that peft saves whole with its adapters."""
    file = next((path / name for name in (ADAPTER_WEIGHTS, "adapter_model.bin") if (path / name).is_file()), None)
    if file is None:
        raise UserError(f"{path / ADAPTER_WEIGHTS} is missing; copy the adapters again")
    stored = read_headers(file).items()
    matrices, whole = _split(
        file, {film_name(_SAVED_WHOLE.sub("", k.removeprefix(ADAPTER_PREFIX))): t for k, t in stored}
    )
    value_head = {name: tensor for name, tensor in whole.items() if name.startswith(VALUE_HEAD)}
    embeddings = {name: whole[name] for name in (EMBEDDING, LM_HEAD) if name in whole}
    if unknown := sorted(whole.keys() - value_head.keys() - embeddings.keys()):
        raise UserError(
            f"{file}: {len(unknown)} tensors are not low-rank matrices, such as {whole[unknown[0]].key}; merge the "
            "adapters with the library that made them, and name the merged checkpoint"
        )
    return matrices, value_head, embeddings


def read_towers(parts: dict[str, Path]) -> tuple[Path | None, dict[str, Stored], Adapters | None]:
    """The towers of an OpenVLA-OFT with FiLM, whose file replaces those among the weights: the file, weights, adapters.

    Its blocks are wrapped, and its adapters are not merged. ``parts``: of ``find_parts``. Raises UserError.
    """
    file, stored = parts.get("vision_backbone"), read_part(parts, "vision_backbone")
    if file is None:
        return None, {}, None
    matrices, weights = _split(file, {film_name(key): tensor for key, tensor in stored.items()})
    rank = max((a.shape[0] for a, _ in matrices.values()), default=0)
    return file, weights, Adapters({"lora_alpha": min(rank, _MOST_ALPHA)}, matrices) if matrices else None


def _split(file: Path, named: Mapping[str, Stored]) -> tuple[Pairs, dict[str, Stored]]:
    """Low-rank matrices by the name of their weight, and all other tensors."""
    found: dict[str, dict[str, Stored]] = {}
    others = dict(named)
    for name in named:
        if match := _MATRIX.fullmatch(name):
            found.setdefault(f"{match['layer']}.weight", {})[match["matrix"]] = others.pop(name)
    if broken := [name for name, pair in found.items() if pair.keys() != {"A", "B"}]:
        raise UserError(f"{file}: an adapter of {broken[0]} has one of its two matrices; copy the checkpoint again")
    return {name: (pair["A"], pair["B"]) for name, pair in found.items()}, others


def film_name(key: str) -> str:
    """The name in openvla-7b of a tensor of the towers' own file."""
    name = _WRAPPED.sub(r"\1", key.removeprefix("module.")).replace(".base_layer.", ".")
    return canonical(name)
