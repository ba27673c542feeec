"""Mean and deviation of a data set, which normalize actions and proprioception."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

_CONSTANT = 1e-3  # a dimension of a data set with a smaller deviation counts as constant
_NEGLIGIBLE = 1e-6  # published deviations of constants are 1e-8: what is added against a division by 0


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one quantity with D dimensions. A negative deviation turns an axis around; 0 is that of a constant, which a
    policy's noise cannot change."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, samples: np.ndarray) -> Self:
        """Of float [..., D] samples."""
        rows = samples.reshape(-1, samples.shape[-1]).astype(np.float64)
        std = rows.std(axis=0)
        return cls(tuple(rows.mean(axis=0).tolist()), tuple(np.where(std < _CONSTANT, 0.0, std).tolist()))

    @classmethod
    def between(cls, low: ArrayLike, high: ArrayLike, scaled: Sequence[bool] | None = None) -> Self:
        """Maps -1 and 1 to the limits, each [D]; leaves what is not ``scaled`` as it is."""
        middle, half = np.add(low, high) / 2, np.subtract(high, low) / 2
        which = np.ones(len(middle), bool) if scaled is None else np.asarray(scaled)
        return cls(tuple(np.where(which, middle, 0.0).tolist()), tuple(np.where(which, half, 1.0).tolist()))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Raises ValueError unless there are as many deviations as means."""
        mean, std = tuple(map(float, values["mean"])), tuple(map(float, values["std"]))
        if len(mean) != len(std) or not mean or not np.isfinite([*mean, *std]).all():
            raise ValueError(f"statistics need as many deviations as means, found mean={mean}, std={std}")
        return cls(mean, std)

    def to_dict(self) -> dict[str, list[float]]:
        return {"mean": list(self.mean), "std": list(self.std)}

    @property
    def varies(self) -> np.ndarray:
        """bool [D]: which dimensions are not constant."""
        return np.abs(self.std) > _NEGLIGIBLE

    @property
    def scale(self) -> tuple[float, ...]:
        """What a distance from the mean is divided by; 1 for a constant."""
        return tuple(std or 1.0 for std in self.std)

    def normalize(self, values: np.ndarray) -> np.ndarray:
        """float32 [..., D]."""
        return ((values - np.array(self.mean)) / np.array(self.scale)).astype(np.float32)

    def denormalize(self, values: np.ndarray) -> np.ndarray:
        """float32 [..., D]."""
        return (values * np.array(self.std) + np.array(self.mean)).astype(np.float32)
