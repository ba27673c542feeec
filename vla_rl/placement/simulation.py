"""A simulated run: the plan's processes as a discrete-event simulation, to see what queues and turns make of the costs.

    worker: [ stage answered ─▶ simulate ─▶ finished? ─▶ render ─▶ request ] ◀──▶ server: [ batch full or old ─▶ infer ]
    gate (staleness) ◀── store: episodes ──▶ super-batch ──▶ learner ranks: [ micro-batches ... step ] ─▶ new version

The same rules as in the real runtime decide what waits for what; only computing is replaced by waiting as long as the
profile says. Results are *simulated*; ``vla-rl benchmark scaling`` holds them against the real runtime.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from vla_rl.placement.cost_model import Job
from vla_rl.placement.plan import Plan, Process
from vla_rl.placement.profile import Profile

Steps = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the measured part of a simulated run."""

    batches_per_s: float  # by the control steps played: trained are few super-batches, and not of the mean size
    busy: dict[str, float]  # share of the time that each resource was in use
    inference_batch: float  # mean rows


@dataclass(frozen=True, slots=True)
class Activity:
    """Use of a resource, for pictures; seconds."""

    resource: str
    role: str
    start: float
    end: float


@dataclass(slots=True)
class _Stage:
    """Slots that advance together, by their numbers."""

    worker: _Worker
    left: dict[int, float] = field(default_factory=dict)  # control steps that a running episode still has
    chunks: dict[int, int] = field(default_factory=dict)  # that it takes in all
    waiting: int = 0  # for answers


@dataclass(slots=True)
class _Worker:
    process: Process
    server: _Server  # that it asks
    called: simpy.Event  # there is something to do
    inbox: deque[tuple[_Stage, int | None]] = field(default_factory=deque)  # answered, or a slot that starts an episode
    stages: list[_Stage] = field(default_factory=list)


@dataclass(slots=True)
class _Server:
    process: Process
    room: simpy.Resource  # on the device; in a plan that offloads, the learner has it during an update
    enough: simpy.Event  # as many requests as it waits for are there
    needed: int = 0
    pending: deque[tuple[float, _Stage]] = field(default_factory=deque)  # when it was asked, and by whom; a row each
    version: int = 0


