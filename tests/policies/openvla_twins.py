"""Twins of the published checkpoints: their key names, files and config, with small widths and random weights.

Each function writes a folder and returns it. ``LAYOUTS`` has them by name, for scripts/make_openvla_twin.py, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.policies.openvla_reference import OFT_CODE, OPENVLA_CODE, STATISTICS, L1Head, twin, write_folder

WIDTH = 64  # of the twins' language model
PROPRIO = 8
ACTIONS = {"action": STATISTICS["action"]}
FINE_TUNE = {"libero_spatial_no_noops": STATISTICS}
# RL4VLA's, and those of OpenVLA's "all-linear"
LORA_LAYERS = ["proj", "qkv", "fc1", "fc2", "q", "kv", "fc3", "q_proj", "k_proj", "v_proj", "o_proj"]
LORA_LAYERS += ["gate_proj", "up_proj", "down_proj", "lm_head"]


def openvla(folder: Path, seed: int = 0) -> Path:
    """openvla/openvla-7b: several files and their index; the statistics of several data sets in config.json."""
    norm_stats = {"bridge_orig": ACTIONS, "libero_spatial": ACTIONS}
    return write_folder(folder, twin(seed), shards=3, norm_stats=norm_stats, code=OPENVLA_CODE)


def openvla_oft(folder: Path, seed: int = 0) -> Path:
    """A fine-tune of moojink/openvla-oft with discrete tokens and proprioception, whose projector was converted."""
    write_folder(folder, twin(seed), statistics=FINE_TUNE, code=OFT_CODE)
    save_file(proprio_projector(seed), folder / "proprio_projector--150000_checkpoint.safetensors")
    return folder


def openvla_oft_l1(folder: Path, seed: int = 0) -> Path:
    """moojink's own fine-tunes on LIBERO: L1 regression, two images, proprioception; both parts were converted."""
    openvla_oft(folder, seed)
    head = {f"module.{name}": tensor for name, tensor in l1_head(seed).state_dict().items()}
    save_file(head, folder / "action_head--150000_checkpoint.safetensors")
    return folder


def openvla_oft_film(folder: Path, seed: int = 0) -> Path:
    """moojink's fine-tunes for real robots: the prompt modulates the towers, which are saved apart, converted.

    Their adapters are not merged there, and the towers among the other weights are older ones.
    """
    openvla_oft_l1(folder, seed)
    save_file(film_towers(seed), folder / "vision_backbone--150000_checkpoint.safetensors")
    return folder


def simplevla_rl(folder: Path, seed: int = 0) -> Path:
    """SimpleVLA-RL's: one image, no proprioception."""
    return write_folder(folder, twin(seed), shards=2, statistics=FINE_TUNE, code=OFT_CODE)


def rl4vla(folder: Path, seed: int = 0) -> Path:
    """gen-robot's merged models: OpenVLA's decoding, and a value head among the weights."""
    config = {"architectures": ["OpenVLAForActionPredictionWithValueHead"]}
    head = value_head(("head_l1", "head_l2", "head_l3"), seed=seed)
    norm_stats = {"bridge_orig": ACTIONS}
    return write_folder(
        folder, twin(seed), shards=3, norm_stats=norm_stats, extra=head, code=OPENVLA_CODE, config=config
    )


def rl4vla_lora(folder: Path, seed: int = 0) -> Path:
    """A run of RL4VLA: adapters of the library peft on an OpenVLA, which lies in the folder ``base``."""
    adapters(folder, openvla(folder / "base", seed), seed, base_name="base")
    return folder


def rlinf(folder: Path, seed: int = 0) -> Path:
    """RLinf's OpenVLA-OFT: their class and keys in config.json, a value head, no ``</s>``, no code of the model."""
    config = {
        "architectures": ["OpenVLAOFTForRLActionPrediction"],
        "model_type": "openvla_oft",
        "action_dim": 7,
        "num_action_chunks": 2,
        "add_value_head": True,
        "value_type": "chunk_level",
    }
    head = value_head(("mlp.0", "mlp.2", "mlp.4"), seed=seed)
    return write_folder(folder, twin(seed), shards=2, statistics=FINE_TUNE, extra=head, code=None, config=config)


