"""Installed packages, found without importing them."""

import importlib.util
from pathlib import Path


def package_folder(name: str) -> Path | None:
    """The folder of an installed package; None if it is not installed."""
    spec = importlib.util.find_spec(name)
    locations = (spec and spec.submodule_search_locations) or ()
    return next(map(Path, locations), None)
