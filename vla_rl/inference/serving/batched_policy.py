"""An inference server for clients that are not env workers: each has a seat, which is a row of the server's mailbox.

seat.chunk(row) ──▶ [ row of shared memory ] ──▶ InferenceServer: one batch of all that came ──▶ actions
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vla_rl.core.ipc.mailbox import PoolAddress, ServerMailbox, WorkerMailbox, create_pool
from vla_rl.core.records import Array, EnvSpec, PolicySpec
from vla_rl.inference.inference_server import BatchPolicy, BatchRule, InferenceServer
from vla_rl.inference.serving.offer import Offer, RequestError, Row

ANSWER_S = 300.0  # longest wait for a chunk: the first batch of a policy may compile


class Full(Exception):
    """All seats are taken."""


class BatchedPolicy:
    """A policy that answers the clients of one event loop together. ``run`` has to be running meanwhile."""

    def __init__(
        self,
        policy: BatchPolicy,
        spec: EnvSpec,
        policy_spec: PolicySpec,
        rule: BatchRule,
        seats: int,  # clients at a time
        folder: Path,  # new, for the rows and doorbells
        greedy: bool = True,  # the most likely actions; else they are sampled
        seed: int = 0,  # of sampling
    ) -> None:
        self.offer = Offer(spec, policy_spec.chunk_size)
        address = PoolAddress(str(folder), "clients", 1, seats)
        create_pool(address, spec, policy_spec)
        self._mailbox = WorkerMailbox(address, 0)
        self.server = InferenceServer(policy, ServerMailbox(address), rule)
        self._draws, self._greedy, self._rng = policy_spec.draws, greedy, np.random.default_rng(seed)
        self._free = list(range(seats))
        self._answers: dict[int, asyncio.Future[None]] = {}

    # consumes: rows of clients. waits for: the inference server's thread. unblocked by: stop().
    async def run(self) -> None:
        """Answer until ``stop``. Raises what the policy raises, which ends the thread of the inference server."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._mailbox.fileno(), self._deliver)
        try:
            await asyncio.to_thread(self.server.run)
        finally:
            loop.remove_reader(self._mailbox.fileno())

    def stop(self) -> None:
        self.server.stop()

    @contextlib.contextmanager
    def seat(self) -> Iterator[Seat]:
        """A client's place for the time of the block. Raises Full."""
        if not self._free:
            raise Full
        number = self._free.pop()
        try:
            yield Seat(self, number)
        finally:
            self._free.append(number)

    # waits for: the answer to this row. unblocked by: it, the time limit.
    async def chunk(self, seat: int, row: Row) -> Array:
        """float32 [K, A]. Raises RequestError after ``ANSWER_S``."""
        seen = self._mailbox.observation
        seen.images[seat], seen.proprio[seat] = row.images, row.proprio
        seen.task[seat], seen.elapsed[seat] = row.task, 0.0
        draws = {name: numbers.draw(self._rng)[None] for name, numbers in self._draws.items()}
        answer = self._answers[seat] = asyncio.get_running_loop().create_future()
        self._mailbox.request([seat], draws, np.array([self._greedy]))
        try:
            async with asyncio.timeout(ANSWER_S):
                await answer
        except TimeoutError:
            raise RequestError(f"no actions within {ANSWER_S:.0f} s: the policy is too slow, or hangs") from None
        finally:
            del self._answers[seat]
        actions: Array = self._mailbox.answer([seat])[0].actions[0]
        return actions

    def _deliver(self) -> None:
        for seat in self._mailbox.wait(0.0):
            if seat in self._answers:
                self._answers[seat].set_result(None)


class Seat:
    """One client's place: a row of the mailbox, with one request at a time."""

    def __init__(self, policy: BatchedPolicy, number: int) -> None:
        self.offer, self._policy, self._number = policy.offer, policy, number

    async def actions(self, row: Row) -> Array:
        """float64 [K, A], as data sets of the simulator have them. Raises RequestError."""
        return self.offer.actions(await self._policy.chunk(self._number, row))
