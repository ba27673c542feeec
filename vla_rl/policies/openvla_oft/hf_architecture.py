"""From config.json, tokenizer.json and the shapes of the weights to an ``Architecture``; does not load torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_rl.core.errors import UserError
from vla_rl.policies.openvla_oft.action_codec import Bounds
from vla_rl.policies.openvla_oft.architecture import NUM_BINS, Architecture
from vla_rl.policies.openvla_oft.hf_files import Stored
from vla_rl.policies.openvla_oft.hf_folder import TOKENIZER, PublishedFolder
from vla_rl.policies.openvla_oft.hf_names import (
    DINO,
    EMBEDDING,
    LOG_NOISE,
    SIGLIP,
    VALUE_HEAD,
    Shape,
    action_head_shapes,
    counted,
    proprio_shapes,
    published_shapes,
    value_head_shapes,
)
from vla_rl.policies.openvla_oft.hf_statistics import choose_unnorm_key, read_bounds
from vla_rl.policies.openvla_oft.hf_variant import read_variant

# Attention heads are in no file: they follow from the names of the networks in timm. So does the number of blocks, of
# which features skip the last: a file that has lost some would otherwise be taken for a smaller network.
_HEADS = 16
_TIMM_IDS = {"dinosiglip-vit-so-224px": ("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224")}
_BLOCKS_BY_WIDTH = {1024: 24, 1152: 27}
_IMAGE_SIZES = {"dinosiglip-vit-so-224px": 224}
# The published config says only what differs from the defaults of transformers' LlamaConfig, which are these.
_LLAMA_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "initializer_range": 0.02,
    "vocab_size": 32_000,
}
_LLAMA_NAMES = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "initializer_range": "initializer_range",
}
_LLAMA_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_scaling": None}
_SPACE = "\u2581"  # Llama's token for a single space, 29871: it ends every prompt
_VALUE_HIDDEN = (512, 128)  # of RL4VLA and RLinf


def describe_published(
    folder: PublishedFolder,
    *,
    views: int,
    chunk_size: int,
    suite: str = "",
    unnorm_key: str | None = None,
    variant: Mapping[str, Any] | None = None,
) -> tuple[Architecture, Bounds, Bounds | None]:
    """What the files say without their weights: architecture, statistics of actions, and of proprioception if used.

    Raises UserError for all that would keep the checkpoint from loading.
    """
    key = choose_unnorm_key(folder.statistics, unnorm_key, suite)
    actions, proprio = read_bounds(folder.statistics, key)
    run = {"views": views, "chunk_size": chunk_size, "action_dim": actions.dim}
    architecture = read_architecture(folder, **run, variant=read_variant(folder, variant or {}))
    if not architecture.proprio_dim:
        return architecture, actions, None
    if proprio is None or proprio.dim != architecture.proprio_dim:
        raise UserError(
            f"{folder.path}: a proprio_projector of {architecture.proprio_dim} numbers, but the statistics of {key!r} "
            f"have {proprio.dim if proprio else 'none'}; add q01 and q99 of proprio to dataset_statistics.json"
        )
    return architecture, actions, proprio


def read_architecture(
    folder: PublishedFolder, *, views: int, chunk_size: int, action_dim: int, variant: Mapping[str, Any]
) -> Architecture:
    """What the weights were trained as. The files do not say how many views and actions: these follow the run.

    ``variant``: of ``hf_variant.read_variant``.

    Raises UserError for values that this policy does not implement, and for tensors that are missing, unknown or of
    another shape.
    """
    config, shapes = folder.config, _shapes_of(folder.weights)
    where = folder.path / "config.json"
    _check_names_present(folder)
    _check_towers(config, str(where))
    values = {
        "name": "openvla",
        "patch_size": shapes[f"{DINO}patch_embed.proj.weight"][-1],
        "views": views,
        "proprio_dim": folder.proprio["fc1.weight"].shape[1] if "fc1.weight" in folder.proprio else 0,
        "chunk_size": chunk_size,
        "action_dim": action_dim,
        "dino_registers": shapes[f"{DINO}reg_token"][1],
        "projector_hidden": shapes["projector.fc1.weight"][0],
        "head": "l1" if folder.action_head else "tokens",
        "film": folder.film_file is not None,
        "value_hidden": _value_hidden(folder.value_head),
        **variant,
        **_token_ids(folder.path / TOKENIZER),
        **_normalization(folder.path / "preprocessor_config.json"),
    }
    try:
        values |= {
            "image_size": _image_size(config),
            "dino": _tower(shapes, DINO),
            "siglip": _tower(shapes, SIGLIP),
            "llm": _language_model(config),
            "vocab_size": _vocab_size(config),
        }
        architecture = Architecture.from_dict(values)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    _check_shapes(folder, architecture)
    return architecture


def _check_names_present(folder: PublishedFolder) -> None:
    """The tensors that tell the sizes."""
    needed = [f"{prefix}{name}" for prefix in (DINO, SIGLIP) for name in ("patch_embed.proj.weight", "pos_embed")]
    needed += [f"{prefix}blocks.0.mlp.fc1.weight" for prefix in (DINO, SIGLIP)]
    needed += [f"{DINO}reg_token", "projector.fc1.weight", EMBEDDING]
    missing = [name for name in needed if name not in folder.weights]
    if missing:
        raise UserError(f"{folder.path}: not the weights of an OpenVLA model: {', '.join(counted(missing))} missing")


def _check_towers(config: Mapping[str, Any], where: str) -> None:
    backbone = config.get("vision_backbone_id")
    ids: tuple[Any, ...] = tuple(config.get("timm_model_ids") or ()) or _TIMM_IDS.get(str(backbone), ())
    if ids not in _TIMM_IDS.values():
        known = ", ".join(_TIMM_IDS)
        raise UserError(f"{where}: vision_backbone_id={backbone!r}, timm_model_ids={list(ids)}; supported: {known}")
    for key, expected in (("use_fused_vision_backbone", True), ("n_action_bins", NUM_BINS)):
        if config.get(key, expected) != expected:
            raise UserError(f"{where}: {key}={config[key]!r}; supported: {expected!r}")
    if any(config.get("timm_override_act_layers") or ()):
        raise UserError(f"{where}: timm_override_act_layers={config['timm_override_act_layers']}; supported: null")


def _image_size(config: Mapping[str, Any]) -> int:
    sizes = config.get("image_sizes") or [_IMAGE_SIZES[str(config.get("vision_backbone_id"))]] * 2
    if len(set(sizes)) != 1:
        raise ValueError(f"image_sizes={sizes}: both towers must see images of one size")
    return sizes[0]


def _tower(shapes: Mapping[str, Shape], prefix: str) -> dict[str, int]:
    start = f"{prefix}blocks."
    blocks = len({name.removeprefix(start).split(".")[0] for name in shapes if name.startswith(start)})
    hidden, width = shapes[f"{start}0.mlp.fc1.weight"]
    if _BLOCKS_BY_WIDTH.get(width, blocks) != blocks:
        raise ValueError(f"{start}*: {blocks} blocks of width {width}, expected {_BLOCKS_BY_WIDTH[width]}")
    return {"width": width, "layers": blocks, "heads": _HEADS, "intermediate": hidden}


def _language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    text = dict(config.get("text_config") or {})
    text.setdefault("rope_theta", (text.get("rope_parameters") or {}).get("rope_theta", _LLAMA_DEFAULTS["rope_theta"]))
    values = _LLAMA_DEFAULTS | {key: text[key] for key in _LLAMA_DEFAULTS if key in text}
    heads = values["num_attention_heads"]
    fixed = _LLAMA_FIXED | {
        "model_type": "llama",
        "num_key_value_heads": heads,
        "head_dim": values["hidden_size"] // heads,
        "tie_word_embeddings": False,
    }
    for key, supported in fixed.items():
        if text.get(key) not in (None, supported):
            raise ValueError(f"text_config.{key}={text[key]!r}; supported: {supported!r}")
    return {ours: values[theirs] for ours, theirs in _LLAMA_NAMES.items()}


def _vocab_size(config: Mapping[str, Any]) -> int:
    """Without the rows that pad the embedding."""
    rows = (config.get("text_config") or {}).get("vocab_size", _LLAMA_DEFAULTS["vocab_size"])
    padding = config.get("pad_to_multiple_of", 64)
    if padding != 64:
        raise ValueError(f"pad_to_multiple_of={padding}; supported: 64")
    return rows - padding


def _token_ids(path: Path) -> dict[str, int]:
    """The tokens that begin and end a prompt, by their names in Llama's vocabulary."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing: save the tokenizer as a fast one, or copy the file from openvla-7b"
        ) from None
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{path} is not a tokenizer ({error}); copy the checkpoint again") from error
    ids = {name: tokenizer.token_to_id(token) for name, token in _TOKENS.items()}
    missing = [_TOKENS[name] for name, number in ids.items() if number is None]
    if missing:
        raise UserError(f"{path} lacks {' and '.join(map(repr, missing))}: it is not the tokenizer of a Llama")
    return {name: int(number) for name, number in ids.items() if number is not None}


