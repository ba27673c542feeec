"""A restart without a new Ray: which processes are kept, because simulators and policies take long to load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeGuard

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from vla_rl.cluster.calls import failure_of

_STOP_S = 10.0  # in which a loop that is asked to stop ends, and a process that is killed
Loop = tuple[str, int]  # role and index


@dataclass(frozen=True, slots=True)
class Survivors:
    """Env workers and inference servers that have stopped, and can be started again; by index."""

    processes: Mapping[Loop, ActorHandle] = field(default_factory=dict)

    @classmethod
    def of(
        cls, loops: Mapping[ray.ObjectRef, Loop], candidates: Mapping[Loop, ActorHandle], others: Sequence[ActorHandle]
    ) -> Self:
        """Stop the ``candidates`` and keep those whose loops end; kill the rest of them, and all ``others``."""
        for process in candidates.values():
            process.pause.remote()
        own = {ref: loop for ref, loop in loops.items() if loop in candidates}
        ended = ray.wait(list(own), num_returns=len(own), timeout=_STOP_S)[0] if own else []
        kept = {own[ref]: candidates[own[ref]] for ref in ended if _may_run_again(ref)}
        _kill([*others, *(process for loop, process in candidates.items() if loop not in kept)])
        return cls(kept)


def has_lost_another(failure: RayError | None) -> TypeGuard[RayTaskError]:
    """Whether a loop failed because another process was gone, such as the store."""
    return isinstance(failure, RayTaskError) and isinstance(failure.cause, RayActorError)


def _may_run_again(ref: ray.ObjectRef) -> bool:
    failure = failure_of(ref)
    return failure is None or has_lost_another(failure)


def _kill(processes: Sequence[ActorHandle]) -> None:
    """Returns when they are gone, and with them their memory on devices."""
    calls: list[Any] = [process.__ray_ready__.remote() for process in processes]
    for process in processes:
        ray.kill(process)
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=_STOP_S)
