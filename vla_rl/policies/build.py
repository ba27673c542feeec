"""Build a run's policy from its config: the same one in every process. Importing this file does not load torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec
from vla_rl.policies.openvla_oft.architecture import PRESETS, Architecture
from vla_rl.policies.openvla_oft.config import PolicyConfig
from vla_rl.policies.openvla_oft.sizes import PolicySizes

if TYPE_CHECKING:
    import torch

    from vla_rl.policies.openvla_oft.model import OpenVLAOFT


def check_policy(config: PolicyConfig, spec: EnvSpec) -> None:
    """Raise UserError if the checkpoint is incomplete or was made for other observations. Does not load torch.

    Loading the checkpoint checks the shapes of its tensors, too.
    """
    if config.checkpoint is None:
        return
    path = Path(config.checkpoint) / "architecture.json"
    try:
        architecture = Architecture.from_dict(json.loads(path.read_text())["architecture"])
    except FileNotFoundError:
        raise UserError(
            f"policy.checkpoint={config.checkpoint}: {path.name} is missing there; name the folder of a policy "
            "checkpoint (a run's is at checkpoints/NUMBER/policy), or policy.checkpoint=null for random weights"
        ) from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"policy.checkpoint: {path} cannot be read: {error}; copy the checkpoint again") from error
    problems = _differences(architecture, config, spec)
    if problems:
        raise UserError(f"policy.checkpoint={config.checkpoint} does not fit this run: " + "; ".join(problems))
    _check_weights_are_whole(path.with_name("model.safetensors"))


def build_policy(
    config: PolicyConfig,
    spec: EnvSpec,
    seed: int,
    prompts: Sequence[str] | None = None,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
) -> OpenVLAOFT:
    """Load the checkpoint's policy, or make one with random weights drawn by ``seed``. With lora, add adapters.

    New adapters do not change the outputs. ``prompts``: the policy's instructions, by task number; None: those of the
    simulator. ``device``: where the weights come to be; "meta": nowhere, for a policy that will attach those of
    another. ``dtype``: None for the checkpoint's own. Raises UserError.
    """
    import torch

    from vla_rl.policies.openvla_oft.checkpoint import load_policy

    if config.checkpoint is None:
        policy = _random_policy(config, spec, seed, device, dtype or torch.float32)
    else:
        check_policy(config, spec)
        policy = load_policy(config.checkpoint, device, dtype)
    policy.value_time, policy.lm_head.in_float32 = config.value_time, config.fp32_head
    if config.lora is not None:
        from vla_rl.policies.openvla_oft.lora import add_adapters

        add_adapters(policy, config.lora, seed)
    policy.set_instructions(prompts or spec.instructions)
    return policy


def torch_dtype(precision: str) -> torch.dtype:
    """The dtype of ``learner.precision``: "fp32" or "bf16"."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def make_architecture(config: PolicyConfig, spec: EnvSpec) -> Architecture:
    """The preset of ``policy.size``, with the views and dimensions of the simulator."""
    return PRESETS[config.size](
        views=len(spec.views), proprio_dim=spec.proprio_dim, chunk_size=config.chunk_size, action_dim=spec.action_dim
    )


def policy_sizes(
    config: PolicyConfig, spec: EnvSpec, element_size: int, *, activation_checkpointing: bool = False
) -> PolicySizes:
    """What the run's policy takes, without building it. ``element_size``: bytes of one weight."""
    architecture = make_architecture(config, spec)
    if config.checkpoint is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # ``check_policy`` tells what is wrong
            content = json.loads((Path(config.checkpoint) / "architecture.json").read_text())
            architecture = Architecture.from_dict(content["architecture"])
    return PolicySizes.of(
        architecture, config.lora, element_size=element_size, activation_checkpointing=activation_checkpointing
    )


def _random_policy(config: PolicyConfig, spec: EnvSpec, seed: int, device: str, dtype: torch.dtype) -> OpenVLAOFT:
    from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds
    from vla_rl.policies.openvla_oft.initialize import make_policy

    # Without data there are no statistics: use unit ranges, and leave the gripper unscaled.
    a, p = spec.action_dim, spec.proprio_dim
    codec = ActionCodec(Bounds((-1.0,) * a, (1.0,) * a, (True,) * (a - 1) + (False,)))
    proprio = Bounds((-1.0,) * p, (1.0,) * p, (True,) * p) if p else None
    architecture = make_architecture(config, spec)
    return make_policy(architecture, spec.instructions, codec, proprio, seed=seed, device=device, dtype=dtype)


def _check_weights_are_whole(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):  # reads the header, which gives the file's length
            pass
    except FileNotFoundError:
        raise UserError(f"policy.checkpoint: {path} is missing; copy the checkpoint again") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"policy.checkpoint: {path} is damaged ({error}); copy the checkpoint again") from error


def _differences(architecture: Architecture, config: PolicyConfig, spec: EnvSpec) -> list[str]:
    wanted = {
        "views": (architecture.views, len(spec.views), "env.wrist_camera"),
        "proprio_dim": (architecture.proprio_dim, spec.proprio_dim, "env.proprio"),
        "action_dim": (architecture.action_dim, spec.action_dim, "env.name"),
        "chunk_size": (architecture.chunk_size, config.chunk_size, "policy.chunk_size"),
    }
    return [
        f"it was made for {name}={theirs}, the run has {ours} (set {key})"
        for name, (theirs, ours, key) in wanted.items()
        if theirs != ours
    ]