class SimulatedRun:
    """One run of ``warmup + batches`` super-batches; ``run()`` returns what the last ``batches`` showed."""

    def __init__(self, plan: Plan, profile: Profile, job: Job, cores: int, seed: int = 0) -> None:
        self.plan, self.profile, self.job = plan, profile, job
        self.clock = simpy.Environment()
        self._rng = np.random.default_rng(seed)
        self._num_cores = max(1, cores)
        on_cores = sum(not p.devices for p in (*plan.workers, *plan.servers, *plan.learners))
        # one for each process that wants one: then nobody waits, and asking would only cost the simulation time
        self._cores = simpy.Resource(self.clock, self._num_cores) if on_cores > self._num_cores else None
        self._locks = {name: simpy.Resource(self.clock) for name in plan.locks}
        self._use: dict[str, float] = {}
        self._measured_from = 0.0
        self.activities: list[Activity] = []
        self._rows = self._batches = 0
        self._servers = [_Server(p, simpy.Resource(self.clock), self.clock.event()) for p in plan.servers]
        self._workers = [self._make_worker(p) for p in plan.workers]
        self._idle: deque[tuple[_Stage, int]] = deque()
        self._running = self._buffered = self._taken = self._version = 0
        self._chunks: deque[int] = deque()  # of finished episodes, in order
        self._played = 0.0  # control steps
        self._filled = self.clock.event()

    def _make_worker(self, process: Process) -> _Worker:
        worker = _Worker(process, self._servers[self.plan.server_of(process.index)], self.clock.event())
        worker.stages = [_Stage(worker) for _ in range(self.plan.stages)]
        return worker

    def run(self, warmup: int, batches: int) -> Outcome:
        for worker in self._workers:
            for slot in range(self.plan.slots):
                self._idle.append((worker.stages[slot % self.plan.stages], slot))
            self.clock.process(self._simulate(worker))
        for server in self._servers:
            self.clock.process(self._infer(server))
        self._admit()
        self.clock.run(self.clock.process(self._learn(warmup)))
        self.activities.clear()
        start, used = self.clock.now, dict(self._use)
        self._measured_from = start
        rows, fired, played = self._rows, self._batches, self._played
        self.clock.run(self.clock.process(self._learn(batches)))
        seconds = self.clock.now - start
        played_batches = (self._played - played) / self.job.steps
        busy = {name: (total - used.get(name, 0.0)) / seconds for name, total in sorted(self._use.items())}
        busy["cores"] = busy.get("cores", 0.0) / self._num_cores
        return Outcome(played_batches / seconds, busy, (self._rows - rows) / max(1, self._batches - fired))

    # --- resources --------------------------------------------------------------------------------------------------

    def _compute(self, process: Process, seconds: float) -> Steps:
        """Hold what the process computes on; whoever shares it waits."""
        on_cores = not process.devices
        name = "cores" if on_cores else f"device {process.devices[0]}"
        resource = self._cores if on_cores else self._locks.get(process.turns or "")
        turn: AbstractContextManager[Any] = nullcontext() if resource is None else resource.request()
        with turn as request:
            if request is not None:
                yield request
            start = self.clock.now
            yield self.clock.timeout(seconds)
            since = max(start, self._measured_from)  # what began before is measured from there on
            self._use[name] = self._use.get(name, 0.0) + self.clock.now - since
            self.activities.append(Activity(name, process.role, start, self.clock.now))

    # --- simulators -------------------------------------------------------------------------------------------------

    def _simulate(self, worker: _Worker) -> Steps:
        size = self.job.chunk_size
        while True:
            if not worker.inbox:
                worker.called = self.clock.event()
                yield worker.called
            stage, starting = worker.inbox.popleft()
            if starting is not None:
                yield from self._compute(worker.process, self.profile.reset + self.profile.render(1))
                stage.left[starting] = steps = self._episode_steps()
                stage.chunks[starting] = math.ceil(steps / size)
                self._request(stage, 1)
                continue
            executed = sum(min(left, size) for left in stage.left.values()) / size
            yield from self._compute(worker.process, self.profile.simulate(executed))
            self._played += executed * size
            ended = [slot for slot, left in stage.left.items() if left <= size]
            for slot in ended:
                del stage.left[slot]
                self._finish(stage, slot)
            for slot in stage.left:
                stage.left[slot] -= size
            if stage.left:
                yield from self._compute(worker.process, self.profile.render(len(stage.left)))
                self._request(stage, len(stage.left))

    def _call(self, stage: _Stage, starting: int | None = None) -> None:
        """To the stage's worker: its answers are there, or a slot has an episode to start."""
        worker = stage.worker
        worker.inbox.append((stage, starting))
        if not worker.called.triggered:
            worker.called.succeed()

    def _episode_steps(self) -> float:
        return max(1.0, self.job.horizon * (1 - self._rng.random() * self.job.spread))

    def _request(self, stage: _Stage, rows: int) -> None:
        stage.waiting += rows
        server = stage.worker.server
        server.pending.extend([(self.clock.now, stage)] * rows)
        if len(server.pending) >= server.needed and not server.enough.triggered:
            server.enough.succeed()

    # --- inference --------------------------------------------------------------------------------------------------

    def _infer(self, server: _Server) -> Steps:
        pending = server.pending
        while True:
            yield from self._collect(server)
            with server.room.request() if self.plan.offload else nullcontext() as there:
                if there is not None:
                    yield there
                if server.version < self._version:
                    server.version = self._version
                    yield from self._compute(server.process, self.profile.transfer)
                rows = [pending.popleft() for _ in range(min(len(pending), self.plan.max_batch))]
                yield from self._compute(server.process, self.profile.infer(len(rows)))
            self._rows, self._batches = self._rows + len(rows), self._batches + 1
            for _, stage in rows:
                stage.waiting -= 1
                if not stage.waiting:
                    self._call(stage)

    def _collect(self, server: _Server) -> Steps:
        """Until the batch is full, or its oldest request has waited long enough."""
        if not server.pending:
            yield self._arrival(server, 1)
        left = server.pending[0][0] + self.job.max_wait - self.clock.now
        if len(server.pending) < self.plan.max_batch and left > 0:
            yield self._arrival(server, self.plan.max_batch) | self.clock.timeout(left)

    def _arrival(self, server: _Server, needed: int) -> simpy.Event:
        """Happens when so many requests are there. One event for all: one for each row would be most of the events."""
        server.needed, server.enough = needed, self.clock.event()
        return server.enough

    # --- store and learner ------------------------------------------------------------------------------------------

    def _finish(self, stage: _Stage, slot: int) -> None:
        self._running -= 1
        self._buffered += 1
        self._chunks.append(stage.chunks[slot])
        self._idle.append((stage, slot))
        self._admit()
        if self._buffered >= self.job.episodes and not self._filled.triggered:
            self._filled.succeed()

    def _admit(self) -> None:
        """As many episodes as the bound on staleness lets begin (``ReplayStore.capacity``)."""
        allowed = (self.job.max_age + self._version + 1 - self._taken) * self.job.episodes
        while self._idle and self._running + self._buffered < allowed:
            stage, slot = self._idle.popleft()
            self._running += 1
            self._call(stage, slot)

    def _learn(self, updates: int) -> Steps:
        for _ in range(updates):
            if self._buffered < self.job.episodes:
                self._filled = self.clock.event()
                yield self._filled
            self._buffered -= self.job.episodes
            self._taken += 1
            chunks = sum(self._chunks.popleft() for _ in range(self.job.episodes))
            self._admit()
            with ExitStack() as rooms:
                if self.plan.offload:
                    yield self.clock.all_of([rooms.enter_context(s.room.request()) for s in self._servers])
                yield from self._update(chunks)
            if self._is_published():
                self._version = self._taken
            self._admit()

    def _is_published(self) -> bool:
        return self._taken % self.job.publish_every == 0

    def _update(self, chunks: int) -> Steps:
        job, profile, ranks = self.job, self.profile, self.plan.learners
        come, go = (profile.onload, profile.offload) if self.plan.offload else (0.0, 0.0)
        mine = chunks / job.minibatches / len(ranks)
        passes = max(1, math.ceil(mine / job.micro_batch))
        forward = [profile.train(mine / passes) / 3] * passes * job.minibatches * job.extra_passes
        yield self._all(self._rank(rank, [come, *forward]) for rank in ranks)
        minibatch = [profile.train(mine / passes)] * passes + [profile.step]
        for _ in range(job.epochs * job.minibatches):
            yield self._all(self._rank(rank, minibatch) for rank in ranks)
        transfer = profile.transfer if self._is_published() else 0.0
        yield self._all(self._rank(rank, [transfer, go]) for rank in ranks)

    def _rank(self, process: Process, turns: Iterable[float]) -> Steps:
        for seconds in turns:
            if seconds:
                yield from self._compute(process, seconds)

    def _all(self, activities: Iterable[Steps]) -> simpy.Event:
        """Ranks wait for each other."""
        return self.clock.all_of([self.clock.process(activity) for activity in activities])
