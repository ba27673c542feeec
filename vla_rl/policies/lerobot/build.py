"""Loads a policy of the package lerobot; see ``vla_rl.policies.build``. Importing this file does not load torch."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.hub import is_hub_id
from vla_rl.policies.base.sizes import PolicySizes
from vla_rl.policies.lerobot.config import LeRobotConfig

if TYPE_CHECKING:
    import torch

    from vla_rl.policies.lerobot.model import LeRobotPolicy

_WEIGHTS = "model.safetensors"
_FILES = ("config.json", _WEIGHTS, "policy_preprocessor.json", "policy_postprocessor.json")
_STATE, _ACTION = "observation.state", "action"


def check_policy(config: LeRobotConfig, spec: EnvSpec) -> None:
    """See ``vla_rl.policies.build.check_policy``."""
    if config.checkpoint is None:
        raise UserError("policy.name=lerobot needs policy.checkpoint: the folder of a policy that lerobot has saved")
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
    problems = list(_misfits(json.loads((folder / "config.json").read_text()), config, spec))
    if problems:
        raise UserError(f"policy.checkpoint={config.checkpoint} does not fit this run: " + "; ".join(problems))


def _misfits(saved: dict[str, Any], config: LeRobotConfig, spec: EnvSpec) -> list[str]:
    """What of a saved config.json the run contradicts."""
    inputs, found = saved["input_features"], []
    cameras = [name for name, feature in inputs.items() if feature["type"] == "VISUAL" and "empty_camera" not in name]
    if len(cameras) != len(spec.views):
        found.append(f"it sees {len(cameras)} cameras, the run has {len(spec.views)} (set env.wrist_camera)")
    width = inputs[_STATE]["shape"][0] if _STATE in inputs else 0
    if width and width != spec.proprio_dim:
        found.append(f"it reads a state of {width} numbers, the run has {spec.proprio_dim} (set env.proprio)")
    actions = saved["output_features"][_ACTION]["shape"][0]
    if actions != spec.action_dim:
        found.append(f"its actions have {actions} numbers, the simulator's {spec.action_dim}")
    if config.chunk_size > saved["chunk_size"]:
        found.append(f"it predicts {saved['chunk_size']} actions at once (lower policy.chunk_size={config.chunk_size})")
    if saved.get("n_obs_steps", 1) != 1:
        found.append(f"it reads {saved['n_obs_steps']} observations at once; here it gets one")
    return found


def build_policy(
    config: LeRobotConfig, spec: EnvSpec, seed: int, device: str = "cpu", dtype: torch.dtype | None = None
) -> LeRobotPolicy:
    """See ``vla_rl.policies.build.build_policy``. The weights keep the dtype that lerobot gives them."""
    from vla_rl.policies.lerobot.model import load_policy

    check_policy(config, spec)
    return load_policy(config, device)


def save_policy(*_: Any) -> NoReturn:
    """It cannot be trained (``require_trainable``)."""
    raise UserError("policy.name=lerobot is never changed here, so there is nothing to save")


def is_checkpoint(folder: Path) -> bool:
    """Whether the files are those that lerobot saves."""
    return all((folder / name).is_file() for name in _FILES)


def policy_sizes(
    config: LeRobotConfig, spec: EnvSpec, element_size: int, activation_checkpointing: bool
) -> PolicySizes:
    """See ``vla_rl.policies.build.policy_sizes``. Activations are not known: they count as nothing."""
    return PolicySizes(parameters=_parameters(config), trained=0, train_each=0, saved_each=0, infer_each=0)


def _parameters(config: LeRobotConfig) -> int:
    """By the header of the weights: 8 bytes of length, then JSON. 0 for what is not on this machine."""
    path = Path(config.checkpoint or "") / _WEIGHTS
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
