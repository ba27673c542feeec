"""What a caller of ``vla_rl.train`` is told while the run goes on, and what it gets at the end."""

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vla_rl.core.errors import UserError
from vla_rl.observability.embedded import Shown
from vla_rl.observability.plots import EFFORTS, draw_curves, read_metrics, with_totals


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run has left. A notebook shows its success, curves and newest film.

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

    def __repr__(self) -> str:
        said = [f"{self.iterations} updates", *(f"{kind} success {rates}" for kind, rates in self._success())]
        return f"<TrainResult {self.run}: {', '.join(said)}>"

    def plot(self, x: str = "minutes", output: str | Path | None = None) -> Shown:
        """Draw the run's curves over ``x``: "minutes", "steps" or "episodes" (``plots.EFFORTS``).

        ``output``: the picture; None: ``curves.png`` in the run's folder, or ``curves_X.png``. Raises UserError.
        """
        metrics = with_totals(read_metrics(self.run))
        recorded = [name for name, over in EFFORTS.items() if any(over.key in m for m in metrics)]
        if x not in recorded:
            raise UserError(f"x={x!r}: the curves of {self.run} can be drawn over {', '.join(recorded)}")
        path = Path(output or self.run / ("curves.png" if x == "minutes" else f"curves_{x}.png"))
        draw_curves(metrics, path, self.run.name, EFFORTS[x])
        return Shown(path, f"Curves of {self!r}")

    def film(self, iteration: int | None = None) -> Shown:
        """The film of an evaluation: of the newest that has one, or of the one after ``iteration`` updates.

        Raises UserError if there is none.
        """
        films = {int(path.name.partition("-")[0]): path for path in sorted(self.run.glob("evaluations/[0-9]*-*.mp4"))}
        wanted = max(films, default=None) if iteration is None else iteration
        if wanted is None or wanted not in films:
            has = "none of its evaluations was filmed; train with log.video=true and train.eval_episodes above 0"
            if films:
                has = f"it has those of iterations {', '.join(map(str, films))}"
            raise UserError(f"{self.run}: no film{'' if iteration is None else f' of iteration {iteration}'}; {has}")
        return Shown(films[wanted], f"Episodes of the evaluation after {wanted} updates")

    def _success(self) -> Iterator[tuple[str, str]]:
        """Kind and rates of the evaluations, the first and the last, such as ``22% to 61%``."""
        for kind in ("greedy", "sampled"):
            rates = [m[f"eval/{kind}_success"] for m in self.metrics if f"eval/{kind}_success" in m]
            if rates:
                yield kind, " to ".join(f"{rate:.0%}" for rate in dict.fromkeys((rates[0], rates[-1])))

    def _repr_html_(self) -> str:
        rows = [("run", str(self.run)), ("updates", str(self.iterations))]
        rows += [(f"{kind} success", rates) for kind, rates in self._success()]
        if minutes := [m["time/seconds"] / 60 for m in self.metrics if "time/seconds" in m]:
            rows.append(("minutes", f"{minutes[-1]:.1f}"))
        cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in rows)
        curves = Shown(self.run / "curves.png", f"Curves of {self!r}")
        shown = [curves] if curves.path.is_file() else []
        if any(self.run.glob("evaluations/*.mp4")):
            shown.append(self.film())
        return f"<table>{cells}</table>{''.join(f'<div>{part._repr_html_()}</div>' for part in shown)}"


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
