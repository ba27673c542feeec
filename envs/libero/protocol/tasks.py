"""LIBERO's suites and tasks, read from the installed package without importing it.

Importing the package would load torch, which costs every environment worker time and memory.
"""

import importlib.util
import io
import pickle
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from envs.base import EnvError
from envs.base.hdf5_reader import libero_instruction
from envs.base.packages import package_folder
from vla_rl.core.packages import install_command

STEP_LIMITS = {  # control steps, the protocol of the OpenVLA papers (longest demonstration of a suite plus some slack)
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}


@dataclass(frozen=True, slots=True)
class LiberoTask:
    """One of the 130 tasks, or one of another suite (``protocol.suites``)."""

    suite: str
    number: int  # within the suite
    name: str
    instruction: str  # as the benchmark states it; the BDDL file's own sentence differs in places
    bddl_file: Path
    init_states_file: Path | None  # None: LIBERO's samplers place everything
    # What another suite changes beside the BDDL file and the initial states:
    perturbation: str = ""  # its name
    scene: tuple[str, str, str] | None = None  # file below the assets (empty: LIBERO's), styles of floor and wall
    camera: tuple[int, ...] | None = None  # see ``protocol.camera``
    arm: tuple[float, ...] | None = None  # seven joints (rad) at the start
    obstacle: str = ""  # why it cannot be played, as far as its files say

    def __str__(self) -> str:
        return f"{self.suite}/{self.number}"


@cache
def suite_tasks(suite: str) -> tuple[LiberoTask, ...]:
    """All tasks of a suite, in the benchmark's order.

    Raises EnvError if the suite is unknown or LIBERO is not installed.
    """
    if suite not in STEP_LIMITS:
        raise EnvError(f"LIBERO has no suite {suite!r}: use one of {', '.join(STEP_LIMITS)}")
    root = _package_root()
    return tuple(
        LiberoTask(
            suite=suite,
            number=number,
            name=name,
            instruction=libero_instruction(name),
            bddl_file=root / "bddl_files" / suite / f"{name}.bddl",
            init_states_file=root / "init_files" / suite / f"{name}.pruned_init",
        )
        for number, name in enumerate(listed_tasks(root)[suite])
    )


def load_init_states(task: LiberoTask) -> np.ndarray:
    """float64 [I, 1 + nq + nv], read-only: time, positions and velocities of the benchmark's initial states.

    Raises EnvError if the task has no file of them, or it is missing or damaged.
    """
    if task.init_states_file is None:
        raise EnvError(f"{task} ({task.name}) has no initial states")
    try:
        return _read_states(task.init_states_file)
    except (OSError, ValueError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise EnvError(
            f"initial states of {task} cannot be read from {task.init_states_file} ({error}): "
            f"{'reinstall hf-libero' if task.suite in STEP_LIMITS else 'replace that file'}"
        ) from error


@cache
def _read_states(file: Path) -> np.ndarray:
    """A table of numpy (.npy), or a file of ``torch.save``: a zip archive around a pickled array."""
    if file.suffix == ".npy":
        states = np.load(file, allow_pickle=False)
    else:
        with zipfile.ZipFile(file) as archive:
            (entry,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            states = _ArrayUnpickler(io.BytesIO(archive.read(entry))).load()
    if isinstance(states, np.ndarray) and states.ndim == 1 and states.size:
        states = states[None]  # LIBERO-Plus keeps a single state
    if not isinstance(states, np.ndarray) or states.ndim != 2 or not states.size:
        raise ValueError("no table of initial states")
    states.flags.writeable = False
    return states


class _ArrayUnpickler(pickle.Unpickler):
    """Reads nothing but arrays, also those that were pickled with numpy 1."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] != "numpy" and (module, name) != ("_codecs", "encode"):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an array")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _package_root() -> Path:
    folder = package_folder("libero")
    if folder is None:
        raise EnvError(f'Python package "libero" is missing: {install_command("libero")}')
    return folder / "libero"


@cache
def listed_tasks(root: Path) -> dict[str, list[str]]:
    """Names of tasks by suite, in the order of the package with this folder. Raises EnvError if the list is missing."""
    file = root / "benchmark" / "libero_suite_task_map.py"
    spec = importlib.util.spec_from_file_location("_libero_suite_task_map", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise EnvError(f"{file}, the package's list of tasks, is missing: reinstall the package")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.libero_task_map)
