"""The inference server: dynamic batches over all environments of its workers.

requests (rows) ──▶ [ full, or somebody is held up ] ──▶ newer weights? ──▶ policy ──▶ answers (rows)
"""

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from vla_rl.core.ipc.mailbox import ServerMailbox, WorkerState
from vla_rl.core.records import ActionBatch, Array, Observation, take_rows
from vla_rl.observability.meter import Meter

_IDLE_WAIT_S = 1.0


class BatchPolicy(Protocol):
    """The policy as the server sees it."""

    meter: Meter

    def refresh(self) -> int:
        """Copy newer published weights, if there are any; returns the policy version now in use."""

    def act(self, observation: Observation, draws: Mapping[str, Array], greedy: Array) -> ActionBatch:
        """Answer N rows. ``draws``: float32 [N, ...] each, as in ``PolicySpec.draws``; ``greedy``: bool [N]."""

    def offload(self) -> None:
        """Free the device. ``act`` is not called before ``onload``."""

    def onload(self) -> None:
        """Return to the device."""


@dataclass(frozen=True, slots=True)
class BatchRule:
    """When a batch fires. A request waits for others as long as that holds up nobody.

    * The batch is full.
    * Half of the rows whose workers are there are pending, and a worker is busy with others: simulators and inference
      work at the same time.
    * All workers wait, so that nothing more can come.
    * A request has waited ``max_wait_s``, and its worker is not known to be busy.
    """

    max_batch: int
    max_wait_s: float

    def seconds_left(self, pending: Sequence[int], requested_ns: Array, state: Array, now_ns: int) -> float:
        """How long to go on collecting: 0 means fire now, infinity until a worker says more.

        ``pending``: rows; ``requested_ns``, int64, and ``state``, as ``WorkerState``: [R], of all rows.
        """
        busy, absent = state == WorkerState.BUSY, state == WorkerState.ABSENT
        half = math.ceil((len(state) - np.count_nonzero(absent)) / 2)
        enough = min(self.max_batch, half) if busy.any() else self.max_batch
        if len(pending) >= enough or (absent | (state == WorkerState.WAITS)).all():
            return 0.0
        held_up = [int(requested_ns[row]) for row in pending if not busy[row]]
        return max(0.0, self.max_wait_s - (now_ns - min(held_up)) * 1e-9) if held_up else math.inf


class InferenceServer:
    """Answers requests until ``stop()``. ``run`` has a thread of its own; the other methods are called from outside."""

    def __init__(self, policy: BatchPolicy, mailbox: ServerMailbox, rule: BatchRule) -> None:
        self.policy = policy
        self.mailbox = mailbox
        self.rule = rule
        self.meter = Meter()
        self._pending: deque[int] = deque()
        self._queued: set[int] = set()
        self._stop = threading.Event()
        self._may_run = threading.Event()  # cleared between offload() and onload()
        self._may_run.set()
        self._offloaded = threading.Event()

    # consumes: requested rows. waits for: its doorbell. unblocked by: requests, the oldest one's deadline, offload(),
    # stop().
    def run(self) -> None:
        while not self._stop.is_set():
            if not self._may_run.is_set():
                self._stay_offloaded()
                continue
            with self.meter.time("wait"):
                rows = self._collect()
            if rows:
                with self.meter.time("infer"):
                    self._answer(rows)

    def stop(self) -> None:
        self._stop.set()
        self._may_run.set()
        self.mailbox.wake()

    def offload(self, timeout: float) -> None:
        """Take the policy off its device after the current batch; requests wait until ``onload``.

        Raises TimeoutError if that takes longer than ``timeout`` seconds.
        """
        self._may_run.clear()
        self.mailbox.wake()
        if not self._offloaded.wait(timeout):
            raise TimeoutError(f"waited {timeout:.0f} s for an inference server to offload its policy")

    def onload(self) -> None:
        """Bring the policy back to its device and go on."""
        self._offloaded.clear()
        self._may_run.set()

    # waits for: onload(). unblocked by: it, stop().
    def _stay_offloaded(self) -> None:
        with self.meter.time("offloaded"):
            self.policy.offload()
            self._offloaded.set()
            self._may_run.wait()
            if not self._stop.is_set():
                self.policy.onload()

    def _collect(self) -> list[int]:
        """The next batch of rows, oldest first; [] if nothing came for a while, or if the policy is to be offloaded."""
        requested, state = (self.mailbox.arrays[name] for name in ("requested_ns", "worker_state"))
        self._enqueue(self.mailbox.wait(0.0 if self._pending else _IDLE_WAIT_S))
        while self._pending and self._may_run.is_set() and not self._stop.is_set():
            left = self.rule.seconds_left(self._pending, requested, state, time.monotonic_ns())
            if left == 0.0:
                break
            self._enqueue(self.mailbox.wait(min(left, _IDLE_WAIT_S)))
        if not self._may_run.is_set():
            return []
        rows = [self._pending.popleft() for _ in range(min(self.rule.max_batch, len(self._pending)))]
        self._queued.difference_update(rows)
        return rows

    def _enqueue(self, rows: list[int]) -> None:
        for row in rows:
            if row not in self._queued:
                self._queued.add(row)
                self._pending.append(row)

    def _answer(self, rows: list[int]) -> None:
        arrays = self.mailbox.arrays
        index = np.asarray(rows)
        tickets = arrays["ticket"][index]  # copied before the observation, so that a newer request does not match
        observation = Observation(**{f.name: arrays[f.name][index] for f in fields(Observation)})
        self.policy.refresh()
        batch = self.policy.act(observation, take_rows(self.mailbox.draws, index), arrays["greedy"][index])
        self.mailbox.answer(rows, tickets, batch)
        self.meter.count("batches")
        self.meter.count("rows", len(rows))
