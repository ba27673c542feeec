"""Builds a run's policy from its config: the same one in every process. Importing this file does not load torch.

Each policy has a folder ``vla_rl/policies/NAME`` with ``config.py`` (its keys) and ``build.py`` (``check_policy``,
``build_policy``, ``policy_for_demonstrations`` and ``save_policy``, with the arguments used below).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_rl.core.records import Array, EnvSpec
from vla_rl.policies import PolicyConfig

if TYPE_CHECKING:
    import torch

    from vla_rl.policies.base.policy import Policy


def check_policy(config: PolicyConfig, spec: EnvSpec) -> None:
    """Raise UserError if the checkpoint is incomplete or was made for other observations. Does not load torch.

    Loading the checkpoint checks the shapes of its tensors, too.
    """
    _builder(config).check_policy(config, spec)


def build_policy(config: PolicyConfig, spec: EnvSpec, seed: int, prompts: Sequence[str] | None = None) -> Policy:
    """The checkpoint's policy, or one with random weights drawn by ``seed``.

    ``prompts``: the policy's instructions, by task number; None: those of the simulator. Raises UserError.
    """
    policy: Policy = _builder(config).build_policy(config, spec, seed)
    policy.set_instructions(prompts or spec.instructions)
    return policy


def policy_for_demonstrations(config: PolicyConfig, spec: EnvSpec, actions: Array, proprio: Array, seed: int) -> Policy:
    """A policy with random weights drawn by ``seed``, to clone demonstrations, whose statistics scale its actions.

    ``actions`` [n, A] and ``proprio`` [n, P] are those of all demonstrated steps.
    """
    policy: Policy = _builder(config).policy_for_demonstrations(config, spec, actions, proprio, seed)
    return policy


def save_policy(config: PolicyConfig, policy: Policy, folder: str | Path, metadata: Mapping[str, Any]) -> None:
    """Write a checkpoint folder, adapters merged. A reader sees the previous folder or the complete new one.

    Raises UserError if ``metadata`` is not JSON-serializable, OSError if the disk fails.
    """
    _builder(config).save_policy(policy, folder, metadata)


def torch_dtype(precision: str) -> torch.dtype:
    """The dtype of ``learner.precision``: "fp32" or "bf16"."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def _builder(config: PolicyConfig) -> Any:
    return import_module(f"vla_rl.policies.{config.name}.build")
