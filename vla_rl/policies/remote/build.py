"""Connects to a policy that is served; see ``vla_rl.policies.build``. Importing this file does not load torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec
from vla_rl.core.wire import PROMPT, STATE, image_keys
from vla_rl.policies.base.sizes import PolicySizes
from vla_rl.policies.remote.config import RemoteConfig

MODULES = ("vla_rl.policies.remote.model",)

if TYPE_CHECKING:
    import torch

    from vla_rl.policies.base.policy import Policy


def check_policy(config: RemoteConfig, spec: EnvSpec) -> None:
    """See ``vla_rl.policies.build.check_policy``: asks the server once, with black images and a state of zeros."""
    from vla_rl.policies.remote.client import RemoteClient

    if config.checkpoint is not None:
        raise UserError(
            f"policy.checkpoint={config.checkpoint}: policy.name=remote takes its weights from {config.address}; "
            "leave it out, or evaluate the checkpoint itself"
        )
    client = RemoteClient(config, spec.action_dim)
    image = np.zeros((spec.image_size, spec.image_size, 3), np.uint8)
    parts = {STATE: np.zeros(spec.proprio_dim, np.float32), PROMPT: spec.instructions[0]}
    client.chunks([dict.fromkeys(image_keys(spec.views), image) | parts])
    client.close()


def keys_of_checkpoint(config: RemoteConfig, spec: EnvSpec) -> dict[str, Any]:
    """See ``vla_rl.policies.build.keys_of_checkpoint``: what the server's metadata says, as `vla-rl serve` does."""
    from vla_rl.policies.remote.client import RemoteClient

    told, found = RemoteClient(config, spec.action_dim).metadata(), {}
    if isinstance(chunk_size := told.get("chunk_size"), int) and chunk_size > 0:
        found["policy.chunk_size"] = chunk_size
    if isinstance(images := told.get("images"), dict):
        found["env.wrist_camera"] = len(images) > 1
    if isinstance(width := told.get("state_dim"), int):
        found["env.proprio"] = width > 0
    return found


def build_policy(
    config: RemoteConfig, spec: EnvSpec, seed: int, device: str = "cpu", dtype: torch.dtype | None = None
) -> Policy:
    """See ``vla_rl.policies.build.build_policy``. It connects when it acts."""
    from vla_rl.policies.remote.model import RemotePolicy

    return RemotePolicy(config, spec)


def policy_sizes(config: RemoteConfig, spec: EnvSpec, element_size: int, activation_checkpointing: bool) -> PolicySizes:
    """See ``vla_rl.policies.build.policy_sizes``: nothing is here."""
    return PolicySizes(0, 0, 0, 0, 0)


def save_policy(policy: Policy, folder: str | Path, metadata: Mapping[str, Any]) -> NoReturn:
    """See ``vla_rl.policies.build.save_policy``."""
    raise RuntimeError("a policy that is served elsewhere has no weights here")


def is_checkpoint(folder: Path) -> bool:
    """No folder is one."""
    return False
