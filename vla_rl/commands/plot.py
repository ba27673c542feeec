"""Pictures of runs."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vla_rl.commands.run_table import run_table
from vla_rl.core.errors import UserError
from vla_rl.observability.plots import (
    Effort,
    Metrics,
    draw_comparison,
    draw_curves,
    first_reached,
    of_seeds,
    read_metrics,
    recorded_effort,
    series,
    with_totals,
)


def plot_command(args: Any) -> int:
    """`vla-rl plot`: the curves of one run, or several in one picture; or runs as a table, or one as an animation."""
    if args.animate is not None:
        from vla_rl.commands.animate import animate_command

        return animate_command(args)
    runs = {path.stem if path.is_file() else path.name: with_totals(read_metrics(path)) for path in args.runs}
    if len(runs) < len(args.runs):
        raise UserError(f"two of {', '.join(map(str, args.runs))} have the same name: rename one, names are the labels")
    if args.table is not None:
        print(run_table(runs, args.table))
        return 0
    over = recorded_effort(args.x, runs)
    if args.reach is not None:
        print("\n".join(reached(runs, args.reach, over)))
        return 0
    if len(runs) == 1:
        ((name, metrics),) = runs.items()
        draw_curves(metrics, args.output, name, over)
    else:
        draw_comparison(runs, args.output, over)
    print(args.output)
    return 0


def reached(runs: Mapping[str, Metrics], at: float, over: Effort) -> Iterator[str]:
    """What it took until greedy evaluations, joined by straight lines, reached a success rate.

    Of runs that differ by their seeds alone: the line through the means of their first, second, ... evaluations, and
    each one's own.
    Raises UserError if a run was never evaluated.
    """
    for name, seeds in of_seeds(runs).items():
        curves = [series(metrics, "eval/greedy_success", over.key) for metrics in seeds]
        count = min(len(x) for x, _ in curves)
        if not count:
            raise UserError(f"--reach: {name} has no greedy evaluation")
        x, y = np.mean([(x[:count], y[:count]) for x, y in curves], axis=0)
        each = ", ".join(_effort(first_reached(*curve, at), over) for curve in curves)
        alone = len(seeds) == 1
        yield f"{name}: {_effort(first_reached(x, y, at), over)}{'' if alone else f' (seeds: {each})'}; {over.label}"


def _effort(found: float | None, over: Effort) -> str:
    return "never" if found is None else f"{found / over.unit:.3g}"
