"""The outcome of an evaluation: success rate, confidence interval, and a record per episode."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec, EpisodeResult
from vla_rl.observability.embedded import Shown
from vla_rl.observability.films import film_seconds, write_film
from vla_rl.observability.verdicts import verdict

_Z95 = 1.959964  # two-sided 95 % quantile of the normal distribution


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """95 % confidence interval of a success rate (Wilson, 1927); accurate near 0 and 1 and for few trials, too."""
    if trials == 0:
        return 0.0, 1.0
    z2 = _Z95**2
    rate = successes / trials
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z95 / (1 + z2 / trials) * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def success_interval(successes: int, starts: Sequence[Hashable]) -> tuple[float, float]:
    """95 % confidence interval of a success rate over episodes with these starts.

    Episodes that start alike say nearly the same (of greedy actions: just the same), so each start counts as one trial.
    """
    trials = len(set(starts))
    return wilson_interval(successes * trials / max(1, len(starts)), trials)


def start_of(task: int, init_state: int | None, seed: int) -> Hashable:
    """What an episode starts from: an initial state, or what the simulator draws from a seed."""
    return task, seed if init_state is None else (init_state,)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcome of one evaluation. Rates leave out episodes that were set aside.

    Attributes:
        spec: of the simulator.
        greedy: whether the most likely actions were taken.
        results: of the episodes, in the order in which they ended.
        replays: some of them, played again to be filmed, failures first; they count nothing.
    """

    spec: EnvSpec
    greedy: bool
    results: tuple[EpisodeResult, ...]
    replays: tuple[EpisodeResult, ...] = ()

    def __repr__(self) -> str:
        return f"<Evaluation on {self.spec.name}: {self.text()}>"

    @property
    def counted(self) -> tuple[EpisodeResult, ...]:
        """The episodes that were played to their ends."""
        return tuple(r for r in self.results if not r.set_aside)

    @property
    def set_aside(self) -> int:
        """Episodes whose simulator died each time."""
        return len(self.results) - len(self.counted)

    @property
    def successes(self) -> int:
        return sum(r.success for r in self.counted)

    @property
    def success(self) -> float:
        return self.successes / max(1, len(self.counted))

    @property
    def interval(self) -> tuple[float, float]:
        return success_interval(self.successes, self.starts)

    @property
    def starts(self) -> list[Hashable]:
        """Of the counted episodes."""
        return [start_of(r.episode.task, r.episode.init_state, r.episode.seed) for r in self.counted]

    @property
    def filmed(self) -> tuple[EpisodeResult, ...]:
        """The episodes that have frames, in the order of a film."""
        return self.replays or tuple(r for r in sorted(self.results, key=lambda r: r.episode.id) if r.frames)

    @property
    def frames(self) -> list[tuple]:
        """Of each filmed episode, uint8 [H, W, 3] each, without captions."""
        return [r.frames for r in self.filmed]

    def film(self, path: str | Path) -> Shown:
        """Write the filmed episodes to an mp4 file; a notebook shows it. Raises UserError if there are none, and as
        ``write_film``."""
        if not self.filmed:
            raise UserError(
                "no episode of the evaluation has frames: evaluate with record=3 or failures=3; if you have, no "
                "episode that was played again ended alike, and record=3 plays none again"
            )
        write_film(Path(path), self.filmed, self.spec)
        told = "; ".join(f"{row['instruction']}: {row['verdict']}" for row in self._in_film())
        return Shown(Path(path), told)

    def _in_film(self) -> list[dict[str, Any]]:
        """JSON-able: what a film shows, and from which second on."""
        rows, start = [], 0.0
        for r in self.filmed:
            about = {"task": r.episode.task, "instruction": self.spec.instructions[r.episode.task]}
            about |= {"init_state": r.episode.init_state, "success": r.success, "verdict": verdict(r)}
            rows.append(about | {"steps": r.steps, "from_s": round(start, 2)})
            start += film_seconds(r, self.spec)
        return rows

    def text(self) -> str:
        low, high = self.interval
        kind = "greedy" if self.greedy else "sampled"
        aside = f"; {self.set_aside} set aside: their simulators died each time" if self.set_aside else ""
        different = len(set(self.starts))
        repeated = f" from {different} different starts" if different < len(self.counted) else ""
        counts = f"{self.successes}/{len(self.counted)}{repeated}, 95% {low:.1%} to {high:.1%}"
        return f"{kind} success {self.success:.1%} ({counts}{aside})"

    def record(self) -> dict[str, Any]:
        """JSON-able: totals, confidence interval, results per task and per episode."""
        low, high = self.interval
        versions = {v for r in self.counted for v in (r.oldest_policy_version, r.newest_policy_version)}
        return {
            "simulator": self.spec.name,
            "engine": self.spec.engine,
            "assets": self.spec.assets,
            "actions": "greedy" if self.greedy else "sampled",
            "episodes": len(self.counted),
            "set_aside": self.set_aside,
            "successes": self.successes,
            "success": self.success,
            "success_low95": low,
            "success_high95": high,
            "mean_steps": sum(r.steps for r in self.counted) / max(1, len(self.counted)),
            "policy_versions": sorted(versions),
            "tasks": self.per_task(),
            "left_out": self.spec.left_out,
            "filmed": self._in_film(),
            "runs": [
                {
                    "task": r.episode.task,
                    "init_state": r.episode.init_state,
                    "success": r.success,
                    "steps": r.steps,
                }
                for r in sorted(self.counted, key=lambda r: r.episode.id)
            ],
        }

    def per_task(self) -> list[dict[str, Any]]:
        """JSON-able: success rate and confidence interval of each task that was played."""
        rows = []
        for task, instruction in enumerate(self.spec.instructions):
            own = [r.success for r in self.counted if r.episode.task == task]
            if own:
                starts = [start for start, r in zip(self.starts, self.counted, strict=True) if r.episode.task == task]
                low, high = success_interval(sum(own), starts)
                counts = {"episodes": len(own), "successes": sum(own)}
                rates = {"success": sum(own) / len(own), "success_low95": low, "success_high95": high}
                rows.append({"task": task, "instruction": instruction} | counts | rates)
        return rows

    def table(self) -> Table:
        """What ``per_task`` says, for the terminal."""
        table = Table(title=f"{self.spec.name}, {'greedy' if self.greedy else 'sampled'} actions")
        table.add_column("task")
        for column in ("successes", "success", "95 %"):
            table.add_column(column, justify="right")
        for row in self.per_task():
            interval = f"{row['success_low95']:.0%} to {row['success_high95']:.0%}"
            played = f"{row['successes']} of {row['episodes']}"
            table.add_row(row["instruction"], played, f"{row['success']:.0%}", interval)
        return table
