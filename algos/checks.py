"""Checks of super-batches and micro-batches before training; errors name the row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from algos.targets import RowTargets
from vla_rl.core.errors import NotFiniteError
from vla_rl.core.records import Array, SuperBatch

if TYPE_CHECKING:
    from torch import Tensor


def check_given(needed: bool, key: str, **arrays: Array | None) -> None:
    """Raises ValueError if the results of a forward pass are given but not needed, or needed but not given.

    ``key`` is the setting that decides.
    """
    for name, array in arrays.items():
        if (array is not None) != needed:
            raise ValueError(
                f"{name} {'were not given' if array is None else 'were given'}, and algo.{key} "
                f"{'needs' if needed else 'does not use'} them: see needs_recompute and needs_reference"
            )


def check_batch(batch: SuperBatch, **logprobs: Array | None) -> None:
    """Raises ValueError if a super-batch contradicts itself, or if any ``logprobs`` [M, K, A] do not fit it."""
    chunks, size = batch.rewards.shape
    if np.any((batch.num_steps < 1) | (batch.num_steps > size)):
        raise ValueError(f"num_steps lie in {batch.num_steps.min()}..{batch.num_steps.max()}: must be 1..{size}")
    both = np.flatnonzero(batch.terminated == batch.truncated)
    if len(both):
        raise ValueError(
            f"episode {batch.episode_id[both[0]]} has terminated={batch.terminated[both[0]]} and "
            f"truncated={batch.truncated[both[0]]}: a finished episode is exactly one of the two"
        )
    for name, array in logprobs.items():
        if array is None:
            continue
        if array.shape != batch.logprobs.shape or array.shape[:2] != batch.rewards.shape:
            shapes = f"the recorded ones {batch.logprobs.shape}, rewards {batch.rewards.shape}"
            raise ValueError(f"{name} log-probabilities have shape {array.shape}, {shapes}")
        bad = np.flatnonzero((~np.isfinite(array) & batch.step_mask[:, :, None]).any(axis=(1, 2)))
        if len(bad):
            raise NotFiniteError(
                f"{name} log-probabilities of {len(bad)} of {chunks} chunks are not finite, first in row {bad[0]}: "
                "the policy that computed them has diverged, or gave an executed token no probability"
            )


def check_rows(logprobs: Tensor, entropy: Tensor, values: Tensor, rows: RowTargets) -> None:
    """Raises ValueError if outputs and targets of a micro-batch differ in shape: they would broadcast silently."""
    found = {"logprobs": logprobs, "entropy": entropy, "proximal_logprobs": rows.proximal_logprobs}
    per_chunk = {"values": values, "advantages": rows.advantages, "num_steps": rows.num_steps}
    shapes = {name: tuple(x.shape) for name, x in (found | per_chunk).items()}
    n, size, dim = rows.behaviour_logprobs.shape
    expected = dict.fromkeys(found, (n, size, dim)) | dict.fromkeys(per_chunk, (n,))
    if shapes != expected:
        wrong = ", ".join(f"{k} {v} instead of {expected[k]}" for k, v in shapes.items() if v != expected[k])
        raise ValueError(f"shapes of one micro-batch disagree: {wrong}")