def openvla_oft_unmerged(folder: Path, seed: int = 0) -> Path:
    """What OpenVLA-OFT's training saves of a step: adapters in a folder below, all else by ``torch.save``.

    Their base, an OpenVLA, lies in the folder ``base``.
    """
    adapters(folder / "lora_adapter", openvla(folder / "base", seed), seed, base_name="../base")
    (folder / "dataset_statistics.json").write_text(json.dumps(FINE_TUNE))
    torch.save(proprio_projector(seed), folder / "proprio_projector--150000_checkpoint.pt")
    head = {f"module.{name}": tensor for name, tensor in l1_head(seed).state_dict().items()}
    torch.save(head, folder / "action_head--150000_checkpoint.pt")
    return folder


LAYOUTS: dict[str, Callable[[Path, int], Path]] = {
    "openvla": openvla,
    "openvla-oft": openvla_oft,
    "openvla-oft-l1": openvla_oft_l1,
    "openvla-oft-film": openvla_oft_film,
    "openvla-oft-unmerged": openvla_oft_unmerged,
    "simplevla-rl": simplevla_rl,
    "rl4vla": rl4vla,
    "rl4vla-lora": rl4vla_lora,
    "rlinf": rlinf,
}


def value_head(names: tuple[str, str, str], outputs: int = 1, seed: int = 5) -> dict[str, Tensor]:
    """Three layers by those names; the last has no bias."""
    shapes = {f"{names[0]}.weight": (24, WIDTH), f"{names[0]}.bias": (24,), f"{names[1]}.weight": (12, 24)}
    shapes |= {f"{names[1]}.bias": (12,), f"{names[2]}.weight": (outputs, 12)}
    return {f"value_head.{name}": tensor for name, tensor in _random(shapes, seed).items()}


def film_towers(seed: int = 0, rank: int = 20) -> dict[str, Tensor]:
    """The names of OpenVLA-OFT's wrapped backbone, with the adapters of the library peft in all linear layers."""
    backbone = twin(seed + 1, film=True).vision_backbone
    wrapped: dict[str, Tensor] = {}
    for name, tensor in backbone.state_dict().items():
        layer, _, kind = name.rpartition(".")
        key = re.sub(r"(\.blocks\.\d+)\.(?!scale|shift)", r"\1.block.", f"vision_backbone.{layer}")
        adapted = layer.rpartition(".")[2] in LORA_LAYERS
        wrapped[f"{key}.base_layer.{kind}" if adapted else f"{key}.{kind}"] = tensor
        if adapted and kind == "weight":
            shapes = {"A": (rank, *tensor.shape[1:]), "B": (len(tensor), rank, *[1] * (tensor.ndim - 2))}
            for matrix, random in _random(shapes, seed).items():
                wrapped[f"{key}.lora_{matrix}.default.weight"] = 0.05 * random
    return wrapped


def l1_head(seed: int = 4) -> L1Head:
    torch.manual_seed(seed)
    head = L1Head(WIDTH, 7)
    for name, parameter in head.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.15)
    return head


def proprio_projector(seed: int = 3) -> dict[str, Tensor]:
    """With the prefix of a distributed run."""
    shapes = {"fc1.weight": (WIDTH, PROPRIO), "fc1.bias": (WIDTH,), "fc2.weight": (WIDTH, WIDTH), "fc2.bias": (WIDTH,)}
    return {f"module.{name}": tensor for name, tensor in _random(shapes, seed).items()}


def adapters(
    folder: Path, base: Path, seed: int = 0, base_name: str | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Write adapters of peft for RL4VLA's layers of ``twin(seed)``, which ``base`` has; returns the merged weights."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=2, target_modules=LORA_LAYERS, init_lora_weights="gaussian")
    model: Any = peft.get_peft_model(twin(seed).to(dtype), config)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    model.peft_config["default"].base_model_name_or_path = base_name or str(base)
    model.save_pretrained(str(folder))
    merged: dict[str, Tensor] = model.merge_and_unload().state_dict()
    return merged


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
