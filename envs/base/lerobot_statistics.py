"""Statistics of a LeRobot data set: what policies normalize by, of each episode and of all together."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_FRAMES = 16  # of an episode, from which the statistics of its images are taken
_QUANTILES = (0.01, 0.10, 0.50, 0.90, 0.99)


def statistics(values: np.ndarray, axis: int | tuple[int, ...] = 0) -> dict[str, Any]:
    """Of a feature: what LeRobot normalizes by."""
    values = values.astype(np.float64).reshape(len(values), -1) if axis == 0 else values.astype(np.float64)
    found = {"min": values.min(axis), "max": values.max(axis), "mean": values.mean(axis), "std": values.std(axis)}
    found |= {f"q{round(q * 100):02d}": np.quantile(values, q, axis) for q in _QUANTILES}
    return {name: array.tolist() for name, array in found.items()} | {"count": [len(values)]}


def image_statistics(images: np.ndarray) -> dict[str, Any]:
    """Per color channel, [3, 1, 1], of values between 0 and 1."""
    chosen = images[np.linspace(0, len(images) - 1, min(len(images), _FRAMES)).astype(int)]
    found = statistics(chosen / 255.0, axis=(0, 1, 2))
    return {name: value if name == "count" else [[[x]] for x in value] for name, value in found.items()}


def merged_statistics(root: Path, features: Mapping[str, Any]) -> dict[str, Any]:
    """Of all episodes: exact but for quantiles, which are weighted means of the episodes', as in LeRobot."""
    import pyarrow.parquet as pq

    files = sorted((root / "meta/episodes").rglob("*.parquet"))
    names = [name for name in pq.read_schema(files[0]).names if name.startswith("stats/")]
    rows = [row for file in files for row in pq.read_table(file, columns=names).to_pylist()]
    merged = {}
    for key in features:
        if f"stats/{key}/count" not in names:
            continue
        of = {name: np.array([row[f"stats/{key}/{name}"] for row in rows]) for name in _names_of(key, names)}
        count = of.pop("count").reshape(len(rows), *[1] * (of["mean"].ndim - 1))
        weights = count / count.sum()
        mean = (weights * of["mean"]).sum(0)
        found = {name: (weights * values).sum(0) for name, values in of.items() if name.startswith("q")}
        found |= {"min": of["min"].min(0), "max": of["max"].max(0), "mean": mean}
        found["std"] = np.sqrt((weights * (of["std"] ** 2 + (of["mean"] - mean) ** 2)).sum(0))
        merged[key] = {name: values.tolist() for name, values in found.items()} | {"count": [int(count.sum())]}
    return merged


def _names_of(key: str, names: Iterable[str]) -> list[str]:
    return [name.rpartition("/")[2] for name in names if name.startswith(f"stats/{key}/")]
