"""Loads a policy of the package lerobot; see ``vla_rl.policies.build``. Importing this file does not load torch."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_rl.core.errors import UserError
from vla_rl.core.files import shapes_in_safetensors
from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.hub import is_hub_id
from vla_rl.policies.base.sizes import PolicySizes
from vla_rl.policies.lerobot.config import LeRobotConfig

MODULES = ("vla_rl.policies.lerobot.model",)

if TYPE_CHECKING:
    import torch

    from vla_rl.policies.base.policy import Policy
    from vla_rl.policies.lerobot.flow_model import LeRobotFlow

_WEIGHTS = "model.safetensors"
_CONFIG = "config.json"
_FILES = (_CONFIG, _WEIGHTS, "policy_preprocessor.json", "policy_postprocessor.json")
_STATE, _ACTION = "observation.state", "action"
_VLM = ("paligemma_with_expert.paligemma.", "vlm_with_expert.vlm.")  # in the names of its weights


def check_policy(config: LeRobotConfig, spec: EnvSpec) -> None:
    """See ``vla_rl.policies.build.check_policy``."""
    if config.checkpoint is None:
        raise UserError(
            "policy.name=lerobot needs policy.checkpoint (vla-rl sft: sft.start_from): the folder of a policy that "
            "lerobot has saved"
        )
    if importlib.util.find_spec("lerobot") is None:
        raise UserError(
            "policy.name=lerobot: the package lerobot is missing; it needs an environment of its own, which "
            "docs/policies.md describes"
        )
    if is_hub_id(config.checkpoint):
        return
    folder = Path(config.checkpoint)
    for name in _FILES:
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing: {folder} is no policy as lerobot saves it (save_pretrained)")
    from vla_rl.policies.base.checkpoint_folder import naming, read_json

    saved = read_json(folder, _CONFIG)
    with naming(folder / _CONFIG):
        problems = _misfits(saved, config, spec)
    if problems:
        raise UserError(f"policy.checkpoint={config.checkpoint} does not fit this run: " + "; ".join(problems))


def _misfits(saved: dict[str, Any], config: LeRobotConfig, spec: EnvSpec) -> list[str]:
    """What of a saved config.json the run contradicts."""
    cameras, width = _inputs(saved)
    found = []
    if cameras != len(spec.views):
        found.append(f"it sees {cameras} cameras, the run has {len(spec.views)} (set env.wrist_camera)")
    if width and width != spec.proprio_dim:
        found.append(f"it reads a state of {width} numbers, the run has {spec.proprio_dim} (set env.proprio)")
    actions = saved["output_features"][_ACTION]["shape"][0]
    if actions != spec.action_dim:
        found.append(f"its actions have {actions} numbers, the simulator's {spec.action_dim}")
    if config.chunk_size > saved["chunk_size"]:
        found.append(f"it predicts {saved['chunk_size']} actions at once (lower policy.chunk_size={config.chunk_size})")
    if saved.get("use_relative_actions"):
        found.append("its actions are relative to the state, which is not possible here")
    if saved.get("n_obs_steps", 1) != 1:
        found.append(f"it reads {saved['n_obs_steps']} observations at once; here it gets one")
    return found


def _inputs(saved: dict[str, Any]) -> tuple[int, int]:
    """Cameras, and numbers of the state, of a saved config.json."""
    inputs = saved["input_features"]
    cameras = [name for name, feature in inputs.items() if feature["type"] == "VISUAL" and "empty_camera" not in name]
    return len(cameras), inputs[_STATE]["shape"][0] if _STATE in inputs else 0


def keys_of_checkpoint(config: LeRobotConfig, spec: EnvSpec) -> dict[str, Any]:
    """See ``vla_rl.policies.build.keys_of_checkpoint``."""
    folder = Path(config.checkpoint or "")
    if not is_checkpoint(folder):
        return {}
    from vla_rl.policies.base.checkpoint_folder import naming, read_json

    saved = read_json(folder, _CONFIG)
    with naming(folder / _CONFIG):
        cameras, width = _inputs(saved)
    return {"env.wrist_camera": cameras > 1, "env.proprio": width > 0}


def build_policy(
    config: LeRobotConfig, spec: EnvSpec, seed: int, device: str = "cpu", dtype: torch.dtype | None = None
) -> Policy:
    """See ``vla_rl.policies.build.build_policy``. What is only evaluated keeps the dtype that lerobot gives it."""
    check_policy(config, spec)
    if config.trainable:
        from vla_rl.policies.lerobot.flow_model import load_flow

        return load_flow(config, spec.actions, seed, device, dtype)
    from vla_rl.policies.lerobot.model import load_policy

    return load_policy(config, spec.actions, device)


def save_policy(policy: LeRobotFlow, folder: str | Path, metadata: Mapping[str, Any]) -> None:
    """See ``vla_rl.policies.build.save_policy``; as lerobot saves it."""
    policy.save(folder, metadata)


def is_checkpoint(folder: Path) -> bool:
    """Whether the files are those that lerobot saves."""
    return all((folder / name).is_file() for name in _FILES)


def policy_sizes(
    config: LeRobotConfig, spec: EnvSpec, element_size: int, activation_checkpointing: bool
) -> PolicySizes:
    """See ``vla_rl.policies.build.policy_sizes``. Activations are not known: they count as nothing."""
    numbers = _numbers_of_weights(config)
    frozen = _VLM if config.expert_only else ()
    trained = {name: number for name, number in numbers.items() if not any(part in name for part in frozen)}
    # At most: config.json may freeze other parts. What steers a frozen policy is too small to be counted.
    learns = config.trainable and not config.steered
    return PolicySizes(sum(numbers.values()), sum(trained.values()) * learns, 0, 0, 0)


def _numbers_of_weights(config: LeRobotConfig) -> dict[str, int]:
    """Nothing for what is not on this machine."""
    path = Path(config.checkpoint or "") / _WEIGHTS
    shapes = shapes_in_safetensors(path) if path.is_file() else {}
    return {name: math.prod(shape) for name, shape in shapes.items()}
