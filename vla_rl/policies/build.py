"""From a run's configuration to a policy, the same one in every process that builds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec
from vla_rl.policies.openvla_oft.architecture import PRESETS, Architecture
from vla_rl.policies.openvla_oft.config import PolicyConfig

if TYPE_CHECKING:
    from vla_rl.policies.openvla_oft.model import OpenVLAOFT


def check_policy(config: PolicyConfig, spec: EnvSpec) -> None:
    """Refuse a checkpoint that is incomplete or was made for other observations, without loading torch.

    Raises UserError. Shapes of the tensors are checked where the checkpoint is loaded.
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


def build_policy(config: PolicyConfig, spec: EnvSpec, seed: int) -> OpenVLAOFT:
    """The checkpoint's policy, or one with random weights settled by ``seed``; with adapters where the config has lora.

    Adapters add nothing at first: the outputs are the checkpoint's. Raises UserError.
    """
    from vla_rl.policies.openvla_oft.checkpoint import load_policy

    if config.checkpoint is None:
        policy = _random_policy(config, spec, seed)
    else:
        check_policy(config, spec)
        policy = load_policy(config.checkpoint)
    if config.lora is not None:
        from vla_rl.policies.openvla_oft.lora import add_adapters

        add_adapters(policy, config.lora, seed)
    policy.set_instructions(spec.instructions)
    return policy


def make_architecture(config: PolicyConfig, spec: EnvSpec) -> Architecture:
    """The preset of ``policy.size``, with the simulator's views and dimensions."""
    return PRESETS[config.size](
        views=len(spec.views), proprio_dim=spec.proprio_dim, chunk_size=config.chunk_size, action_dim=spec.action_dim
    )


def _random_policy(config: PolicyConfig, spec: EnvSpec, seed: int) -> OpenVLAOFT:
    from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds
    from vla_rl.policies.openvla_oft.initialize import make_policy

    # without data there are no statistics: unit ranges, and the gripper as it is
    a, p = spec.action_dim, spec.proprio_dim
    codec = ActionCodec(Bounds((-1.0,) * a, (1.0,) * a, (True,) * (a - 1) + (False,)))
    proprio = Bounds((-1.0,) * p, (1.0,) * p, (True,) * p) if p else None
    return make_policy(make_architecture(config, spec), spec.instructions, codec, proprio, seed=seed)


def _check_weights_are_whole(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):  # reads the header, which tells how long the file must be
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
