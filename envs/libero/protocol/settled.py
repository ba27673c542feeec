"""Where the objects of LIBERO's initial states come to rest. MuJoCo's version decides it, and with it success rates.

The reference is MuJoCo 3.3.0, of the versions with which published numbers were made; newer ones find other contacts
between boxes. ``settled.npz`` holds its poses, and ``audits.json`` by version the tasks that differ from them
(docs/libero_numbers.md). ``vla-rl audit libero`` computes them.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envs.base import EnvError
from envs.libero.assets.resolve import cache_dir
from envs.libero.protocol.tasks import LiberoTask, load_init_states
from vla_rl.core.files import json_or_empty, replacing

REFERENCE = Path(__file__).parent / "settled.npz"
PLACEMENT_SEED = 0  # of fixtures, which initial states do not hold
_AUDITS = Path(__file__).parent / "audits.json"
_STEP = 1e-5  # in which poses are stored: 0.01 mm, and 1e-5 of a quaternion
_NAMED = 3  # tasks in a note


class Settled(NamedTuple):
    """Poses in which the movable objects of a task rest, for each of its initial states."""

    objects: np.ndarray  # str [N]
    qpos: np.ndarray  # int [N]: where an object's 7 numbers begin in the simulator's positions
    poses: np.ndarray  # float64 [I, N, 7]: position (m), quaternion (w, x, y, z)


def save(settled: Mapping[str, Settled], file: Path) -> None:
    """Of tasks by their names. Poses are rounded."""
    arrays: dict[str, np.ndarray] = {}
    for task, part in settled.items():
        steps = np.round(part.poses / _STEP).astype(np.int32)
        own = {"objects": part.objects, "qpos": part.qpos.astype(np.int16), "poses": steps}
        arrays |= {f"{task}:{name}": array for name, array in own.items()}
    with replacing(file) as partial, partial.open("wb") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]


@cache
def reference(task: str) -> Settled:
    """Of the task with this name, such as "libero_spatial/5". Raises EnvError if the table has none."""
    with np.load(REFERENCE) as table:
        if f"{task}:poses" not in table:
            raise EnvError(f"{task} has no settled states to start from, only LIBERO's own tasks: set env.settled=here")
        return Settled(table[f"{task}:objects"], table[f"{task}:qpos"], table[f"{task}:poses"] * _STEP)


@cache
def settled_init_states(task: LiberoTask) -> np.ndarray:
    """float64 [I, 1 + nq + nv], read-only: the initial states, with all objects where the reference has them at rest.

    Raises EnvError as ``reference`` and ``load_init_states`` do.
    """
    states, own = load_init_states(task).copy(), reference(str(task))
    for number, qpos in enumerate(own.qpos.tolist()):
        states[:, 1 + qpos : 8 + qpos] = own.poses[:, number]
    states.flags.writeable = False
    return states


def installed() -> str:
    """MuJoCo's version, of the module itself: it may lie on PYTHONPATH without its metadata."""
    import mujoco

    return str(mujoco.__version__)


def keep_audit(differing: Mapping[str, Mapping[str, Any]]) -> None:
    """Remember, for ``resting_note``, which tasks differ under the installed MuJoCo."""
    file = _own_audits()
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as partial:
        partial.write_text(json.dumps(json_or_empty(file) | {installed(): differing}, indent=1))


def resting_note(tasks: Sequence[LiberoTask]) -> str | None:
    """What people should know of these tasks' objects under the installed MuJoCo; None: they rest as published."""
    here = installed()
    audits = json_or_empty(_AUDITS) | json_or_empty(_own_audits())
    if here not in audits:
        return f"with MuJoCo {here}, objects may rest elsewhere than in published results: run `vla-rl audit libero`"
    found = [(str(task), audits[here][str(task)]) for task in tasks if str(task) in audits[here]]
    if not found:
        return None
    found.sort(key=lambda pair: -pair[1]["states"])
    named = "; ".join(
        f"{task}, {part['object']} by up to {part['worst_mm']:.0f} mm ({part['states']} initial states)"
        for task, part in found[:_NAMED]
    )
    more = f"; and {len(found) - _NAMED} more tasks" if len(found) > _NAMED else ""
    return (
        f"with MuJoCo {here}, objects rest elsewhere than with 3.3.0: {named}{more}. env.settled=reference starts "
        "where that one has them (docs/libero_numbers.md)"
    )


def _own_audits() -> Path:
    return cache_dir() / "libero" / "audits.json"
