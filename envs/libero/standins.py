"""Stand-in assets for LIBERO."""

from __future__ import annotations

from pathlib import Path


def required_files() -> tuple[str, ...]:
    """Files that LIBERO's code opens by path."""
    return ("wall.xml", "scenes/libero_kitchen_tabletop_base_style.xml", "articulated_objects/microwave.xml")


def ensure_standins(parent: Path) -> Path:
    raise NotImplementedError
