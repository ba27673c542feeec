"""`vla-rl audit libero`: do objects come to rest here where they did when the published numbers were made?"""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from rich.table import Table

from envs.libero.audit import TOLERANCE, Difference, difference, settle
from envs.libero.bootstrap import import_libero
from envs.libero.config import LIBERO_TASKS
from envs.libero.protocol.settled import keep_audit, reference, save
from envs.libero.protocol.tasks import suite_tasks
from vla_rl.commands.metadata import machine_record, package_versions
from vla_rl.core.errors import UserError
from vla_rl.core.files import write_json
from vla_rl.core.machine import Machine
from vla_rl.observability.console import StatusDisplay, make_console, minutes_left


def audit_command(args: Any) -> int:
    """Settle, compare, print. The exit status is 1 if a task differs."""
    console, assets = make_console(), import_libero()
    if assets.origin == "placeholder":
        raise UserError("LIBERO's own assets are missing, and placeholders come to rest elsewhere: set LIBERO_ASSETS")
    suites = list(LIBERO_TASKS) if args.suite == "all" else args.suite.split(",")
    tasks = {str(task): task for suite in suites for task in suite_tasks(suite)}
    context, settled = multiprocessing.get_context("spawn"), {}
    with (
        StatusDisplay(console, "starting processes") as line,
        ProcessPoolExecutor(Machine.detect().cpus, context) as pool,
    ):
        running = {pool.submit(settle, task, args.states): name for name, task in tasks.items()}
        start = time.monotonic()
        for done, future in enumerate(as_completed(running), 1):
            settled[running[future]] = future.result()
            left = minutes_left(time.monotonic() - start, done, len(tasks))
            line.update(f"settling: {done} of {len(tasks)} tasks, {left}")
    if args.record is not None:
        save({name: settled[name][0] for name in tasks}, args.record)
        console.print(f"settled states: {args.record}", highlight=False)
    found = {name: difference(*settled[name], reference(name)) for name in tasks}
    differing = {name: part._asdict() for name, part in found.items() if part.states}
    if args.suite == "all" and args.states is None:
        keep_audit(differing)
    versions = package_versions()
    if differing:
        console.print(_table(differing))
    console.print(_summary(found, versions), highlight=False)
    if args.json:
        about = {"packages": versions, "assets": assets.origin, "machine": machine_record()}
        write_json(args.json, about | {"tasks": {name: part._asdict() for name, part in found.items()}})
    return int(bool(differing))


def _summary(found: dict[str, Difference], versions: dict[str, str | None]) -> str:
    differing = [part for part in found.values() if part.states]
    rest = max((part.worst_mm for part in found.values() if not part.states), default=0.0)
    return (
        f"MuJoCo {versions['mujoco']}, robosuite {versions['robosuite']}: {len(differing)} of {len(found)} tasks "
        f"differ by over {1000 * TOLERANCE:.0f} mm, {sum(part.target for part in differing)} in an object of their "
        f"goal; the others by {rest:.2f} mm at most"
    )


def _table(differing: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="objects that rest elsewhere than under MuJoCo 3.3.0")
    for name in ("task", "farthest (mm)", "object", "initial states", "in the goal"):
        table.add_column(name, justify="right" if "(" in name or "states" in name else "left")
    for task, part in differing.items():
        table.add_row(task, f"{part['worst_mm']:.1f}", part["object"], str(part["states"]), "yes" * part["target"])
    return table
