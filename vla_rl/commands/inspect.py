"""`vla-rl demos inspect DATA CONFIG`: what demonstrations hold, how it is mapped, and what looks wrong with it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.files import write_json
from vla_rl.observability.console import make_console
from vla_rl.observability.plots import figure
from vla_rl.placement.checks import load_checked_config

if TYPE_CHECKING:
    from envs.base.demonstration_records import Demonstrations
    from envs.base.demonstration_replay import Simulated
    from envs.base.demonstration_report import Finding
    from vla_rl.core.records import EnvSpec

_SHOWN = 3  # frames of the data, and as many of the simulator
_COLUMNS = 2 * _SHOWN
_WIDTH = 150  # characters of the picture's title


def demos_command(args: Any) -> int:
    """Read, compare, print and draw. The exit status is 1 if something contradicts the simulator."""
    from envs import env_spec
    from envs.base.demonstrations import demonstrations_for

    config, console = load_checked_config(args.config, args.overrides), make_console()
    spec = env_spec(config.env)
    demos = demonstrations_for(spec, [args.data], config.demos)
    simulated, found = compared(config, demos)
    console.print(_table(demos, spec))
    for note in (*demos.notes, f"{demos.num_demonstrations} demonstrations, {len(demos.actions)} steps"):
        console.print(note, highlight=False)
    for finding in found:
        console.print(f"{'wrong' if finding.certain else 'doubtful'}: {finding.text}", highlight=False)
    if not found:
        console.print("nothing looks wrong")
    if args.output is not None:
        _draw(args.output, demos, spec, simulated, found)
        console.print(f"picture: {args.output}", highlight=False)
    if args.json:
        write_json(args.json, {"findings": [finding._asdict() for finding in found], "notes": demos.notes})
    return int(any(finding.certain for finding in found))


def compared(config: RunConfig, demos: Demonstrations) -> tuple[Simulated, list[Finding]]:
    """Demonstrations next to the simulator's own first frames and actions."""
    from envs import make_env
    from envs.base.demonstration_replay import simulate
    from envs.base.demonstration_report import findings

    env = make_env(config.env, 1)
    try:
        simulated = simulate(env, demos)
        return simulated, findings(demos, env.spec, simulated)
    finally:
        env.close()


def require_agreement(config: RunConfig, demos: Demonstrations, console: Console) -> None:
    """Print what looks doubtful. Raises UserError if demonstrations contradict the simulator."""
    _, found = compared(config, demos)
    for finding in found:
        console.print(f"{'wrong' if finding.certain else 'doubtful'}: {finding.text}", highlight=False)
    if any(finding.certain for finding in found):
        raise UserError(
            f"the demonstrations contradict the simulator: {found[0].text}. `vla-rl demos inspect` shows it; "
            "demos.check=false takes them as they are"
        )


def _table(demos: Demonstrations, spec: EnvSpec) -> Table:
    table = Table(title="numbers of the demonstrations, in the simulator's units")
    for name in ("number", "least", "1 %", "median", "99 %", "most", "limits", "in data sets"):
        table.add_column(name, justify="left" if name == "number" else "right")
    data = spec.actions.data_grippers()
    limits = [f"{dim.low:g} to {dim.high:g}" for dim in spec.actions.dims]
    for i, name in enumerate(spec.actions.names):
        meant = f"{data[i].open:g} open, {data[i].closed:g} closed" if i in data else "the same"
        table.add_row(f"action {name}", *_quantiles(demos.actions[:, i]), limits[i], meant)
    for i in range(demos.proprio.shape[1]):
        table.add_row(f"state {i}", *_quantiles(demos.proprio[:, i]), "", "the same")
    return table


def _quantiles(values: np.ndarray) -> list[str]:
    return [f"{q:.3g}" for q in np.quantile(values, (0, 0.01, 0.5, 0.99, 1))]


def _draw(path: Path, demos: Demonstrations, spec: EnvSpec, simulated: Simulated, found: Sequence[Finding]) -> None:
    """First frames of the data and of the simulator, view by view, and a histogram of each number."""
    views, numbers = len(spec.views), spec.action_dim + demos.proprio.shape[1]
    rows = views + -(-numbers // _COLUMNS)
    title = "\n".join(textwrap.fill(finding.text, _WIDTH) for finding in found) or "nothing looks wrong"
    first = demos.images[demos.offsets[:-1][:_SHOWN]]
    with figure(path, title, rows, _COLUMNS, (2.3 * _COLUMNS, 2.3 * rows + 1.0), squeeze=False) as axes:
        for axis in axes.ravel():
            axis.axis("off")
        for view, name in enumerate(spec.views):
            for column, images in ((0, first), (_SHOWN, simulated.images[:_SHOWN])):
                for number, image in enumerate(images[:, view]):
                    axes[view, column + number].imshow(image)
                axes[view, column].set_title(f"{'simulator' if column else 'data'}: {name}", fontsize=9, loc="left")
        values = [*demos.actions.T, *demos.proprio.T]
        names = [*spec.actions.names, *(f"state {i}" for i in range(demos.proprio.shape[1]))]
        for number, (axis, name) in enumerate(zip(axes[views:].ravel(), names, strict=False)):
            axis.axis("on")
            axis.hist(values[number], bins=40, color="tab:blue" if number < spec.action_dim else "tab:gray")
            if number < spec.action_dim:
                for limit in (spec.actions.low[number], spec.actions.high[number]):
                    axis.axvline(limit, color="tab:red", linewidth=1)
            axis.set_title(name, fontsize=9)
            axis.set_yticks([])
