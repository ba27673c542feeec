"""A simulated run: the plan's processes as a discrete-event simulation, with queues, device leases and stragglers.

    worker: [ split answered ─▶ simulate ─▶ ended? ─▶ render ─▶ request ] ◀──▶ server: [ batch fires ─▶ infer ]
    gate (staleness) ◀── store: episodes ──▶ super-batch ──▶ learner ranks: [ micro-batches ... step ] ─▶ new version

The same rules as in the real runtime decide what waits for what; computing is replaced by waiting for as long as the
profile says. ``vla-rl benchmark scaling`` compares the results with the real runtime.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from vla_rl.observability.spans import Span
from vla_rl.placement.cost_model import cores_of, crossings
from vla_rl.placement.plan import Plan, Process
from vla_rl.placement.profile import Profile
from vla_rl.placement.update_calls import update_calls
from vla_rl.placement.workload import Workload

Steps = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rates of the measured part of a simulated run."""

    batches_per_s: float  # by the control steps played: the few trained super-batches are not of the mean size
    busy: dict[str, float]  # share of the time that each resource was in use
    inference_batch: float  # mean rows


@dataclass(slots=True)
class _Split:
    """Envs of a worker that advance together; dictionaries are by env id."""

    worker: _Worker
    left: dict[int, float] = field(default_factory=dict)  # control steps left of a running episode
    chunks: dict[int, int] = field(default_factory=dict)  # of the whole episode
    waiting: int = 0  # requests without an answer


@dataclass(slots=True)
class _Worker:
    process: Process
    server: _Server  # the one that it asks
    called: simpy.Event  # there is something to do
    busy: bool = False
    inbox: deque[tuple[_Split, int | None]] = field(default_factory=deque)  # answered, or an env that starts an episode
    splits: list[_Split] = field(default_factory=list)


@dataclass(slots=True)
class _Server:
    process: Process
    memory: simpy.Resource  # of its device; the learner holds it during an update, in a plan that offloads
    enough: simpy.Event  # ``needed`` requests are pending, or a worker of these waits
    rows: int  # of all its workers
    needed: int = 0
    busy: int = 0  # workers
    pending: deque[tuple[float, _Split]] = field(default_factory=deque)  # one entry a row: time and origin of a request
    policy_version: int = 0


