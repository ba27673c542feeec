"""The OpenVLA family: model, action codec, prompt, images, checkpoints.

Names are imported on first use, so that reading a configuration or a ``--help`` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_rl.policies.action_codec import ActionCodec, Bounds
    from vla_rl.policies.architecture import PRESETS, Architecture
    from vla_rl.policies.build import build_policy, check_policy, make_architecture
    from vla_rl.policies.checkpoint import CheckpointError, load_metadata, load_policy, save_policy
    from vla_rl.policies.factory import make_policy
    from vla_rl.policies.openvla_oft import OpenVLAOFT, PolicyOutput, token_entropy, token_logprobs

_HOME = {
    "PRESETS": "architecture",
    "ActionCodec": "action_codec",
    "Architecture": "architecture",
    "Bounds": "action_codec",
    "CheckpointError": "checkpoint",
    "OpenVLAOFT": "openvla_oft",
    "PolicyOutput": "openvla_oft",
    "build_policy": "build",
    "check_policy": "build",
    "load_metadata": "checkpoint",
    "load_policy": "checkpoint",
    "make_architecture": "build",
    "make_policy": "factory",
    "save_policy": "checkpoint",
    "token_entropy": "openvla_oft",
    "token_logprobs": "openvla_oft",
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
