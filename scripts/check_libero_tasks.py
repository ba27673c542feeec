"""Check LIBERO tasks on this machine: whether each loads, fits its initial states, steps, and renders both cameras, and
whether lean drawings equal full ones.

    python scripts/check_libero_tasks.py                            all 130 tasks, assets found automatically
    python scripts/check_libero_tasks.py --suite libero_spatial --assets placeholder --json check.json
    python scripts/check_libero_tasks.py --suite liberopro/libero_goal_swap     any that env.suite takes
    python scripts/check_libero_tasks.py --suite liberoplus/libero_goal --list  only say what is left out, and why

Exit status: 0 all tasks pass, 1 some fail, 2 LIBERO or its graphics library is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import mujoco
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from envs.base import EnvError, NothingPlayable
from envs.libero.assets.resolve import LiberoAssets
from envs.libero.bootstrap import import_libero
from envs.libero.fast.rendering import Renderer
from envs.libero.fast.task_model import SimState, TaskModel
from envs.libero.playable import playable_tasks
from envs.libero.protocol.suites import matching_suites
from envs.libero.protocol.tasks import STEP_LIMITS, LiberoTask, load_init_states

CAMERAS = ("agentview", "robot0_eye_in_hand")
IMAGE_SIZE = 128
NO_OP = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
SETTLE_STEPS = 10
POSES = 4
FEWEST_COLORS = 20  # an image of a single surface has fewer


@dataclass(frozen=True, slots=True)
class Check:
    """The findings about one task; ``error`` is empty if there is none."""

    suite: str
    task: int
    name: str
    state_size: int  # numbers in one of the package's initial states
    model_size: int  # numbers in the state of the model built from these assets
    moved: float  # farthest sideways travel of an object while all settle, in metres; large if they overlap
    seconds: float
    error: str

    @property
    def passed(self) -> bool:
        return not self.error


def check_task(task: LiberoTask, assets: LiberoAssets) -> Check:
    """Build, place, settle and render one task."""
    start = time.perf_counter()
    state_size = model_size = 0
    moved, error = 0.0, ""
    try:
        states = load_init_states(task) if task.init_states_file else None
        state_size = states.shape[1] if states is not None else 0
        model = TaskModel(task, assets)
        model_size = 1 + model.model.nq + model.model.nv
        state = model.new_state()
        model.place(state, 0, states[0] if states is not None else None)
        before = _object_positions(state)
        for _ in range(SETTLE_STEPS):
            model.step(state, NO_OP)
        after = _object_positions(state)
        if np.isfinite(state.data.qpos).all():
            moved = float(np.linalg.norm((after - before)[:, :2], axis=1).max(initial=0.0))
            error = _render_error(model, state)
        else:
            error = "the simulation diverged"
    except (EnvError, ValueError, KeyError, OSError, mujoco.FatalError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return Check(task.suite, task.number, task.name, state_size, model_size, moved, time.perf_counter() - start, error)


def _object_positions(state: SimState) -> np.ndarray:
    """float64 [n, 3] of everything that moves freely."""
    model = state.data.model
    free = model.jnt_qposadr[model.jnt_type == mujoco.mjtJoint.mjJNT_FREE]
    return np.array([state.data.qpos[first : first + 3] for first in free]).reshape(-1, 3)


def _render_error(model: TaskModel, state: SimState) -> str:
    image = np.zeros((IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    renderer = Renderer(model.model, IMAGE_SIZE)
    generator = np.random.default_rng(0)
    try:
        for _ in range(POSES):
            renderer.pose(state.data.qpos)
            for name in CAMERAS:
                renderer.render(model.model.camera(name).id, image)
                if len(np.unique(image.reshape(-1, 3), axis=0)) < FEWEST_COLORS:
                    return f"the image of {name} is empty"
            command = generator.uniform(-1, 1, len(NO_OP))
            for _ in range(SETTLE_STEPS):
                model.step(state, command)
        return renderer.obstacle if renderer.wrong_pixels else ""  # it has compared most of the drawings
    finally:
        renderer.close()


def chosen_tasks(patterns: list[str], assets: LiberoAssets, console: Console) -> list[LiberoTask]:
    """What can be played of some suites; prints what is left out."""
    tasks: list[LiberoTask] = []
    for suite in (suite for pattern in patterns for suite in matching_suites(pattern)):
        try:
            kept, left_out, _ = playable_tasks(suite, (), assets)
        except NothingPlayable as error:
            console.print(str(error), highlight=False, markup=False, soft_wrap=True)
            continue
        tasks += kept
        console.print(f"{suite}: {len(kept)} tasks, {len(left_out)} left out", highlight=False)
        for line in left_out:
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    return tasks


def run(tasks: list[LiberoTask], assets: LiberoAssets, console: Console) -> list[Check]:
    """Check tasks, showing progress and failures."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    checks = []
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("LIBERO tasks", total=len(tasks))
        for task in tasks:
            progress.update(bar, description=f"{task.suite} {task.number:2d}")
            checks.append(check_task(task, assets))
            progress.advance(bar)
            if checks[-1].error:
                progress.console.print(f"[red]{task.suite} {task.number} {task.name}: {checks[-1].error}")
    return checks


def show(checks: list[Check], assets: LiberoAssets, console: Console) -> None:
    """Print one line per suite; the JSON file has the single tasks."""
    table = Table(title=f"assets: {assets.origin} ({assets.path})")
    for column in ("suite", "tasks", "pass", "state sizes fit", "s per task"):
        table.add_column(column, justify="left" if column == "suite" else "right")
    for suite in dict.fromkeys(check.suite for check in checks):
        rows = [check for check in checks if check.suite == suite]
        table.add_row(
            suite,
            str(len(rows)),
            str(sum(check.passed for check in rows)),
            str(sum(check.state_size == check.model_size > 0 for check in rows)),
            f"{np.mean([check.seconds for check in rows]):.1f}",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", help="as env.suite; may be given several times")
    parser.add_argument("--list", action="store_true", help="check nothing, only list what is left out")
    parser.add_argument("--assets", default="auto", choices=("auto", "placeholder"))
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args()
    console = Console()
    try:
        assets = import_libero(args.assets)
        tasks = chosen_tasks(args.suite or list(STEP_LIMITS), assets, console)
        if args.list:
            return 0
        checks = run(tasks, assets, console)
    except EnvError as error:
        print(f"check_libero_tasks: {error}", file=sys.stderr)
        return 2
    show(checks, assets, console)
    if args.json:
        report = {"assets": assets.origin, "tasks": [asdict(check) | {"passed": check.passed} for check in checks]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
