"""Configs and checkpoints that come with vla_rl: beside its packages in a checkout, within ``vla_rl`` in a wheel."""

from pathlib import Path

_CHECKOUT = Path(__file__).parents[2]
_INSTALLED = Path(__file__).parents[1] / "shipped"
SHIPPED = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT  # has the folders configs and checkpoints
CONFIGS = SHIPPED / "configs"


def find_config(name: str | Path) -> Path:
    """A config file by its path, or one of ``CONFIGS`` by its name: ``libero_ppo``, ``recipes/ript_libero``.

    Also ``configs/libero_ppo.yaml``, wherever the command is called. Returns the path as it is if there is none.
    """
    path = Path(name)
    if path.is_absolute() or path.exists():
        return path
    for candidate in (SHIPPED / path, CONFIGS / path, CONFIGS / f"{path}.yaml"):
        if candidate.suffix == ".yaml" and candidate.is_file():
            return candidate
    return path


def find_input(text: str, folder: Path | None) -> str:
    """A path that a config names. It may be relative to the config's ``folder``, to the working one, or to ``SHIPPED``.

    Returns the first of these that exists, as an absolute path unless the working folder is it; ``text`` if none does.
    """
    path = Path(text)
    if path.is_absolute() or text.startswith("~"):
        return text
    try:
        if folder is not None and (folder / path).exists():
            here = path.exists() and path.samefile(folder / path)
            return text if here else str((folder / path).absolute())
        return str(SHIPPED / path) if not path.exists() and (SHIPPED / path).exists() else text
    except OSError:  # a name that is too long
        return text
