"""Pictures of runs."""

from typing import Any

from vla_rl.commands.run_table import run_table
from vla_rl.core.errors import UserError
from vla_rl.observability.plots import draw_comparison, draw_curves, read_metrics, recorded_effort, with_totals


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
    if len(runs) == 1:
        ((name, metrics),) = runs.items()
        draw_curves(metrics, args.output, name, over)
    else:
        draw_comparison(runs, args.output, over)
    print(args.output)
    return 0