class SimulatedRun:
    """One run of ``warmup + batches`` super-batches; ``run()`` measures the last ``batches``."""

    def __init__(self, plan: Plan, profile: Profile, workload: Workload, seed: int = 0) -> None:
        self.plan, self.profile, self.workload = plan, profile, workload
        self.clock = simpy.Environment()
        self._rng = np.random.default_rng(seed)
        on_cores = Counter(p.node for p in plan.processes if not p.devices)
        cores = [max(1, machine.cores) for machine in plan.machines]
        # If there is a core for each process, nobody waits, and the resource would only slow the simulation down.
        self._cores = {n: simpy.Resource(self.clock, cores[n]) for n, count in on_cores.items() if count > cores[n]}
        self._sizes = Counter[str]()  # of "cores" and, where they exist, "remote cores"
        for machine, size in zip(plan.machines, cores, strict=True):
            self._sizes["cores" if machine.devices else "remote cores"] += size
        self._links_free = [0.0] * plan.nodes  # when each node's link will have passed on what was given to it
        self._locks = {name: simpy.Resource(self.clock) for name in plan.locks}
        self._use: dict[str, float] = {}
        self._measured_from = 0.0
        self.spans: list[Span] = []  # since the warm-up; their rows are resources
        self._rows = self._batches = 0
        self._servers = [
            _Server(p, simpy.Resource(self.clock), self.clock.event(), plan.clients_of(p.index) * plan.envs_per_worker)
            for p in plan.servers
        ]
        self._workers = list(map(self._make_worker, plan.workers, plan.servers_by_worker()))
        self._idle: deque[tuple[_Split, int]] = deque()
        self._running = self._buffered = self._taken = self._policy_version = 0
        self._chunks: deque[int] = deque()  # of finished episodes, in order
        self._played = 0.0  # control steps
        self._observed: deque[int] = deque()  # chunks of finished episodes that the world model has not imagined from
        self._ready = 0  # of the buffered episodes: those that need not wait for what is imagined from them
        model = plan.world_model
        self._imaginer = None if model is None else _Worker(model, self._servers[0], self.clock.event())
        self._filled = self.clock.event()

    def _make_worker(self, process: Process, server: int) -> _Worker:
        worker = _Worker(process, self._servers[server], self.clock.event())
        worker.splits = [_Split(worker) for _ in range(self.plan.splits)]
        return worker

    def run(self, warmup: int, batches: int) -> Outcome:
        for worker in self._workers:
            for env_id in range(self.plan.envs_per_worker):
                self._idle.append((worker.splits[env_id % self.plan.splits], env_id))
            self.clock.process(self._simulate(worker))
        if self._imaginer is not None:
            self.clock.process(self._imagine(self._imaginer))
        for server in self._servers:
            self.clock.process(self._infer(server))
        self._admit()
        self.clock.run(self.clock.process(self._learn(warmup)))
        self.spans.clear()
        start, used = self.clock.now, dict(self._use)
        self._measured_from = start
        rows, fired, played = self._rows, self._batches, self._played
        self.clock.run(self.clock.process(self._learn(batches)))
        seconds = self.clock.now - start
        played_batches = (self._played - played) / self.workload.steps
        busy = {name: (total - used.get(name, 0.0)) / seconds for name, total in sorted(self._use.items())}
        for name, size in self._sizes.items():
            busy[name] = busy.get(name, 0.0) / size
        return Outcome(played_batches / seconds, busy, (self._rows - rows) / max(1, self._batches - fired))

    def _compute(self, process: Process, activity: str, seconds: float) -> Steps:
        """Hold the device or a core for this time, after waiting for others that share it."""
        on_cores = not process.devices
        name = cores_of(process) if on_cores else f"device {process.devices[0]}"
        resource = self._cores.get(process.node) if on_cores else self._locks.get(process.lock or "")
        lease: AbstractContextManager[Any] = nullcontext() if resource is None else resource.request()
        with lease as request:
            if request is not None:
                yield request
            start = self.clock.now
            yield self.clock.timeout(seconds)
            since = max(start, self._measured_from)  # counts only the part after the warm-up
            self._use[name] = self._use.get(name, 0.0) + self.clock.now - since
            self.spans.append(Span(process.role, process.index, activity, start, self.clock.now, row=name))

    def _simulate(self, worker: _Worker) -> Steps:
        size, render = self.workload.chunk_size, self.profile.rendering(worker.process.remote)
        while True:
            if not worker.inbox:
                yield self._next_call(worker)
            split, starting = worker.inbox.popleft()
            if starting is not None:
                yield from self._compute(worker.process, "reset", self.profile.reset + render(1))
                split.left[starting] = steps = self._episode_steps()
                split.chunks[starting] = math.ceil(steps / size)
                self._request(split, 1)
                continue
            executed = sum(min(left, size) for left in split.left.values()) / size
            yield from self._compute(worker.process, "simulate", self.profile.simulate(executed))
            self._played += executed * size
            ended = [env_id for env_id, left in split.left.items() if left <= size]
            for env_id in ended:
                del split.left[env_id]
                self._finish(split, env_id)
            for env_id in split.left:
                split.left[env_id] -= size
            if split.left:
                yield from self._compute(worker.process, "render", render(len(split.left)))
                self._request(split, len(split.left))

    def _call(self, split: _Split, starting: int | None = None) -> None:
        """Tell the split's worker that its answers are there, or that an env starts an episode."""
        worker = split.worker
        worker.inbox.append((split, starting))
        self._wake(worker)

    def _wake(self, worker: _Worker) -> None:
        worker.server.busy += not worker.busy
        worker.busy = True
        if not worker.called.triggered:
            worker.called.succeed()

    def _next_call(self, worker: _Worker) -> simpy.Event:
        """Triggered when there is something to do for a worker that has nothing now."""
        server = worker.server
        server.busy -= worker.busy
        worker.busy = False
        if server.pending and not server.enough.triggered:
            server.enough.succeed()
        worker.called = self.clock.event()
        return worker.called

    def _episode_steps(self) -> float:
        return max(1.0, self.workload.horizon * (1 - self._rng.random() * self.workload.spread))

    def _request(self, split: _Split, rows: int) -> None:
        split.waiting += rows
        if split.worker.process.remote:
            self._after(self._transfer(split.worker, rows), lambda: self._arrive(split, rows))
        else:
            self._arrive(split, rows)

    def _arrive(self, split: _Split, rows: int) -> None:
        server = split.worker.server
        server.pending.extend([(self.clock.now, split)] * rows)
        if len(server.pending) >= server.needed and not server.enough.triggered:
            server.enough.succeed()

    def _infer(self, server: _Server) -> Steps:
        pending = server.pending
        while True:
            yield from self._collect(server)
            with server.memory.request() if self.plan.offload else nullcontext() as onloaded:
                if onloaded is not None:
                    yield onloaded
                if server.policy_version < self._policy_version:
                    server.policy_version = self._policy_version
                    yield from self._compute(server.process, "refresh", self.profile.weight_sync)
                rows = [pending.popleft() for _ in range(min(len(pending), self.plan.max_batch))]
                yield from self._compute(server.process, "act", self.profile.infer(len(rows)))
            self._rows, self._batches = self._rows + len(rows), self._batches + 1
            for _, split in rows:
                split.waiting -= 1
                if not split.waiting:
                    self._answer(split)

    def _answer(self, split: _Split) -> None:
        if split.worker.process.remote:  # an answer is small: the rate of the link does not matter
            self._after(self.plan.machines[split.worker.process.node].link.delay, lambda: self._call(split))
        else:
            self._call(split)

    def _transfer(self, worker: _Worker, rows: int) -> float:
        """Seconds until a remote worker's requests have crossed both links, on which one transfer follows the other."""
        now, link = self.clock.now, self.plan.machines[worker.process.node].link
        nbytes, arrival = rows * self.workload.row_bytes, now
        for node, times in crossings(worker.process, worker.server.process).items():
            once = nbytes / self.plan.machines[node].link.rate
            start = max(now, self._links_free[node])
            self._links_free[node] = start + times * once
            arrival = max(arrival, start + once)
        return arrival + link.delay - now

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self.clock.timeout(seconds).callbacks.append(lambda _: action())

    def _collect(self, server: _Server) -> Steps:
        """Wait until a batch fires, as ``BatchRule`` of an inference server says."""
        if not server.pending:
            yield self._arrival(server, 1)
        while server.busy:
            enough = min(self.plan.max_batch, math.ceil(server.rows / 2))
            held_up = next((since for since, split in server.pending if not split.worker.busy), math.inf)
            left = held_up + self.workload.max_wait - self.clock.now
            if len(server.pending) >= enough or left <= 0:
                return
            more = self._arrival(server, enough)
            yield more if left == math.inf else more | self.clock.timeout(left)

    def _arrival(self, server: _Server, needed: int) -> simpy.Event:
        """Triggered when ``needed`` requests are pending. One event for all rows keeps the simulation fast."""
        server.needed, server.enough = needed, self.clock.event()
        return server.enough

    def _finish(self, split: _Split, env_id: int) -> None:
        self._running -= 1
        self._buffered += 1
        self._chunks.append(split.chunks[env_id])
        self._idle.append((split, env_id))
        self._admit()
        if self._imaginer is None:
            self._complete()
        else:
            self._observed.append(split.chunks[env_id])
            self._wake(self._imaginer)

    def _complete(self) -> None:
        """Another buffered episode can be trained on."""
        self._ready += 1
        if self._ready >= self.workload.episodes and not self._filled.triggered:
            self._filled.succeed()

    def _imagine(self, worker: _Worker) -> Steps:
        """Imagine from one finished episode after the other, and learn from it."""
        split = _Split(worker)
        while True:
            while not self._observed:
                yield self._next_call(worker)
            chunks = self._observed.popleft()
            encoding = self.profile.infer(chunks)  # by the frozen policy
            yield from self._compute(worker.process, "encode", encoding)
            left = chunks * self.workload.branches
            while left:
                rows = min(left, self.plan.envs_per_worker)
                self._request(split, rows)
                while not worker.inbox:
                    yield self._next_call(worker)
                worker.inbox.clear()
                yield from self._compute(worker.process, "imagine", rows * self.profile.imagine(1))
                left -= rows
            yield from self._compute(worker.process, "model_train", self.profile.model_train(chunks))
            self._complete()

    def _admit(self) -> None:
        """Start as many episodes as the bound on staleness allows (``ReplayStore.capacity``)."""
        allowed = (self.workload.max_staleness + self._policy_version + 1 - self._taken) * self.workload.episodes
        while self._idle and self._running + self._buffered < allowed:
            split, env_id = self._idle.popleft()
            self._running += 1
            self._call(split, env_id)

    def _learn(self, updates: int) -> Steps:
        for _ in range(updates):
            if self._ready < self.workload.episodes:
                self._filled = self.clock.event()
                yield self._filled
            self._buffered -= self.workload.episodes
            self._ready -= self.workload.episodes
            self._taken += 1
            chunks = sum(self._chunks.popleft() for _ in range(self.workload.episodes))
            self._admit()
            with ExitStack() as held:
                if self.plan.offload:
                    yield self.clock.all_of([held.enter_context(s.memory.request()) for s in self._servers])
                yield from self._update(chunks)
            if self._is_published():
                self._policy_version = self._taken
            self._admit()

    def _is_published(self) -> bool:
        return self._taken % self.workload.publish_every == 0

    def _update(self, chunks: int) -> Steps:
        profile = self.profile
        onload, offload = (profile.onload, profile.offload) if self.plan.offload else (0.0, 0.0)
        yield self._on_all_ranks([("onload", onload)])
        for calls in update_calls(profile, self.workload, chunks, len(self.plan.learners)).parts():
            yield self._on_all_ranks([(call.activity, call.seconds) for call in calls])
        sync = profile.weight_sync if self._is_published() else 0.0
        yield self._on_all_ranks([("publish", sync), ("offload", offload)])

    def _on_all_ranks(self, leases: Iterable[tuple[str, float]]) -> simpy.Event:
        """Each rank has these activities, each with a device lease of its own; triggered when all ranks are done."""
        return self.clock.all_of([self.clock.process(self._rank(rank, leases)) for rank in self.plan.learners])

    def _rank(self, process: Process, leases: Iterable[tuple[str, float]]) -> Steps:
        for activity, seconds in leases:
            if seconds:
                yield from self._compute(process, activity, seconds)


def forecast(plan: Plan, profile: Profile, workload: Workload) -> list[Span]:
    """Two super-batches, after the queues have been filled."""
    run = SimulatedRun(plan, profile, workload)
    run.run(warmup=workload.max_staleness + 2, batches=2)
    return run.spans
