"""Updates that were not finite: evidence for inspection, and the end of a run in which several come in a row.

runs/NAME/not_finite/000012.npz     the super-batch
runs/NAME/not_finite/000012.json    metrics of its update, and which arrays hold numbers that are not finite
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np

from vla_rl.commands.checkpoints import Checkpoints
from vla_rl.commands.loggers import guarded
from vla_rl.core.errors import RunError
from vla_rl.core.files import replacing, write_json
from vla_rl.core.records import SuperBatch

_KEPT = 3  # super-batches are large; the first ones tell most


class DivergenceGuard:
    """Watches the updates of a run."""

    def __init__(self, run: Path, limit: int, checkpoints: Checkpoints) -> None:
        """``limit``: updates in a row whose steps were skipped, in whole or in part, that end the run."""
        self._run, self._limit, self._checkpoints = run, limit, checkpoints
        self.in_a_row = 0

    def observe(self, metrics: Mapping[str, float], batch: SuperBatch) -> None:
        """Look at the update on a super-batch. Raises RunError at the limit."""
        if not metrics.get("learner/skipped_steps"):
            self.in_a_row = 0
            return
        self.in_a_row += 1
        wrong = _wrong_arrays(batch)
        with guarded("keeping the evidence"):
            self._dump(metrics, batch, wrong)
        if self.in_a_row < self._limit:
            return
        cause = ", ".join(f"{name} in row {row}" for name, row in wrong.items())
        raise RunError(
            f"{self._limit} updates in a row had gradients that are not finite, up to iteration "
            f"{batch.policy_version + 1} (learner.max_skipped_updates). None was applied. "
            + (f"The data itself is not finite: {cause}. " if cause else "The data is finite: training has diverged. ")
            + f"Evidence: {self._folder}. {self._remedy()}"
        )

    def _remedy(self) -> str:
        complete, how = self._checkpoints.complete(), "with a lower learner.lr or learner.max_grad_norm"
        if not complete:
            return f"There is no checkpoint to continue from: start a new run {how}"
        iterations = [int(path.name) for path in complete]
        return (
            f"Continue from the last good checkpoint {how}: vla-rl train --resume {self._run}@{iterations[-1]} "
            f"(there are: {', '.join(map(str, iterations))})"
        )

    @property
    def _folder(self) -> Path:
        return self._run / "not_finite"

    def _dump(self, metrics: Mapping[str, float], batch: SuperBatch, wrong: Mapping[str, int]) -> None:
        name = f"{batch.policy_version + 1:06d}"
        shown = {key: value if np.isfinite(value) else None for key, value in metrics.items()}
        write_json(self._folder / f"{name}.json", {"metrics": shown, "not_finite": wrong})
        if len(list(self._folder.glob("*.npz"))) < _KEPT:
            with replacing(self._folder / f"{name}.npz") as partial, partial.open("wb") as file:
                np.savez(file, **_arrays(batch))  # type: ignore[arg-type]


def _arrays(batch: SuperBatch) -> dict[str, np.ndarray]:
    arrays = {f.name: np.asarray(getattr(batch, f.name)) for f in fields(batch) if f.name != "record"}
    return arrays | {f"record.{name}": array for name, array in batch.record.items()}


def _wrong_arrays(batch: SuperBatch) -> dict[str, int]:
    """The first row with a number that is not finite, by the name of the array."""
    found = {}
    for name, array in _arrays(batch).items():
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            found[name] = int(np.argwhere(~np.isfinite(array))[0][0]) if array.ndim else 0
    return found
