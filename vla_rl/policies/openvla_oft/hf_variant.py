"""What a checkpoint in the published layout was trained as, where its weights do not tell; does not load torch.

OpenVLA and OpenVLA-OFT have the same weights and the same ``config.json``. They differ in the class that saved them and
in the code that lies beside them, which is read as text and never run.
"""

from collections.abc import Mapping
from typing import Any

from vla_rl.core.errors import UserError
from vla_rl.policies.openvla_oft.architecture import VARIANT, Architecture
from vla_rl.policies.openvla_oft.hf_folder import CODE, PublishedFolder

_KEY = "vla_rl"  # of config.json, written by ``vla-rl export`` where the rest would be read differently
_OFFICIAL_IMAGES: dict[str, Any] = {"center_crop": True, "jpeg": True, "resize": "lanczos", "crop_rounding": "truncate"}
_PARALLEL: dict[str, Any] = {"decoding": "parallel"}
_AUTOREGRESSIVE: dict[str, Any] = {"decoding": "autoregressive"}
_BY_CLASS: dict[str, dict[str, Any]] = {
    "OpenVLAOFTForRLActionPrediction": {"decoding": "parallel", "stop_token": False},  # RLinf
    "OpenVLAForRLActionPrediction": _AUTOREGRESSIVE,  # RLinf
    "OpenVLAForActionPredictionWithValueHead": _AUTOREGRESSIVE,  # RL4VLA
}
_MARK_OF_OFT = "NUM_ACTIONS_CHUNK"  # a constant of OpenVLA-OFT's code


def read_variant(folder: PublishedFolder, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Values of ``architecture.VARIANT``: those of ``chosen``, else the folder's, else the usual ones.

    Raises UserError if neither says how actions are decoded, or if the folder's own values are unknown ones.
    """
    written = folder.config.get(_KEY) or {}
    if not isinstance(written, Mapping) or not written.keys() <= set(VARIANT):
        raise UserError(f"{folder.path / 'config.json'}: {_KEY}={written!r}; known: {', '.join(VARIANT)}")
    decoding = _decoding(folder, folder.parallel or bool(folder.action_head))
    variant = _complete(_OFFICIAL_IMAGES | decoding | dict(written) | dict(chosen))
    if "decoding" not in variant:
        raise UserError(
            f"policy.decoding=null: nothing in {folder.path} says how its actions are decoded; set "
            "policy.decoding=autoregressive for OpenVLA and RL4VLA (one number after the other), or "
            f"policy.decoding=parallel for OpenVLA-OFT (all at once), or copy its {CODE}"
        )
    return variant


def config_of(architecture: Architecture, source: PublishedFolder) -> dict[str, Any]:
    """The source's config.json, with what is needed so that its copy is read as a policy of this architecture."""
    read, differing = _OFFICIAL_IMAGES | _decoding(source, bool(source.action_head)), dict[str, Any]()
    for name in VARIANT:
        value = getattr(architecture, name)
        if _complete(read | differing).get(name) != value:
            differing[name] = value
    config = {name: value for name, value in source.config.items() if name != _KEY}
    return config | ({_KEY: differing} if differing else {})


def _complete(variant: Mapping[str, Any]) -> dict[str, Any]:
    return {"stop_token": variant.get("decoding") == "parallel", **variant}


def _decoding(folder: PublishedFolder, parallel: bool) -> dict[str, Any]:
    """By the class that saved the weights, by OpenVLA-OFT's files (``parallel``), by the code; empty if none tells."""
    for name in folder.config.get("architectures") or ():
        if name in _BY_CLASS:
            return _BY_CLASS[name]
    if parallel:
        return _PARALLEL
    try:
        code = (folder.path / CODE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return _PARALLEL if _MARK_OF_OFT in code else _AUTOREGRESSIVE
