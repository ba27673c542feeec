"""Requests and answers between env workers and an inference server: one row of shared memory a slot.

A worker writes an observation straight into its slot's row and rings the server's doorbell; the server answers into the
same row and rings the worker's. A ticket number per request tells an answer to this request from one to an earlier
request of a process that has died since: a row is pending exactly while ``ticket != answered``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_rl.core.ipc.shared_memory import WAKE, Doorbell, SharedArrays
from vla_rl.core.records import ActionBatch, EnvSpec, Observation

_UNWRITTEN = 0xA5  # every byte of a new pool


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """Where one inference server's rows and doorbells are. Worker w owns rows ``w * slots .. (w + 1) * slots - 1``."""

    folder: str
    name: str
    workers: int
    slots: int

    @property
    def rows(self) -> int:
        return self.workers * self.slots

    @property
    def memory(self) -> Path:
        return Path(self.folder) / f"{self.name}.rows"

    def bell(self, worker: int | None) -> Path:
        """The doorbell of a worker, or of the server (None)."""
        return Path(self.folder) / f"{self.name}.{'server' if worker is None else f'worker{worker}'}.bell"


def create_pool(address: PoolAddress, spec: EnvSpec, chunk_size: int) -> SharedArrays:
    """Allocate the rows; called once, by the process that starts server and workers."""
    n, k, a, size = address.rows, chunk_size, spec.action_dim, spec.image_size
    arrays = SharedArrays.create(
        address.memory,
        {
            "images": ((n, len(spec.views), size, size, 3), "|u1"),
            "proprio": ((n, spec.proprio_dim), "<f4"),
            "task": ((n,), "<i4"),
            "uniforms": ((n, k, a), "<f4"),
            "greedy": ((n,), "|b1"),
            "requested_ns": ((n,), "<i8"),
            "actions": ((n, k, a), "<f4"),
            "tokens": ((n, k, a), "|u1"),
            "logprobs": ((n, k, a), "<f4"),
            "values": ((n,), "<f4"),
            "version": ((n,), "<i4"),
            "ticket": ((n,), "<i8"),
            "answered": ((n,), "<i8"),
        },
        fill=_UNWRITTEN,
    )
    arrays["answered"][:] = arrays["ticket"]
    return arrays


class WorkerMailbox:
    """A worker's side: its own rows, addressed by slot."""

    def __init__(self, address: PoolAddress, worker: int) -> None:
        self._pool = SharedArrays.attach(address.memory)
        first = worker * address.slots
        rows = slice(first, first + address.slots)
        self._first = first
        self._arrays = {name: array[rows] for name, array in self._pool.arrays.items()}
        self._server = Doorbell(address.bell(None))
        self._bell = Doorbell(address.bell(worker))
        self.observation = Observation(self._arrays["images"], self._arrays["proprio"], self._arrays["task"])
        # whatever an earlier process in this place asked for is void; and no answer to it may match a ticket of ours
        self._arrays["ticket"][:] = time.monotonic_ns()
        self._arrays["answered"][:] = self._arrays["ticket"]

    def request(self, slots: Sequence[int], uniforms: np.ndarray, greedy: np.ndarray) -> None:
        """Ask for an action chunk for the observations that stand in ``slots``.

        uniforms: float32 [n, K, A], the random numbers that settle the sample; greedy: bool [n].
        """
        index = np.asarray(slots)
        self._arrays["uniforms"][index] = uniforms
        self._arrays["greedy"][index] = greedy
        self._arrays["requested_ns"][index] = time.monotonic_ns()
        self._arrays["ticket"][index] += 1
        self._server.ring(index + self._first)

    def wait(self, timeout: float) -> list[int]:
        """Slots whose answer has arrived. [] after ``timeout`` seconds or a ``wake``."""
        rows = self._bell.wait(timeout)
        slots = {row - self._first for row in rows if row != WAKE}
        ticket, answered = self._arrays["ticket"], self._arrays["answered"]
        return sorted(s for s in slots if ticket[s] == answered[s])

    def wake(self) -> None:
        """End a ``wait`` early; may be called from any thread."""
        self._bell.ring([WAKE])

    def answer(self, slots: Sequence[int]) -> tuple[ActionBatch, np.ndarray]:
        """Copies of the answers in ``slots`` and their versions (int32 [n]); ActionBatch.version is the newest."""
        index = np.asarray(slots)
        a = {name: self._arrays[name][index] for name in ("actions", "tokens", "logprobs", "values", "version")}
        batch = ActionBatch(a["actions"], a["tokens"], a["logprobs"], a["values"], int(a["version"].max()))
        return batch, a["version"]

    def close(self) -> None:
        self._bell.close()
        self._server.close()


class ServerMailbox:
    """The server's side: all rows."""

    def __init__(self, address: PoolAddress) -> None:
        self._address = address
        self._pool = SharedArrays.attach(address.memory)
        self._bell = Doorbell(address.bell(None))
        self._workers = [Doorbell(address.bell(w)) for w in range(address.workers)]
        self.arrays = self._pool.arrays
        self._unseen = True

    def pending_rows(self) -> list[int]:
        """All rows that wait for an answer: what a restarted server finds."""
        return np.flatnonzero(self.arrays["ticket"] != self.arrays["answered"]).tolist()

    def wait(self, timeout: float) -> list[int]:
        """Rows newly requested; blocks up to ``timeout`` seconds. The first call also returns what waited before."""
        if self._unseen:
            self._unseen = False
            rows = self.pending_rows()
            if rows:
                return rows
        ticket, answered = self.arrays["ticket"], self.arrays["answered"]
        # a row that the first call found may ring once more
        return [row for row in self._bell.wait(timeout) if row != WAKE and ticket[row] != answered[row]]

    def wake(self) -> None:
        self._bell.ring([WAKE])

    def answer(self, rows: Sequence[int], tickets: np.ndarray, batch: ActionBatch) -> None:
        """Write answers and wake the workers. Row i of ``batch`` belongs to ``rows[i]``, asked with ``tickets[i]``."""
        index = np.asarray(rows)
        for name in ("actions", "tokens", "logprobs", "values"):
            self.arrays[name][index] = getattr(batch, name)
        self.arrays["version"][index] = batch.version
        self.arrays["answered"][index] = tickets
        owners = index // self._address.slots
        for worker in np.unique(owners).tolist():
            self._workers[worker].ring(index[owners == worker])

    def close(self) -> None:
        self._bell.close()
        for bell in self._workers:
            bell.close()
