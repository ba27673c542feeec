"""Converts physical actions to the 256 bins of the action vocabulary and back (OpenVLA, arXiv:2406.09246).

A token is a bin index b in 0..255 that ascends with the action: b = digitize(a, edges) - 1 with 256 edges from -1 to 1.
OpenVLA uses the vocabulary id v = vocab_size - digitize(a, edges), so b = vocab_size - 1 - v: the last id is bin 0.
There are only 255 intervals, so bins 254 and 255 decode to the same action; +1 itself encodes to 255.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from vla_rl.core.actions import ActionSpace
from vla_rl.policies.openvla_oft.architecture import NUM_BINS

EDGES = np.linspace(-1.0, 1.0, NUM_BINS)
CENTERS = (EDGES[:-1] + EDGES[1:]) / 2
_MIN_RANGE = 1e-6  # a dimension with a smaller range counts as constant


@dataclass(frozen=True, slots=True)
class Bounds:
    """1st and 99th percentile of each dimension of a data set; they map to -1 and 1 if ``mask`` is true."""

    q01: tuple[float, ...]
    q99: tuple[float, ...]
    mask: tuple[bool, ...]  # false: not normalized (``ActionSpace.scaled``)

    def __post_init__(self) -> None:
        if not len(self.q01) == len(self.q99) == len(self.mask) or not self.q01:
            lengths = len(self.q01), len(self.q99), len(self.mask)
            raise ValueError(f"bounds: q01, q99 and mask need one entry per dimension, found lengths {lengths}")
        if not np.isfinite([*self.q01, *self.q99]).all() or any(b < a for a, b in zip(self.q01, self.q99, strict=True)):
            raise ValueError(f"bounds: need finite q01 <= q99, found q01={self.q01}, q99={self.q99}")

    @property
    def dim(self) -> int:
        return len(self.q01)

    @classmethod
    def from_samples(cls, samples: np.ndarray, mask: Sequence[bool] | None = None) -> Self:
        """Percentiles of float [..., D] samples. By default every dimension is normalized."""
        if samples.size == 0:
            raise ValueError(f"statistics of no samples: found shape {samples.shape}")
        rows = samples.reshape(-1, samples.shape[-1]).astype(np.float64)
        low, high = np.quantile(rows, 0.01, axis=0), np.quantile(rows, 0.99, axis=0)
        keep = (True,) * rows.shape[1] if mask is None else tuple(bool(flag) for flag in mask)
        return cls(tuple(low.tolist()), tuple(high.tolist()), keep)

    def affine(self) -> tuple[list[float], list[float]]:
        """Scale and shift of 2 (x - q01) / (q99 - q01) - 1, before clipping; both 0 for a constant dimension."""
        scale, shift = [], []
        for low, high, scaled in zip(self.q01, self.q99, self.mask, strict=True):
            constant = high - low < _MIN_RANGE
            scale.append(1.0 if not scaled else 0.0 if constant else 2 / (high - low))
            shift.append(0.0 if not scaled or constant else -2 * low / (high - low) - 1)
        return scale, shift

    def normalize(self, values: np.ndarray) -> np.ndarray:
        """float64 [..., D], clipped to [-1, 1]."""
        scale, shift = self.affine()
        return np.clip(values * np.asarray(scale) + np.asarray(shift), -1, 1)

    def denormalize(self, values: np.ndarray) -> np.ndarray:
        """float32 [..., D]: 0.5 (a + 1) (q99 - q01) + q01 where the mask is true."""
        low, high = np.asarray(self.q01), np.asarray(self.q99)
        return np.where(self.mask, 0.5 * (values + 1) * (high - low) + low, values).astype(np.float32)

    def to_dict(self) -> dict[str, list[float] | list[bool]]:
        return {"q01": list(self.q01), "q99": list(self.q99), "mask": list(self.mask)}

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Restore ``to_dict``. Raises ValueError for wrong keys, types or lengths."""
        if not isinstance(values, Mapping) or not {"q01", "q99", "mask"} <= values.keys():
            raise ValueError(f"bounds: expected the keys q01, q99 and mask, found {values!r}")
        try:
            q01, q99 = tuple(map(float, values["q01"])), tuple(map(float, values["q99"]))
            return cls(q01, q99, tuple(bool(flag) for flag in values["mask"]))
        except TypeError as error:
            raise ValueError(f"bounds: q01, q99 and mask must be lists of numbers, found {values!r}") from error


@dataclass(frozen=True, slots=True)
class ActionCodec:
    """Encodes physical actions as bins and decodes bins to physical actions."""

    bounds: Bounds

    @property
    def action_dim(self) -> int:
        return self.bounds.dim

    @classmethod
    def of_space(cls, space: ActionSpace) -> Self:
        """Without data: the limits of the space."""
        return cls(Bounds(tuple(space.low.tolist()), tuple(space.high.tolist()), space.scaled))

    def of_actions(self, actions: np.ndarray) -> Self:
        """By the percentiles of demonstrated actions, float [..., A]; what is not normalized stays so."""
        return type(self)(Bounds.from_samples(actions, self.bounds.mask))

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Physical actions, float [..., A], to bins, uint8 [..., A]."""
        return (np.digitize(self.bounds.normalize(actions), EDGES) - 1).astype(np.uint8)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Bins, uint8 [..., A], to physical actions, float32 [..., A]: the bins' centres in the data set's units."""
        return self.bounds.denormalize(CENTERS[np.minimum(tokens, NUM_BINS - 2)])


def bins_to_ids(bins: np.ndarray, vocab_size: int) -> np.ndarray:
    """int64 vocabulary ids of bins; ``vocab_size`` is the unpadded one."""
    return vocab_size - 1 - bins.astype(np.int64)


def ids_to_bins(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """uint8 bins of action ids. Raises ValueError if an id is not an action."""
    bins = vocab_size - 1 - ids.astype(np.int64)
    if bins.size and (bins.min() < 0 or bins.max() >= NUM_BINS):
        raise ValueError(f"action ids lie in {vocab_size - NUM_BINS}..{vocab_size - 1}, found {ids.min()}..{ids.max()}")
    return bins.astype(np.uint8)
