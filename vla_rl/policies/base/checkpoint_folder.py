"""Reading and writing the folder of a policy checkpoint: JSON files and files of weights."""

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from vla_rl.core.errors import UserError
from vla_rl.core.files import replacing
from vla_rl.core.postponed import are_postponed, write

WEIGHTS = "model.safetensors"
_NAMED_IN_ERRORS = 5


class CheckpointError(UserError):
    """A folder is not a usable checkpoint. The message names the file, what is wrong with it and the remedy."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """Contents of a safetensors file."""

    tensors: Mapping[str, torch.Tensor]
    about: Mapping[str, str] | None = None


def write_checkpoint(folder: Path, weights: Mapping[str, Tensors], files: Mapping[str, Mapping | str]) -> None:
    """Write a checkpoint, now or later (``postponed``). A reader sees the previous folder or the complete new one.

    Args:
        folder: the checkpoint.
        weights: safetensors files, by name.
        files: other files, by name; mappings as JSON.

    Raises CheckpointError if a mapping is not JSON-serializable, OSError if the disk fails.
    """
    try:
        texts = {name: x if isinstance(x, str) else json.dumps(dict(x), indent=2) for name, x in files.items()}
    except TypeError as error:
        raise CheckpointError(f"metadata of {folder} cannot be written as JSON: {error}") from error
    if are_postponed():
        weights = {
            file: Tensors({name: t.detach().to("cpu", copy=True) for name, t in content.tensors.items()}, content.about)
            for file, content in weights.items()
        }
    write(folder, partial(_write_checkpoint, folder, weights, texts))


def _write_checkpoint(folder: Path, weights: Mapping[str, Tensors], texts: Mapping[str, str]) -> None:
    with replacing(folder) as unfinished:
        unfinished.mkdir()
        for name, text in texts.items():
            (unfinished / name).write_text(text + "\n", encoding="utf-8")
        for file, content in weights.items():
            tensors = {name: tensor.contiguous() for name, tensor in content.tensors.items()}
            save_file(tensors, unfinished / file, None if content.about is None else dict(content.about))
            shutil.copymode(unfinished / name, unfinished / file)  # safetensors: readable by the owner only


def read_weights(
    folder: Path, expected: Mapping[str, torch.Tensor], *, optional: Collection[str] = (), fits: str
) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, by name.

    Args:
        folder: the checkpoint.
        expected: tensors of the wanted names and shapes.
        optional: names that may be missing.
        fits: the file that describes the shapes, for errors.

    Raises CheckpointError, which lists what is missing, unknown or of another shape.
    """
    path = checkpoint_file(folder, WEIGHTS)
    check_shapes(path, expected, optional=optional, fits=fits)
    with undamaged(path):
        return load_file(path)


def checkpoint_file(folder: Path, name: str) -> Path:
    """A file of a checkpoint. Raises CheckpointError if it or the folder is missing."""
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint folder {folder} does not exist: check the path")
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: {folder} is not a complete checkpoint")
    return path


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The mapping in a file of a checkpoint. Raises CheckpointError."""
    path = checkpoint_file(folder, name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): copy the checkpoint again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a mapping, found {type(content).__name__}")
    return content


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn a ValueError, KeyError or TypeError of the block into a CheckpointError that names ``path``."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"{path}: {error} is missing") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


@contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """Turn an error of safetensors in the block into a CheckpointError that names ``path``."""
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or truncated ({error}): copy the checkpoint again") from error


def check_shapes(path: Path, tensors: Mapping[str, torch.Tensor], *, optional: Collection[str] = (), fits: str) -> None:
    """Raises as ``read_weights``; ``path`` is the file of weights."""
    with undamaged(path), safe_open(path, framework="pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_names(path, expected, found, optional=optional, fits=fits)


def check_names(
    path: Path,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    *,
    optional: Collection[str] = (),
    fits: str,
) -> None:
    """Compare names and shapes; raises as ``read_weights``."""
    problems = [f"{name} is missing" for name in expected if name not in found and name not in optional]
    problems += [f"{name} is unknown" for name in found if name not in expected]
    problems += [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        rest = len(problems) - _NAMED_IN_ERRORS
        listed = "; ".join(problems[:_NAMED_IN_ERRORS]) + (f"; and {rest} more" if rest > 0 else "")
        raise CheckpointError(f"{path} does not fit its {fits}: {listed}")
