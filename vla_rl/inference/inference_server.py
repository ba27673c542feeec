"""The inference server: dynamic batches over all slots of its workers.

requests (rows) ──▶ [ oldest request decides when to fire ] ──▶ newest weights? ──▶ policy ──▶ answers (rows)
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vla_rl.core.ipc.mailbox import ServerMailbox
from vla_rl.core.records import ActionBatch, Observation
from vla_rl.observability.meter import Meter

_IDLE_WAIT_S = 1.0


class Actor(Protocol):
    """The policy as the server sees it."""

    def refresh(self) -> int:
        """Take over the newest published weights, if newer; returns the version now in use."""

    def act(self, observation: Observation, uniforms: np.ndarray, greedy: np.ndarray) -> ActionBatch:
        """uniforms: float32 [N, K, A]; greedy: bool [N]."""

    def offload(self) -> None:
        """Leave the device; nothing is asked before ``onload``."""

    def onload(self) -> None:
        """Come back to it."""


@dataclass(frozen=True, slots=True)
class BatchRule:
    """When a batch fires: full, or its oldest request has waited long enough, whichever comes first."""

    max_batch: int
    max_wait_s: float

    def seconds_left(self, pending: int, oldest_ns: int, now_ns: int) -> float:
        """How long to go on collecting; 0 means fire now."""
        if pending >= self.max_batch:
            return 0.0
        return max(0.0, self.max_wait_s - (now_ns - oldest_ns) * 1e-9)


class InferenceServer:
    """Answers requests until told to stop."""

    def __init__(self, actor: Actor, mailbox: ServerMailbox, rule: BatchRule) -> None:
        self.actor = actor
        self.mailbox = mailbox
        self.rule = rule
        self.meter = Meter()
        self._pending: deque[int] = deque()
        self._queued: set[int] = set()
        self._stop = threading.Event()
        self._wanted = threading.Event()  # on the device; cleared between ``leave`` and ``come_back``
        self._wanted.set()
        self._left = threading.Event()

    # consumes: requested rows. waits for: its doorbell. unblocked by: requests, the oldest one's deadline, leave(),
    # stop().
    def run(self) -> None:
        while not self._stop.is_set():
            if not self._wanted.is_set():
                self._stay_away()
                continue
            with self.meter.time("wait"):
                rows = self._collect()
            if rows:
                with self.meter.time("infer"):
                    self._answer(rows)

    def stop(self) -> None:
        self._stop.set()
        self._wanted.set()
        self.mailbox.wake()

    def leave(self, timeout: float) -> None:
        """Take the policy off its device, after the batch under way; requests wait until ``come_back``.

        Called from another thread than ``run``. Raises TimeoutError where a batch takes longer than ``timeout`` s.
        """
        self._wanted.clear()
        self.mailbox.wake()
        if not self._left.wait(timeout):
            raise TimeoutError(f"waited {timeout:.0f} s for an inference server to leave its device")

    def come_back(self) -> None:
        """Go on, with the policy on its device."""
        self._left.clear()
        self._wanted.set()

    # waits for: come_back(). unblocked by: it, stop().
    def _stay_away(self) -> None:
        with self.meter.time("away"):
            self.actor.offload()
            self._left.set()
            self._wanted.wait()
            if not self._stop.is_set():
                self.actor.onload()

    def _collect(self) -> list[int]:
        """The next batch of rows, oldest first; [] when nothing came in a while, or when it is to leave."""
        requested = self.mailbox.arrays["requested_ns"]
        self._enqueue(self.mailbox.wait(0.0 if self._pending else _IDLE_WAIT_S))
        while self._pending and self._wanted.is_set() and not self._stop.is_set():
            oldest = int(requested[self._pending[0]])
            left = self.rule.seconds_left(len(self._pending), oldest, time.monotonic_ns())
            if left == 0.0:
                break
            self._enqueue(self.mailbox.wait(left))
        if not self._wanted.is_set():
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
        tickets = arrays["ticket"][index]  # copied before the observation: a newer request will not match it
        observation = Observation(arrays["images"][index], arrays["proprio"][index], arrays["task"][index])
        self.actor.refresh()
        batch = self.actor.act(observation, arrays["uniforms"][index], arrays["greedy"][index])
        self.mailbox.answer(rows, tickets, batch)
        self.meter.count("batches")
        self.meter.count("rows", len(rows))
