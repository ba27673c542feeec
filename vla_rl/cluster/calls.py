"""Waiting for remote calls: each answer is checked as soon as it arrives, so that calls that hang hide no failure."""

import re
import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from vla_rl.core.errors import RecoverableError, StallError, UserError

_GRACE_S = 5.0  # in which the first cause may come after its consequences
_LOOK_S = 2.0  # longest uninterrupted wait
_ADDRESS = re.compile(r"ray::.*?\bip=([^\s,)]+)")  # of the machine, in the text of a task's error
# what the other ranks of a collective say when one has failed
_CONSEQUENCES = ("connection closed by peer", "connection reset", "gloo", "nccl", "distbackenderror", "socket timeout")


class ProcessDied(RecoverableError):
    """A process that the run needs has died."""


class StoreLost(ProcessDied):
    """The replay store has died: it can be replaced alone."""


class ProcessFailed(RecoverableError):
    """A process that the run needs has raised an error."""


class Watch(Protocol):
    """What goes on while somebody waits."""

    @property
    def loops(self) -> Collection[ray.ObjectRef]:
        """Calls that do not end while all is well."""

    def loop_ended(self, ref: ray.ObjectRef) -> None:
        """One of ``loops`` has ended."""

    def look(self) -> None:
        """Called every few seconds at least."""


def gather(wanted: Sequence[ray.ObjectRef], what: str, timeout: float, watch: Watch | None = None) -> list[Any]:
    """The results of remote calls.

    Raises UserError if a process finds a mistake in the user's input, ProcessFailed or ProcessDied with the first cause
    as soon as one call fails, whatever the others do, and StallError naming ``what``.
    """
    deadline = time.monotonic() + timeout
    missing = list(wanted)
    while missing:
        left = deadline - time.monotonic()
        if left <= 0:
            raise StallError(f"waited {timeout:.0f} s for {what}: {len(missing)} of {len(wanted)} calls are open")
        loops = watch.loops if watch is not None else ()
        ready, _ = ray.wait([*missing, *loops], num_returns=1, timeout=min(left, _LOOK_S))
        if watch is not None:
            watch.look()
        for ref in ready:
            if ref not in missing:
                if watch is not None and ref in watch.loops:  # else a wait within ``look`` has seen it
                    watch.loop_ended(ref)
                continue
            missing.remove(ref)
            if (failure := failure_of(ref)) is not None:
                _raise_cause(failure, missing, what)
    return ray.get(list(wanted))


def failure_of(ref: ray.ObjectRef) -> RayError | None:
    """The error of a call that has ended."""
    try:
        ray.get(ref)
    except RayError as error:
        return error
    return None


def describe(error: RayError) -> str:
    """The error in one line, then where it was raised."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {cause}\n\n{error}"
    return str(error).splitlines()[0]


def cause_of(error: RayError) -> str:
    """One line: what a process has raised, or what Ray says of one that has not answered."""
    lines = str(error).strip().splitlines()
    raised = isinstance(error, RayTaskError) or (isinstance(error, RayActorError) and error.actor_init_failed)
    return lines[-1 if raised else 0]


def user_error_of(failure: RayError | None) -> UserError | None:
    """The mistake in the user's input that a process has found; one of another machine begins with its address."""
    cause = failure.cause if isinstance(failure, RayTaskError) else None
    if not isinstance(cause, UserError):
        return None
    found = _ADDRESS.search(str(failure))
    if found is not None and found[1] != ray.util.get_node_ip_address():
        cause.args = (f"on the node {found[1]}: {cause}",)
    return cause


def _raise_cause(failure: RayError, missing: Sequence[ray.ObjectRef], what: str) -> None:
    failures, deadline = [failure], time.monotonic() + _GRACE_S
    while missing and all(map(_is_consequence, failures)) and (left := deadline - time.monotonic()) > 0:
        ready, missing = ray.wait(list(missing), num_returns=1, timeout=left)
        failures += [error for ref in ready if (error := failure_of(ref)) is not None]
    first = min(failures, key=lambda error: (_is_consequence(error), isinstance(error, RayActorError)))
    if (mistake := user_error_of(first)) is not None:
        raise mistake from None
    if isinstance(first, RayTaskError):
        raise ProcessFailed(f"{what} failed: {describe(first)}") from None
    raise ProcessDied(f"a process died while the run waited for {what}: {describe(first)}") from None


def _is_consequence(error: RayError) -> bool:
    text = f"{type(getattr(error, 'cause', error)).__name__}: {getattr(error, 'cause', error)}".lower()
    return isinstance(error, RayTaskError) and any(words in text for words in _CONSEQUENCES)
