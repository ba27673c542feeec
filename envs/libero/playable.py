"""Which tasks of a suite can be played here: those whose BDDL file, task code, scene and objects are all there.

Nothing is compiled for this. A BDDL file is parsed by hf-libero, and of each kind of object one model is read, with
the files that it names.
"""

from collections import Counter
from functools import cache
from pathlib import Path
from xml.etree.ElementTree import ParseError

from envs.base import EnvError, NothingPlayable
from envs.libero.assets.resolve import LiberoAssets
from envs.libero.protocol.suites import select_tasks
from envs.libero.protocol.tasks import STEP_LIMITS, LiberoTask, load_init_states

_WORKSPACES = {"table", "coffee_table", "floor", "kitchen_table", "living_room_table", "study_table"}  # part of scenes


def playable_tasks(
    suite: str, numbers: tuple[int, ...], assets: LiberoAssets
) -> tuple[tuple[LiberoTask, ...], tuple[str, ...], tuple[str, ...]]:
    """The tasks with these numbers, in this order, without those that cannot be played; of all if there is no number.

    Also one line for each task that is left out, with the reason, and notes for people that count them. LIBERO has to
    have been imported (``import_libero``). LIBERO's own suites are complete with any assets.

    Raises EnvError if the suite or a number does not exist, or a task named by number cannot be played, and
    NothingPlayable if none can.
    """
    chosen = select_tasks(suite, numbers)
    if suite in STEP_LIMITS:
        return chosen, (), ()
    lacks = {task: lack for task in chosen if (lack := lack_of(task, assets.path))}
    left_out = tuple(f"{task.number} {task.name}: {lack}" for task, lack in lacks.items())
    if lacks and numbers:
        raise EnvError(f"{suite} has tasks that cannot be played here, {left_out[0]}: leave them out of env.tasks")
    if len(lacks) == len(chosen):
        raise NothingPlayable(
            f"{suite}: none of its {len(chosen)} tasks can be played, {_counted(lacks)}. Missing "
            f"assets belong into {assets.path}, or into another folder that LIBERO_ASSETS names"
        )
    notes = (f"{suite}: {len(lacks)} of {len(chosen)} tasks are left out, {_counted(lacks)}",) if lacks else ()
    return tuple(task for task in chosen if task not in lacks), left_out, notes


def lack_of(task: LiberoTask, assets: Path) -> str:
    """Why a task cannot be played; empty if it can."""
    if task.obstacle:
        return task.obstacle
    if task.scene and (lack := _scene_lack(task.scene, assets)):
        return lack
    if task.init_states_file is not None:
        try:
            load_init_states(task)
        except EnvError:
            return f"its initial states cannot be read: {task.init_states_file.name}"
    return _file_lack(task.bddl_file, assets)


@cache
def _file_lack(file: Path, assets: Path) -> str:
    from libero.libero.envs import TASK_MAPPING
    from libero.libero.envs.bddl_utils import robosuite_parse_problem

    if not file.is_file():
        return f"there is no file {file.name}"
    try:
        problem = robosuite_parse_problem(str(file))
    except Exception as error:  # the parser raises no narrower class
        return f"its BDDL file cannot be parsed: {error}"
    if not problem["problem_name"].startswith(tuple(TASK_MAPPING)):
        return f"hf-libero has no problem {problem['problem_name']}"
    kinds = {*problem["fixtures"], *problem["objects"]} - _WORKSPACES
    lacks = sorted(lack for kind in kinds if (lack := _object_lack(kind, assets)))
    return "; ".join(lacks[:2]) + (f"; and {len(lacks) - 2} more" if len(lacks) > 2 else "")


@cache
def _object_lack(kind: str, assets: Path) -> str:
    """Of a kind of object or fixture. ``assets``: what LIBERO reads at present, so that another folder asks again."""
    from libero.libero.envs.base_object import OBJECTS_DICT

    if kind not in OBJECTS_DICT:
        return f"object {kind} is unknown to hf-libero"
    try:
        model = OBJECTS_DICT[kind](name="probe")
    except (OSError, ParseError) as error:
        return f"object {kind} has no model in the assets ({error})"
    files = (Path(part.get("file")) for part in model.asset if part.get("file"))
    absent = next((file for file in files if not file.is_file()), None)
    return f"object {kind} lacks {absent.name} in the assets" if absent else ""


def _scene_lack(scene: tuple[str, str, str], assets: Path) -> str:
    from libero.libero.envs.arenas.style import STYLE_MAPPING

    file, *styles = scene
    if file and not (assets / file).is_file():
        return f"scene {file} is not in the assets"
    for kind, style in zip(("floor", "wall"), styles, strict=True):
        if style not in STYLE_MAPPING[kind]:
            return f"{kind} {style} is unknown to hf-libero"
        if not (assets / "textures" / STYLE_MAPPING[kind][style]).is_file():
            return f"{kind} {style} has no texture in the assets"
    return ""


def _counted(lacks: dict[LiberoTask, str]) -> str:
    """By perturbation, with the first reason of each."""
    first: dict[str, str] = {}
    for task, lack in lacks.items():
        first.setdefault(task.perturbation, lack)
    counts = Counter(task.perturbation for task in lacks)
    return "; ".join(f"{count} {kind} ({first[kind]})".replace("  ", " ") for kind, count in counts.items())
