"""Reads JSON and the headers of safetensors files of a checkpoint; does not load torch, and never unpickles."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.core.errors import UserError
from vla_rl.policies.openvla_oft.hf_names import Shape

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONVERT = "convert it to safetensors (load it with weights_only=True, write it with safetensors.torch.save_file)"
_PICKLED = (".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file."""

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
    pickled = sorted(file.name for file in path.glob("*") if file.suffix in _PICKLED)
    if pickled:
        raise UserError(f"{path / pickled[0]}: pickled weights are not read, they can run any code; {CONVERT}")
    raise UserError(f"{path}: neither {WEIGHTS} nor {INDEX} is there; copy the checkpoint again")


def read_headers(file: Path) -> dict[str, Stored]:
    """All tensors of a safetensors file. Raises UserError if it is damaged."""
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


def read_part(path: Path, name: str) -> dict[str, Stored]:
    """A part that OpenVLA-OFT saves apart, ``NAME--STEP_checkpoint.pt``, converted to safetensors.

    Empty without it. Raises UserError if it was not converted.
    """
    found = sorted(file for file in path.glob(f"{name}*") if file.suffix in (*_PICKLED, ".safetensors"))
    if not found:
        return {}
    converted = [file for file in found if file.suffix == ".safetensors"]
    if not converted:
        raise UserError(f"{found[0]}: pickled weights are not read, they can run any code; {CONVERT}")
    return {key.removeprefix("module."): stored for key, stored in read_headers(converted[-1]).items()}