_TOKENS = {"bos_id": "<s>", "eos_id": "</s>", "final_id": _SPACE}


def _normalization(path: Path) -> dict[str, tuple[float, ...]]:
    """Mean and standard deviation for the first tower; the published file has them rounded to bfloat16."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = [(row["mean"], row["std"]) for row in content.get("tvf_normalize_params") or ()]
        rows = rows or list(zip(content["means"], content["stds"], strict=True))
        (mean, std), (siglip_mean, siglip_std) = rows
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); copy the checkpoint again") from error
    if {*siglip_mean, *siglip_std} != {0.5}:
        raise UserError(f"{path}: the second tower's mean {siglip_mean} and std {siglip_std}; supported: 0.5")
    return {"dino_mean": tuple(map(float, mean)), "dino_std": tuple(map(float, std))}


def _value_hidden(value_head: Mapping[str, Stored]) -> tuple[int, int]:
    first, second = (value_head.get(f"{VALUE_HEAD}{layer}.weight") for layer in (0, 2))
    return (first.shape[0], second.shape[0]) if first and second else _VALUE_HIDDEN


def _check_shapes(folder: PublishedFolder, architecture: Architecture) -> None:
    """Every tensor of the model is there, and no other one."""
    expected = published_shapes(architecture)
    problems = [
        *_differences(_shapes_of(folder.weights), expected),
        *_differences(_shapes_of(folder.proprio), proprio_shapes(architecture), "proprio_projector."),
        *_differences(
            {name: shape for name, shape in _shapes_of(folder.action_head).items() if name != LOG_NOISE},
            action_head_shapes(architecture),
            "action_head.",
        ),
        *_value_head_problems(folder.value_head, architecture),
    ]
    for name, (a, b) in folder.adapters.matrices.items() if folder.adapters else ():
        shape = expected.get(name)
        if shape is None:
            problems.append(f"the adapter of {name} is of an unknown layer")
        elif a.shape[1:] != shape[1:] or b.shape[0] != shape[0] or a.shape[0] != b.shape[1]:
            problems.append(f"the adapter of {name} is {list(a.shape)} and {list(b.shape)}, the layer {list(shape)}")
    if problems:
        raise UserError(f"{folder.path}: weights do not fit the config: {'; '.join(counted(problems))}")


def _shapes_of(stored: Mapping[str, Stored]) -> dict[str, Shape]:
    return {name: tensor.shape for name, tensor in stored.items()}


def _differences(found: Mapping[str, Shape], expected: Mapping[str, Shape], part: str = "") -> list[str]:
    return [
        *(f"{part}{name} is missing" for name in expected if name not in found),
        *(f"{part}{name} is unknown" for name in found if name not in expected),
        *(
            f"{part}{name} is {list(found[name])}, expected {list(shape)}"
            for name, shape in expected.items()
            if found.get(name, shape) != shape
        ),
    ]


def _value_head_problems(found: Mapping[str, Stored], architecture: Architecture) -> list[str]:
    """A head may lack ``time`` and the input proprioception. One with several outputs is known, but not used."""
    if not found:
        return []
    width = architecture.llm.width
    shapes = _shapes_of(found)
    inputs = width if shapes.get(f"{VALUE_HEAD}0.weight", ())[1:] == (width,) else width + architecture.proprio_dim
    expected = value_head_shapes(architecture, inputs)
    outputs = f"{VALUE_HEAD}4.weight"
    if outputs in shapes:
        expected[outputs] = (shapes[outputs][0], architecture.value_hidden[1])
    return _differences({f"{VALUE_HEAD}time": expected[f"{VALUE_HEAD}time"]} | shapes, expected)
