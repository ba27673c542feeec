"""Stand-in assets: an asset folder for LIBERO, generated from ``table.yaml``.

Where LIBERO's meshes and textures cannot be had, these take their place: the same bodies, joints and regions, so that
every task loads, its initial states fit and its goals can be reached; other shapes and colours, with few faces and
few collision boxes. Results on them are not results on the benchmark.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from envs.libero.assets.standins import mjcf, textures
from envs.libero.assets.standins.table import model_file, read_table

__all__ = ["ensure_standins", "required_files", "write_standins"]


def required_files() -> tuple[str, ...]:
    """Files, relative to an asset folder, that LIBERO opens by path for its 130 tasks."""
    table = read_table()
    models = [model_file(name, entry) for kind in ("objects", "fixtures") for name, entry in table[kind].items()]
    return (*models, *(f"scenes/{room}.xml" for room in table["rooms"]))


def ensure_standins(parent: Path) -> Path:
    """The folder of the stand-ins below ``parent``, generated now where this version of them is not there yet.

    Raises OSError where ``parent`` cannot be written.
    """
    here = Path(__file__).parent
    sources = sorted([*here.glob("*.py"), *here.glob("*.yaml")])
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    folder = parent / f"stand-ins-{digest[:12]}"
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".stand-ins-", dir=parent))
    try:
        write_standins(scratch)
        scratch.chmod(0o755)
        scratch.rename(folder)  # whole or not at all, however many processes do this at once
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def write_standins(folder: Path) -> None:
    """Generate all files into an existing, empty folder."""
    table = read_table()
    for kind in ("objects", "fixtures"):
        for name, entry in table[kind].items():
            mjcf.write(folder / model_file(name, entry), mjcf.model(name, entry, kind == "fixtures"))
    for name, room in table["rooms"].items():
        mjcf.write(folder / "scenes" / f"{name}.xml", mjcf.room(room))
    (folder / "textures").mkdir()
    for name, texture in table["textures"].items():
        textures.write_texture(folder / "textures" / name, texture["pattern"], tuple(texture["color"]))
