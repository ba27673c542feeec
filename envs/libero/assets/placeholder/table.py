"""Reads ``table.yaml``: resolves ``like``, and turns lines into shapes."""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from envs.libero.assets.placeholder import products
from envs.libero.assets.placeholder import shapes as elements
from envs.libero.assets.placeholder.shapes import Color, Shape

TABLE = Path(__file__).with_name("table.yaml")

Entry = dict[str, Any]

FAMILIES: dict[str, type] = {
    name: family
    for module in (elements, products)
    for name, family in vars(module).items()
    if isinstance(family, type) and hasattr(family, "geoms") and family is not Shape
}


@functools.cache
def read_table() -> Entry:
    """The whole table. Raises KeyError if an entry is ``like`` one that is not above it."""
    table: Entry = yaml.safe_load(TABLE.read_text())
    for kind in ("objects", "fixtures"):
        for name, entry in table[kind].items():
            if "like" in entry:
                changes = {key: value for key, value in entry.items() if key not in ("like", "recolor")}
                table[kind][name] = _recolored(table[kind][entry["like"]], entry.get("recolor", {})) | changes
    return table


def model_file(name: str, entry: Entry) -> str:
    """Where LIBERO looks for an object or fixture, relative to the asset folder."""
    folder = entry["folder"]
    return f"{folder}/{name}.xml" if folder == "articulated_objects" else f"{folder}/{name}/{name}.xml"


def shapes(lines: Iterable[dict[str, Entry]]) -> list[Shape]:
    """Shapes from lines ``{Class: {field: value}}``. Raises KeyError for an unknown class, TypeError for a field."""
    built = []
    for line in lines:
        ((name, values),) = line.items()
        built.append(FAMILIES[name](**{key: _value(value) for key, value in values.items()}))
    return built


def color(name: str) -> Color:
    """A colour of the palette."""
    red, green, blue = read_table()["palette"][name]
    return (red, green, blue)


def _value(value: Any) -> Any:
    if isinstance(value, str):
        return color(value) if value in read_table()["palette"] else value
    return tuple(_value(item) for item in value) if isinstance(value, list) else value


def _recolored(value: Any, swap: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _recolored(item, swap) for key, item in value.items()}
    if isinstance(value, list):
        return [_recolored(item, swap) for item in value]
    return swap.get(value, value) if isinstance(value, str) else value
