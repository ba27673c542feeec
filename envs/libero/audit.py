"""The audit behind ``vla-rl audit libero``: where objects come to rest here, compared with a reference."""

from typing import NamedTuple

import numpy as np

from envs.base import EnvError
from envs.libero.bootstrap import import_libero
from envs.libero.fast.task_model import TaskModel
from envs.libero.protocol.conventions import NO_OP
from envs.libero.protocol.settled import PLACEMENT_SEED, Settled
from envs.libero.protocol.tasks import LiberoTask, load_init_states

STEPS = 10  # no-ops, the protocol of the OpenVLA papers
TOLERANCE = 0.005  # metres that an object may rest away from the reference's place


class Difference(NamedTuple):
    """How far objects of a task rest from the reference's places."""

    worst_mm: float  # over all objects and initial states
    object: str  # that is farthest away
    states: int  # in which an object is farther away than ``TOLERANCE``
    target: bool  # whether one of those objects is part of the task's goal


def settle(task: LiberoTask, count: int | None = None) -> tuple[Settled, list[str]]:
    """Play the settling steps from the first ``count`` initial states; also returns the objects of the goal.

    Raises EnvError as ``import_libero``.
    """
    model = TaskModel(task, import_libero())
    objects, state, poses = model.env.objects_dict, model.new_state(), []
    qpos = [model.env.sim.model.get_joint_qpos_addr(thing.joints[-1])[0] for thing in objects.values()]
    for init_state in load_init_states(task)[:count]:
        model.place(state, PLACEMENT_SEED, init_state)
        for _ in range(STEPS):
            model.step(state, NO_OP)
        poses.append([state.data.qpos[first : first + 7].copy() for first in qpos])
    return Settled(np.array(list(objects)), np.array(qpos), np.array(poses)), list(model.env.obj_of_interest)


def difference(found: Settled, goal: list[str], reference: Settled) -> Difference:
    """Over the initial states of ``found``. Raises EnvError if the two hold other objects."""
    if list(found.objects) != list(reference.objects) or len(found.poses) > len(reference.poses):
        raise EnvError(f"this LIBERO has the objects {list(found.objects)}, the reference {list(reference.objects)}")
    away = np.linalg.norm(found.poses[..., :3] - reference.poses[: len(found.poses), :, :3], axis=-1)
    moved = away > TOLERANCE
    return Difference(
        worst_mm=round(1000 * float(away.max()), 2),
        object=str(found.objects[away.max(axis=0).argmax()]),
        states=int(moved.any(axis=1).sum()),
        target=any(name in goal for name in found.objects[moved.any(axis=0)]),
    )
