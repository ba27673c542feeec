"""`vla-rl benchmark trace CONFIG`: what ``log.trace`` costs.

The same short run with and without it, in turns, block by block and in changing order, as in `vla-rl benchmark
regress`. The ratio of a block is with over without; above 1, tracing costs something.
"""

from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.table import Table

from vla_rl.commands.benchmark.regress import LEAST_BLOCKS, Comparison
from vla_rl.commands.metadata import machine_record
from vla_rl.commands.short_run import short_run
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.files import write_json
from vla_rl.observability.console import make_console
from vla_rl.observability.plots import read_metrics
from vla_rl.placement.checks import load_checked_config

_WARMUP = 2  # iterations until queues are filled
_FIGURES = {"processor time": "time/iteration_cpu_s", "time": "time/iteration_s"}  # for a trained chunk


def trace_overhead_command(args: Any) -> int:
    """Measure, and print the ratios."""
    if args.blocks < LEAST_BLOCKS:
        raise UserError(f"--blocks {args.blocks}: the interval of a median needs at least {LEAST_BLOCKS}")
    config = load_checked_config(args.config, args.overrides)
    compared = {name: Comparison(name, [], []) for name in _FIGURES}
    for block in range(args.blocks):
        for traced in (True, False) if block % 2 else (False, True):
            for name, value in _measure(config.with_values({"log.trace": traced}), args.iterations).items():
                (compared[name].new if traced else compared[name].old).append(value)
    make_console().print(_table(compared))
    if args.json:
        figures = [asdict(one) | {"interval": one.interval()} for one in compared.values()]
        write_json(args.json, {"machine": machine_record(), "figures": figures})
    return 0


def _measure(config: RunConfig, iterations: int) -> dict[str, float]:
    """Milliseconds for a trained chunk."""
    with short_run(config, _WARMUP + iterations) as run:
        measured = [m for m in read_metrics(run) if m["iteration"] > _WARMUP]
    chunks = sum(m["rollout/chunks"] for m in measured)
    return {name: 1e3 * sum(m[key] for m in measured) / chunks for name, key in _FIGURES.items()}


def _table(compared: Mapping[str, Comparison]) -> Table:
    table = Table(title="log.trace: milliseconds for a trained chunk")
    for name in ("", "without", "with", "ratio", "95 % interval"):
        table.add_column(name, justify="right" if name else "left")
    for name, one in compared.items():
        low, high = one.interval()
        values = (f"{median(one.old):.2f}", f"{median(one.new):.2f}", f"{median(one.ratios):.3f}")
        table.add_row(name, *values, f"{low:.3f} to {high:.3f}")
    return table
