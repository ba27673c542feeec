"""Builds a small Gaussian policy; see ``vla_rl.policies.build``. Importing this file does not load torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.export import Export
from vla_rl.policies.base.gaussian_config import ABOUT
from vla_rl.policies.base.sizes import PolicySizes
from vla_rl.policies.gaussian.config import SmallGaussianConfig

if TYPE_CHECKING:
    import torch

    from vla_rl.policies.gaussian.model import SmallGaussian

MODULES = ("vla_rl.policies.gaussian.model",)
EXPORT_FORMATS = ("native",)
EXPORT_OPTIONS = ()


def check_policy(config: SmallGaussianConfig, spec: EnvSpec) -> None:
    """See ``vla_rl.policies.build.check_policy``."""
    config.check_images(spec)
    config.check_checkpoint("SmallGaussian", spec)


def build_policy(
    config: SmallGaussianConfig, spec: EnvSpec, seed: int, device: str = "cpu", dtype: torch.dtype | None = None
) -> SmallGaussian:
    """See ``vla_rl.policies.build.build_policy``."""
    from vla_rl.policies.gaussian.model import SmallGaussian

    return SmallGaussian.build_policy(config, spec, seed, device, dtype)


def policy_sizes(
    config: SmallGaussianConfig, spec: EnvSpec, element_size: int, activation_checkpointing: bool
) -> PolicySizes:
    """See ``vla_rl.policies.build.policy_sizes``."""
    from vla_rl.policies.gaussian.model import SmallGaussian

    return SmallGaussian.policy_sizes(config, spec, element_size, activation_checkpointing)


def save_policy(policy: SmallGaussian, folder: str | Path, metadata: Mapping[str, Any]) -> None:
    """See ``vla_rl.policies.build.save_policy``."""
    policy.save_policy(policy, folder, metadata)


def is_checkpoint(folder: Path) -> bool:
    """Whether the files are those of this policy."""
    from vla_rl.policies.base.checkpoint_folder import CheckpointError, read_json

    try:
        return read_json(folder, ABOUT).get("class") == "SmallGaussian"
    except CheckpointError:
        return False


def export_policy(request: Export) -> None:
    """See ``vla_rl.policies.build.export_policy``."""
    from vla_rl.policies.gaussian.model import SmallGaussian

    SmallGaussian.export_policy(request)
