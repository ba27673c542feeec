"""Installed packages, found without importing them."""

import importlib.util
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def package_folder(name: str) -> Path | None:
    """The folder of an installed package; None if it is not installed."""
    spec = importlib.util.find_spec(name)
    locations = (spec and spec.submodule_search_locations) or ()
    return next(map(Path, locations), None)


def versions(*names: str) -> str:
    """Of installed distributions, such as "mujoco 3.3.7, robosuite 1.4.0"."""
    found = []
    for name in names:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)
