"""Requests and answers between env workers and an inference server: one row of shared memory per environment.

A worker writes an observation directly into its environment's row and rings the server's doorbell. The server answers
into the same row and rings the worker's doorbell. Every request has a ticket number, so that an answer to a process
that has died is never taken for an answer to its successor: a row is pending exactly while ``ticket != answered``.

Doorbells only wake. What has arrived is read from the rows, also when nobody has rung for a while: a process may be
killed between its writing and its ringing.

Workers of other nodes are *guests* of a pool: one process writes their requests into its rows and hears one doorbell
for all of them (``vla_rl.inference.network``).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path

import numpy as np

from vla_rl.core.ipc.shared_memory import WAKE, Doorbell, SharedArrays
from vla_rl.core.records import ActionBatch, Array, EnvSpec, Observation, PolicySpec

_UNWRITTEN = 0xA5  # every byte of a new pool
_RECORD, _DRAWS = "record.", "draws."  # the policy's own arrays begin so


class WorkerState(IntEnum):
    """What a server may rely on; each row has its worker's."""

    UNKNOWN = 0  # may ask at any time
    BUSY = 1  # has work besides its open requests
    WAITS = 2  # asks for nothing before an answer comes
    ABSENT = 3  # is not there: its host has left, or has not joined yet


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """Where one inference server's rows and doorbells are.

    With E = ``envs_per_worker``, worker w owns the rows ``w * E .. (w + 1) * E - 1``.
    """

    folder: str
    name: str
    workers: int
    envs_per_worker: int
    guests: tuple[range, ...] = ()  # workers that run on other nodes; those of a range have one doorbell

    @property
    def rows(self) -> int:
        return self.workers * self.envs_per_worker

    @property
    def memory(self) -> Path:
        return Path(self.folder) / f"{self.name}.rows"

    def bell(self, worker: int | None) -> Path:
        """The doorbell of a worker; None: of the server."""
        if worker is None:
            owner = "server"
        else:
            group = next((i for i, workers in enumerate(self.guests) if worker in workers), None)
            owner = f"worker{worker}" if group is None else f"guests{group}"
        return Path(self.folder) / f"{self.name}.{owner}.bell"


def create_pool(address: PoolAddress, spec: EnvSpec, policy: PolicySpec) -> SharedArrays:
    """Allocate the rows; called once on each node, before its server and workers start."""
    n, k, a, size = address.rows, policy.chunk_size, policy.action_dim, spec.image_size
    arrays = SharedArrays.create(
        address.memory,
        {
            "images": ((n, len(spec.views), size, size, 3), "|u1"),
            "proprio": ((n, spec.proprio_dim), "<f4"),
            "task": ((n,), "<i4"),
            "elapsed": ((n,), "<f4"),
            **{_DRAWS + name: ((n, *numbers.shape), "<f4") for name, numbers in policy.draws.items()},
            "greedy": ((n,), "|b1"),
            "requested_ns": ((n,), "<i8"),
            "worker_state": ((n,), "|i1"),
            "actions": ((n, k, a), "<f4"),
            **{_RECORD + name: ((n, *layout.shape), layout.dtype) for name, layout in policy.record.items()},
            "logprobs": ((n, k, a), "<f4"),
            "values": ((n,), "<f4"),
            "policy_version": ((n,), "<i4"),
            "ticket": ((n,), "<i8"),
            "answered": ((n,), "<i8"),
        },
        fill=_UNWRITTEN,
    )
    arrays["answered"][:] = arrays["ticket"]
    arrays["worker_state"][:] = WorkerState.UNKNOWN
    return arrays


