"""What a caller of ``vla_rl.train`` is told while the run goes on, and what it gets at the end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run has left.

    Attributes:
        run: its folder.
        metrics: one record for each iteration, 0 being the evaluation before training; names as in docs/metrics.md.
        checkpoint: the newest policy checkpoint, a folder.
        best_checkpoint: the one with the highest greedy success; None without evaluations, or with train.keep_best off.
        iterations: updates done, those before a resume included.
    """

    run: Path
    metrics: list[dict[str, float]] = field(repr=False)
    checkpoint: Path
    best_checkpoint: Path | None
    iterations: int


class Callback:
    """Derive, and override what you want to be told. An error in a method ends the run with that error."""

    def on_start(self, run: Path) -> None:
        """The run's folder exists, its processes are about to start."""

    def on_iteration(self, iteration: int, metrics: Mapping[str, float]) -> bool | None:
        """An iteration has been logged. True: stop the run now, with a checkpoint."""

    def on_checkpoint(self, folder: Path) -> None:
        """A checkpoint is complete; its policy is in ``folder / "policy"``."""

    def on_end(self, result: TrainResult) -> None:
        """The run is over."""
