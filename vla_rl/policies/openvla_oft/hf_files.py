"""Reads JSON and what files of weights hold; loads torch only for files of ``torch.save`` (see ``pickled``)."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.core.errors import UserError
from vla_rl.policies.openvla_oft.hf_names import Shape, counted

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth")
_KNOWN_PARTS = "action_head", "proprio_projector", "vision_backbone"
_PART = re.compile(rf"({'|'.join(_KNOWN_PARTS)}|.+(?=--\w+_checkpoint$))(.*)")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file of safetensors or ``torch.save``."""

    file: Path
    key: str
    shape: Shape


def read_json(path: Path) -> dict[str, Any]:
    """Raises UserError if the file is missing or has no JSON mapping."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {path.parent} is not a complete checkpoint; copy it again") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); copy the checkpoint again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping, found {type(content).__name__}")
    return content


def weight_files(path: Path) -> list[str]:
    """Names of the files with the weights. Raises UserError if there are none, or only pickled ones."""
    if (path / INDEX).is_file():
        places = read_json(path / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise UserError(f"{path / INDEX}: no weight_map; copy the checkpoint again")
        names = sorted(set(places.values()))
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise UserError(f"{path}: {', '.join(missing)} of {INDEX} missing; copy the checkpoint again")
        return names
    if (path / WEIGHTS).is_file():
        return [WEIGHTS]
    raise UserError(
        f"{path}: neither {WEIGHTS} nor {INDEX} is there; copy the checkpoint again, or convert its pytorch_model*.bin "
        "to safetensors (torch.load(weights_only=True), safetensors.torch.save_file)"
    )


def read_headers(file: Path) -> dict[str, Stored]:
    """All tensors of a file of weights. Raises UserError if it is damaged, or rejected by ``read_pickled``."""
    if file.suffix in PICKLED:
        from vla_rl.policies.openvla_oft.pickled import read_pickled

        return {key: Stored(file, key, tuple(tensor.shape)) for key, tensor in read_pickled(file).items()}
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            return {
                key: Stored(file, key, tuple(opened.get_slice(key).get_shape()))
                for key in opened.keys()  # noqa: SIM118
            }
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged or truncated ({error}); copy the checkpoint again") from error


def read_weights(path: Path) -> dict[str, Stored]:
    """All tensors of the files with the weights. Raises as ``weight_files`` and ``read_headers``."""
    return {key: stored for name in weight_files(path) for key, stored in read_headers(path / name).items()}


def find_parts(path: Path) -> dict[str, Path]:
    """The parts that OpenVLA-OFT saves apart, ``NAME--STEP_checkpoint.pt`` (or converted to safetensors), by name.

    All are of the step with the highest number. Raises UserError if some part has another one, and for unknown parts.
    """
    steps: dict[str, dict[str, Path]] = {}
    for file in sorted(path.glob("*")):  # a converted file comes after its original
        match = _PART.fullmatch(file.stem)
        if match is not None and file.suffix in (*PICKLED, ".safetensors"):
            steps.setdefault(match[2], {})[match[1]] = file
    parts = steps[max(steps, key=lambda step: (len(step), step))] if steps else {}
    unclear = [step for step in steps if not step[2:-11].isdecimal() or steps[step].keys() - parts.keys()]
    if len(steps) > 1 and unclear:
        files = sorted(file.name for found in steps.values() for file in found.values())
        text = "parts of several steps, and no step is the newest of all; keep those of one step there"
        raise UserError(f"{path}: {text}: {', '.join(counted(files))}")
    for name in parts.keys() - set(_KNOWN_PARTS):
        raise UserError(
            f"{parts[name]}: a part that is not implemented (noisy_action_projector: of a head for diffusion); name a "
            "checkpoint with discrete tokens or with L1 regression"
        )
    return parts


def read_part(parts: dict[str, Path], name: str) -> dict[str, Stored]:
    """The tensors of one of ``find_parts``, without the prefix of a distributed run; empty without it."""
    stored = read_headers(parts[name]) if name in parts else {}
    return {key.removeprefix("module."): tensor for key, tensor in stored.items()}