def request_columns(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Those of a pool's arrays that make up a request."""
    names = [f.name for f in fields(Observation)] + ["greedy"]
    return {name: array for name, array in arrays.items() if name in names or name.startswith(_DRAWS)}


def answer_columns(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Those of a pool's arrays that make up an answer."""
    names = ("actions", "logprobs", "values", "policy_version")
    return {name: array for name, array in arrays.items() if name in names or name.startswith(_RECORD)}


class WorkerMailbox:
    """A worker's side: its own rows, addressed by the env id within the worker."""

    def __init__(self, address: PoolAddress, worker: int, count: int = 1) -> None:
        """``count``: of workers from ``worker`` on whose rows these are, which have one doorbell (guests)."""
        self._pool = SharedArrays.attach(address.memory)
        first = worker * address.envs_per_worker
        rows = slice(first, first + count * address.envs_per_worker)
        self._first = first
        self._arrays = {name: array[rows] for name, array in self._pool.arrays.items()}
        self._server = Doorbell(address.bell(None))
        self._bell = Doorbell(address.bell(worker))
        self._open = set[int]()  # env ids with a request whose answer has not been returned
        self.observation = Observation(**{f.name: self._arrays[f.name] for f in fields(Observation)})
        self.requests, self.answers = request_columns(self._arrays), answer_columns(self._arrays)
        # Requests of an earlier process in this place are void, and no answer to them may match a ticket of this one.
        self._arrays["ticket"][:] = time.monotonic_ns()
        self._arrays["answered"][:] = self._arrays["ticket"]
        self._arrays["worker_state"][:] = WorkerState.UNKNOWN

    def request(self, env_ids: Sequence[int], draws: Mapping[str, Array], greedy: np.ndarray) -> None:
        """Ask for an action chunk for the observations of n environments.

        ``draws``: float32 [n, ...] each, the random numbers that settle the sample; ``greedy``: bool [n].
        """
        index = np.asarray(env_ids)
        for name, numbers in draws.items():
            self._arrays[_DRAWS + name][index] = numbers
        self._arrays["greedy"][index] = greedy
        self.submit(index)

    def submit(self, index: np.ndarray) -> None:
        """Ask for what ``requests`` holds for these environments, int [n]."""
        self._arrays["requested_ns"][index] = time.monotonic_ns()
        self._arrays["ticket"][index] += 1
        self._open.update(index.tolist())
        self._server.ring(index + self._first)

    def wait(self, timeout: float) -> list[int]:
        """Env ids whose answer has arrived since their request; [] after ``timeout`` seconds or a ``wake``.

        Answers to others are not returned: a server may still answer what an earlier process in this place has asked.
        """
        if not self._bell.wait(timeout) and not self._open:
            return []
        ticket, answered = self._arrays["ticket"], self._arrays["answered"]
        arrived = sorted(e for e in self._open if ticket[e] == answered[e])
        self._open.difference_update(arrived)
        return arrived

    def wait_idle(self, timeout: float) -> list[int]:
        """As ``wait``, for a worker that asks for nothing before it returns, and has something to do afterwards."""
        if arrived := self.wait(0.0):
            return arrived
        self._arrays["worker_state"][:] = WorkerState.WAITS
        self._server.ring([WAKE])
        try:
            return self.wait(timeout)
        finally:
            self._arrays["worker_state"][:] = WorkerState.BUSY

    def show(self, rows: slice, states: np.ndarray) -> None:
        """Tell the server what the workers of these rows do, as ``WorkerState``: int8 [n]."""
        state = self._arrays["worker_state"][rows]
        changed = state != states
        state[:] = states
        if (states[changed] == WorkerState.WAITS).any():
            self._server.ring([WAKE])

    def fileno(self) -> int:
        """Of the doorbell: readable when ``wait`` has something to return, for event loops."""
        return self._bell.fileno()

    def wake(self) -> None:
        """End a ``wait`` early; may be called from any thread."""
        self._bell.ring([WAKE])

    def answer(self, env_ids: Sequence[int]) -> tuple[ActionBatch, np.ndarray]:
        """Copies of the answers, and the policy version of each (int32 [n]); the batch carries the newest of them."""
        index = np.asarray(env_ids)
        a = {name: self._arrays[name][index] for name in ("actions", "logprobs", "values", "policy_version")}
        record = {name: array[index] for name, array in _part(self._arrays, _RECORD).items()}
        versions = a.pop("policy_version")
        return ActionBatch(**a, record=record, policy_version=int(versions.max())), versions

    def close(self) -> None:
        self._bell.close()
        self._server.close()


class ServerMailbox:
    """The server's side: all rows."""

    def __init__(self, address: PoolAddress) -> None:
        self._address = address
        self._pool = SharedArrays.attach(address.memory)
        self._bell = Doorbell(address.bell(None))
        bells = {path: Doorbell(path) for path in map(address.bell, range(address.workers))}
        self._workers = [bells[address.bell(w)] for w in range(address.workers)]
        self.arrays = self._pool.arrays
        self.draws = _part(self.arrays, _DRAWS)
        self._record = _part(self.arrays, _RECORD)
        self._unseen = True

    def pending_rows(self) -> list[int]:
        """All rows that wait for an answer; a restarted server finds its open requests here."""
        return np.flatnonzero(self.arrays["ticket"] != self.arrays["answered"]).tolist()

    def wait(self, timeout: float) -> list[int]:
        """Requested rows, in the order of their ringing; blocks up to ``timeout`` seconds.

        All open requests after a wait in vain, and at the first call. A row is returned again until it is answered.
        """
        tokens = [] if self._unseen else self._bell.wait(timeout)
        self._unseen = False
        if not tokens:
            return self.pending_rows()
        ticket, answered = self.arrays["ticket"], self.arrays["answered"]
        return [row for row in dict.fromkeys(tokens) if row != WAKE and ticket[row] != answered[row]]

    def wake(self) -> None:
        self._bell.ring([WAKE])

    def fileno(self) -> int:
        """As ``WorkerMailbox.fileno``."""
        return self._bell.fileno()

    def answer(self, rows: Sequence[int], tickets: np.ndarray, batch: ActionBatch) -> None:
        """Write answers and wake the workers. Row i of ``batch`` answers the request ``tickets[i]`` of ``rows[i]``."""
        index = np.asarray(rows)
        for name in ("actions", "logprobs", "values"):
            self.arrays[name][index] = getattr(batch, name)
        for name, array in self._record.items():
            array[index] = batch.record[name]
        self.arrays["policy_version"][index] = batch.policy_version
        self.deliver(index, tickets)

    def deliver(self, index: np.ndarray, tickets: np.ndarray) -> None:
        """Wake the workers for answers that are in ``arrays``: of the rows ``index``, int [n], to these ``tickets``."""
        self.arrays["answered"][index] = tickets
        owners, each = index // self._address.envs_per_worker, self._address.envs_per_worker
        for worker in np.unique(owners).tolist():
            state = self.arrays["worker_state"][worker * each : (worker + 1) * each]
            state[state == WorkerState.WAITS] = WorkerState.BUSY  # from now on, also before it wakes
            self._workers[worker].ring(index[owners == worker])

    def close(self) -> None:
        self._bell.close()
        for bell in self._workers:
            bell.close()


def _part(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """The arrays whose names begin so, without the prefix."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
