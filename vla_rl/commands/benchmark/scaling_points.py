"""What `vla-rl benchmark scaling` found, and how it is shown."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rich.table import Table

from vla_rl.core.errors import UserError
from vla_rl.core.files import write_json
from vla_rl.observability.plots import figure
from vla_rl.placement.plan import Mode

Backend = Literal["real", "virtual", "simulated"]
REFERENCE = "synchronous reference"
MODES: Sequence[str] = (*get_args(Mode), "auto", REFERENCE)


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement. With a profile, times are the profile's: measured seconds divided by the time scale."""

    devices: int
    mode: str  # or REFERENCE
    layout: str
    backend: Backend
    batches_per_s: float  # with a profile, super-batches are counted in units of the mean size
    env_steps_per_s: float  # played; some of the reference's are after an episode's end
    chunks_per_s: float
    efficiency: float | None  # share of the bound
    simulated: float | None  # batches a second that the discrete-event simulation predicts
    limit: str | None  # the resource that bounds it
    machine: float | None  # share of this machine's cores in use; on virtual devices by the runtime alone
    time_scale: float | None = None  # seconds on virtual devices for one of the profile


def read_points(file: Path | None, about: Mapping[str, Any]) -> list[Point]:
    """The points that an earlier start of the same benchmark has written.

    Raises UserError where ``file`` holds anything else than points with the same ``about``.
    """
    if file is None or not file.exists():
        return []
    try:
        record = json.loads(file.read_text())
        points = [Point(**p) for p in record.pop("points")]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"--json {file}: exists and holds no points of this benchmark; name another file") from None
    others = [name for name in about if record.get(name) != about[name]]
    if others:
        raise UserError(
            f"--json {file}: its points belong to another {' and '.join(others)}; name another file to start again"
        )
    return points


def write_points(points: Sequence[Point], file: Path | None, about: Mapping[str, Any]) -> None:
    """Write all points to ``file``, if given. ``about``: what they were measured with; ``read_points`` checks it."""
    if file is not None:
        write_json(file, {**about, "points": [asdict(p) for p in points]})


def write_csv(points: Sequence[Point], file: Path) -> None:
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(Point.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(p) for p in points)


def line_of(p: Point) -> str:
    """One point as a line of text, printed as soon as it is measured."""
    parts = [f"{p.devices} device(s), {p.mode} ({p.layout}): {p.batches_per_s:.4g} batches/s"]
    if p.efficiency is not None:
        parts.append(f"{p.efficiency:.0%} of the bound ({p.limit})")
    if p.simulated is not None and p.backend != "simulated":
        parts.append(f"simulated {p.simulated:.4g}")
    if p.machine is not None:
        parts.append(f"{p.machine:.0%} of this machine's cores in use")
    if p.time_scale is not None:
        parts.append(f"time x {p.time_scale:g}")
    return ", ".join(parts)


def make_table(points: Sequence[Point], title: str) -> Table:
    """A row per device count and mode. ``simulated``: the simulation's error; ``gain``, ``allowed``: see ``gain_of``;
    ``cores``: share of this machine's cores in use; ``time``: the factor by which virtual devices stretch time."""
    rows = [_cells(p, points) for p in points]
    table = Table(title=title)
    for name in rows[0] if rows else ():
        table.add_column(name, justify="left" if name in ("mode", "layout", "limit") else "right")
    for row in rows:
        table.add_row(*row.values())
    return table


def _cells(p: Point, points: Sequence[Point]) -> dict[str, str]:
    def shown(text: str, value: float | None) -> str:
        return "-" if value is None else text.format(value)

    gain, allowed = gain_of(p, points)
    return {
        "devices": str(p.devices),
        "mode": p.mode,
        "layout": p.layout,
        "batches/s": f"{p.batches_per_s:.4g}",
        "steps/s": f"{p.env_steps_per_s:.4g}",
        "of bound": shown("{:.0%}", p.efficiency),
        "limit": p.limit or "-",
        "simulated": shown("{:+.0%}", None if p.simulated is None else p.simulated / p.batches_per_s - 1),
        "gain": shown("{:.2f}x", gain),
        "allowed": shown("{:.2f}x", allowed),
        "cores": shown("{:.0%}", p.machine),
        "time": shown("x {:g}", p.time_scale),
    }


def gain_of(point: Point, points: Sequence[Point]) -> tuple[float | None, float | None]:
    """The gain over the reference on as many devices, and the gain that the best bound of all modes allows there.

    None where a figure is unknown.
    """
    same_devices = [p for p in points if p.devices == point.devices]
    reference = next((p.batches_per_s for p in same_devices if p.mode == REFERENCE), None)
    if reference is None:
        return None, None
    bounds = [p.batches_per_s / p.efficiency for p in same_devices if p.mode != REFERENCE and p.efficiency]
    return point.batches_per_s / reference, max(bounds) / reference if bounds else None


def draw_scaling(points: Sequence[Point], path: Path, title: str) -> None:
    """Work done, gain over the reference and efficiency over device counts, a line for each mode."""
    with figure(path, title, 1, 3, (15, 4.6)) as (work, gain, efficiency):
        for number, mode in enumerate(MODES):
            mine, color = [p for p in points if p.mode == mode], f"C{number}"
            if not mine:
                continue
            line: dict[str, Any] = {"marker": "o", "color": color}
            if mode == "auto":  # lies on the mode that it chose
                line |= {"linestyle": "--", "fillstyle": "none", "markersize": 10}
            work.plot(*_by_devices(mine, lambda p: p.batches_per_s * p.devices), label=mode, **line)
            predicted = [p for p in mine if p.backend != "simulated"]
            work.plot(*_by_devices(predicted, lambda p: p.simulated and p.simulated * p.devices), "x", color=color)
            gain.plot(*_by_devices(mine, lambda p: gain_of(p, points)[0]), **line)
            efficiency.plot(*_by_devices(mine, lambda p: p.efficiency), **line)
        gain.plot(*_by_devices(points, lambda p: gain_of(p, points)[1]), "k:", label="allowed by the bounds")
        gain.legend(fontsize=8)
        work.legend(fontsize=8)
        kinds = list(dict.fromkeys(p.backend for p in points))
        by = f"{' and '.join(kinds)} (o), simulated (x)" if kinds != ["simulated"] else "simulated"
        work.set(title=f"batches/s x devices, {by}", yscale="log")
        gain.set(title="gain over the synchronous reference")
        efficiency.set(title="share of the bound", ylim=(0, 1.1))
        counts = sorted({p.devices for p in points})
        for axis in (work, gain, efficiency):
            axis.set(xlabel="devices (the super-batch grows with them)", xscale="log")
            axis.set_xticks(counts, [str(d) for d in counts])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        gain.set_ylim(bottom=0)


def _by_devices(points: Sequence[Point], value: Callable[[Point], float | None]) -> tuple[list[int], list[float]]:
    """Device counts and values, where there is one."""
    found = sorted({(p.devices, y) for p in points if (y := value(p)) is not None})
    return [devices for devices, _ in found], [y for _, y in found]
