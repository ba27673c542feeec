"""Placeholder assets: an asset folder for LIBERO, generated from ``table.yaml``.

They are used if LIBERO's meshes and textures cannot be had. Bodies, joints and regions are the same, so that every task
loads, its initial states fit and its goals can be reached. Shapes and colours differ, with few faces and few collision
boxes: results on them are not results on the benchmark.
"""

import hashlib
import tempfile
from pathlib import Path

from envs.libero.assets.placeholder import mjcf, textures
from envs.libero.assets.placeholder.table import model_file, read_table

__all__ = ["ensure_placeholder_assets", "required_files", "write_placeholder_assets"]


def required_files() -> tuple[str, ...]:
    """Files, relative to an asset folder, that LIBERO opens by path for its 130 tasks."""
    table = read_table()
    models = [model_file(name, entry) for kind in ("objects", "fixtures") for name, entry in table[kind].items()]
    return (*models, *(f"scenes/{room}.xml" for room in table["rooms"]))


def ensure_placeholder_assets(parent: Path) -> Path:
    """The folder of these assets below ``parent``; it is generated first if this version of them is missing.

    Raises OSError if ``parent`` cannot be written.
    """
    here = Path(__file__).parent
    sources = sorted([*here.glob("*.py"), *here.glob("*.yaml")])
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    folder = parent / f"placeholder-{digest[:12]}"
    if not folder.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".placeholder-", dir=parent) as scratch:
            complete = Path(scratch) / "assets"
            complete.mkdir()
            write_placeholder_assets(complete)
            try:
                complete.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was faster; its folder may be in use, so it stays
                    raise
    return folder


def write_placeholder_assets(folder: Path) -> None:
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
