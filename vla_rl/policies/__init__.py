"""The OpenVLA family: model, action codec, prompt, images, checkpoints.

Names are imported on first use, so that reading a configuration or a ``--help`` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_rl.policies.build import build_policy, check_policy, make_architecture
    from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds
    from vla_rl.policies.openvla_oft.architecture import PRESETS, Architecture
    from vla_rl.policies.openvla_oft.checkpoint import CheckpointError, load_metadata, load_policy, save_policy
    from vla_rl.policies.openvla_oft.initialize import make_policy
    from vla_rl.policies.openvla_oft.model import OpenVLAOFT, PolicyOutput, token_entropy, token_logprobs

_HOME = {
    "PRESETS": "openvla_oft.architecture",
    "ActionCodec": "openvla_oft.action_codec",
    "Architecture": "openvla_oft.architecture",
    "Bounds": "openvla_oft.action_codec",
    "CheckpointError": "openvla_oft.checkpoint",
    "OpenVLAOFT": "openvla_oft.model",
    "PolicyOutput": "openvla_oft.model",
    "build_policy": "build",
    "check_policy": "build",
    "load_metadata": "openvla_oft.checkpoint",
    "load_policy": "openvla_oft.checkpoint",
    "make_architecture": "build",
    "make_policy": "openvla_oft.initialize",
    "save_policy": "openvla_oft.checkpoint",
    "token_entropy": "openvla_oft.model",
    "token_logprobs": "openvla_oft.model",
}

__all__ = [
    "PRESETS",
    "ActionCodec",
    "Architecture",
    "Bounds",
    "CheckpointError",
    "OpenVLAOFT",
    "PolicyOutput",
    "build_policy",
    "check_policy",
    "load_metadata",
    "load_policy",
    "make_architecture",
    "make_policy",
    "save_policy",
    "token_entropy",
    "token_logprobs",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
