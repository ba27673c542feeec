"""Mean and deviation of a data set, which normalize actions and proprioception."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

_CONSTANT = 1e-3  # a dimension with a smaller deviation counts as constant


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one quantity with D dimensions. A negative deviation turns an axis around."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, samples: np.ndarray) -> Self:
        """Of float [..., D] samples."""
        rows = samples.reshape(-1, samples.shape[-1]).astype(np.float64)
        std = rows.std(axis=0)
        return cls(tuple(rows.mean(axis=0).tolist()), tuple(np.where(std < _CONSTANT, 1.0, std).tolist()))

    @classmethod
    def identity(cls, dims: int) -> Self:
        """Leaves everything as it is."""
        return cls((0.0,) * dims, (1.0,) * dims)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Raises ValueError unless there are as many deviations as means, none of them 0."""
        mean, std = tuple(map(float, values["mean"])), tuple(map(float, values["std"]))
        if len(mean) != len(std) or not mean or 0 in std or not np.isfinite([*mean, *std]).all():
            raise ValueError(
                f"statistics need as many deviations as means, none of them 0, found mean={mean}, std={std}"
            )
        return cls(mean, std)

    def to_dict(self) -> dict[str, list[float]]:
        return {"mean": list(self.mean), "std": list(self.std)}

    def normalize(self, values: np.ndarray) -> np.ndarray:
        """float32 [..., D]."""
        return ((values - np.array(self.mean)) / np.array(self.std)).astype(np.float32)

    def denormalize(self, values: np.ndarray) -> np.ndarray:
        """float32 [..., D]."""
        return (values * np.array(self.std) + np.array(self.mean)).astype(np.float32)
