"""`vla-rl benchmark regress COMMIT`: is this source tree slower than it was at a commit?

Both are measured in turns, block by block and in changing order, so that whatever disturbs the machine meets both. The
ratio of a block is new over old; above 1 is slower. A figure has become slower if the 95 % interval of the median ratio
lies above 1: the margin follows from the blocks' own spread.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from vla_rl.commands.benchmark import figures
from vla_rl.commands.metadata import git_commit, machine_record, package_versions
from vla_rl.core.errors import UserError
from vla_rl.core.files import write_json
from vla_rl.core.machine import CODE
from vla_rl.observability.console import ProgressDisplay, make_console

_RESAMPLES = 10_000
_LEAST_BLOCKS = 5  # with fewer, no interval excludes much


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure's values by block; ``figures`` has the units."""

    figure: str
    old: list[float]
    new: list[float]

    @property
    def ratios(self) -> np.ndarray:
        return np.array(self.new) / np.array(self.old)

    def interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the median ratio."""
        drawn = np.random.default_rng(0).choice(self.ratios, (_RESAMPLES, len(self.ratios)))
        low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
        return float(low), float(high)

    @property
    def is_slower(self) -> bool:
        return self.interval()[0] > 1


def regress_command(args: Any) -> int:
    """Measure, and print the ratios; 1 if a figure has become slower."""
    if args.blocks < _LEAST_BLOCKS:
        raise UserError(f"--blocks {args.blocks}: the interval of a median needs at least {_LEAST_BLOCKS}")
    names = args.figures or list(figures.FIGURES)
    if unknown := set(names) - set(figures.FIGURES):
        raise UserError(f"--figures {min(unknown)}: there are {', '.join(figures.FIGURES)}")
    console = make_console()
    with _tree_of(args.commit) as old, ProgressDisplay(console, args.commit, args.blocks * len(names)) as progress:
        compared = list(_compare(old, names, args.blocks, progress))
    console.print(_table(compared, args.commit))
    if args.json:
        about = {"machine": machine_record(), "packages": package_versions(), "commits": [args.commit, git_commit()]}
        write_json(args.json, about | {"figures": [asdict(one) | {"interval": one.interval()} for one in compared]})
    return int(any(one.is_slower for one in compared))


def _compare(old: Path, names: Sequence[str], blocks: int, progress: ProgressDisplay) -> Iterator[Comparison]:
    done = 0
    for name in names:
        one = Comparison(name, [], [])
        for block in range(blocks):
            sides = [(old, one.old), (CODE, one.new)]
            for tree, values in sides if block % 2 else reversed(sides):
                values.append(_measure(tree, name))
            done += 1
            progress.update(done, f"{name}: {median(one.ratios):.3f} times as long")
        yield one


def _measure(tree: Path, figure: str) -> float:
    threads = {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "0"}
    result = subprocess.run(
        [sys.executable, figures.__file__, figure],
        env=os.environ | threads | {"PYTHONPATH": str(tree)},
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise UserError(f"{figure} cannot be measured in {tree}:\n{result.stderr[-2000:]}")
    return float(result.stdout.split()[-1])


@contextmanager
def _tree_of(commit: str) -> Iterator[Path]:
    """The sources at a commit, in a temporary folder. Raises UserError if there is no such commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        try:
            _git("worktree", "add", "--detach", str(tree), commit)
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or str(error)
            raise UserError(f"{commit}: not a commit of {CODE} ({why.strip().splitlines()[-1]})") from None
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(CODE), *arguments], capture_output=True, text=True, check=True)


def _table(compared: Sequence[Comparison], commit: str) -> Table:
    table = Table(title=f"this tree against {commit}; ratios below 1 are faster")
    for name in ("figure", "before", "now", "ratio", "95 % interval", ""):
        table.add_column(name, justify="left" if name in ("figure", "") else "right")
    for one in compared:
        low, high = one.interval()
        verdict = "slower" if one.is_slower else "faster" if high < 1 else "no difference seen"
        values = (f"{median(one.old):.2f}", f"{median(one.new):.2f}", f"{median(one.ratios):.3f}")
        table.add_row(one.figure, *values, f"{low:.3f} to {high:.3f}", verdict)
    return table
