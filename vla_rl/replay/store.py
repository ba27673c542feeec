"""The replay store: who plays what, what became of it, and the next super-batch.

    workers ──take──▶ [ evaluation orders, then the admission gate ] ──▶ episodes
    workers ──add───▶ [ groups ] ──▶ age bound ──▶ collate (own thread) ──next_batch──▶ learner ──advance──▶ gate

Two mechanisms bound staleness. At admission an episode starts only if it will be young enough when its turn to be
trained comes (the gate of AReaL, arXiv:2505.24298); at consumption whatever became too old all the same is dropped. The
update that a super-batch will be trained at is known when it is filled, so its ages are exact.

Conservation: every episode handed out ends exactly once (``Ledger``).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vla_rl.core.records import Episode, EpisodeResult, GroupRules, SuperBatch, Trajectory
from vla_rl.observability.meter import Meter
from vla_rl.replay.groups import Groups
from vla_rl.replay.schedule import TaskRule, TaskSchedule, start_state, training_group
from vla_rl.replay.super_batch import collate


@dataclass(frozen=True, slots=True)
class StoreRules:
    """What the store needs to know of the run."""

    batch_episodes: int  # B
    max_age: int
    num_tasks: int
    seed: int
    iterations: int  # no episode is started that would be trained later than this
    groups: GroupRules = field(default_factory=GroupRules)  # B is a multiple of its size
    task_rule: TaskRule = "in_turn"
    init_states: int | None = None  # start from this many benchmark initial states of each task; None: from samples


@dataclass(slots=True)
class Ledger:
    """Where all episodes went. started = trained + stale + filtered + evaluated + lost + those still under way."""

    started: int = 0
    trained: int = 0
    stale: int = 0  # finished, but too old when their turn came, they or another of their group
    filtered: int = 0  # finished, but their group's success rate was outside the bounds
    evaluated: int = 0
    lost: int = 0  # with a dead worker, or cut off when a run stopped

    @property
    def ended(self) -> int:
        return self.trained + self.stale + self.filtered + self.evaluated + self.lost


class ReplayStore:
    """Thread-safe; every blocking call has a time limit and returns empty-handed when it passes."""

    def __init__(self, rules: StoreRules) -> None:
        self.rules = rules
        self.meter = Meter()
        self.ledger = Ledger()
        self.version = 0  # newest published policy version
        self._batches = 0  # super-batches handed out; the next one is trained at this version
        self._next_id = 0
        self._running: dict[int, tuple[int, Episode]] = {}  # id -> (worker, episode)
        self._next_group = 0
        self._played = self._succeeded = 0  # training episodes that have come to their end, filtered ones included
        self._tasks = TaskSchedule(rules.num_tasks, rules.seed, rules.task_rule)
        self._due: deque[Episode] = deque()  # the rest of a group that has begun, and what dead workers left
        self._evaluations: deque[Episode] = deque()
        self._results: list[EpisodeResult] = []
        self._buffer = Groups(rules.groups)
        self._filled: tuple[SuperBatch, list[Trajectory]] | None = None
        self._in_training = 0
        self._filling = False
        self._stopped = False
        self._changed = threading.Condition()
        self._collator = threading.Thread(target=self._fill, name="collate", daemon=True)
        self._collator.start()

    # --- workers ----------------------------------------------------------------------------------------------------

    def take(self, worker: int, count: int, timeout: float) -> list[Episode]:
        """Up to ``count`` episodes for a worker: evaluations first, then what the gate admits."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._stopped:
                orders = [self._order() for _ in range(min(count, self._available()))]
                if orders:
                    self._running.update({e.id: (worker, e) for e in orders})
                    self.ledger.started += len(orders)
                    return orders
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            return []

    def add(self, worker: int, finished: Trajectory | EpisodeResult) -> None:
        """Take in a finished episode. One that was counted as lost already (its worker was given up) is refused."""
        with self._changed:
            if self._running.pop(finished.episode.id, None) is None:
                self.meter.count("refused")
                return
            if isinstance(finished, EpisodeResult):
                self.ledger.evaluated += 1
                self._results.append(finished)
            else:
                self._played += 1
                self._succeeded += finished.success
                self._tasks.observe(finished.episode.task, finished.success)
                self.ledger.filtered += self._buffer.add(finished)
            self._changed.notify_all()

    def worker_lost(self, worker: int) -> int:
        """A worker died: its episodes are lost, and others like them are played again. Returns how many."""
        with self._changed:
            lost = [e for owner, e in self._running.values() if owner == worker]
            self._lose(lost)
            self._changed.notify_all()
            return len(lost)

    def _lose(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            del self._running[episode.id]
            (self._evaluations if episode.evaluation else self._due).append(episode)
        self.ledger.lost += len(episodes)

    def _available(self) -> int:
        if self._evaluations:
            return len(self._evaluations)
        return len(self._due) + self.capacity()

    def capacity(self) -> int:
        """Training episodes, in whole groups, that may begin now: none becomes too old or belongs to no iteration."""
        b = self.rules.batch_episodes
        running = sum(not e.evaluation for _, e in self._running.values())
        under_way = running + len(self._due) + len(self._buffer) + (b if self._filled or self._filling else 0)
        last_batch = min(self.rules.max_age + self.version + 1, self.rules.iterations)
        free = max(0, (last_batch - self._batches) * b - under_way)
        return free - free % self.rules.groups.size

    def _order(self) -> Episode:
        number, self._next_id = self._next_id, self._next_id + 1
        if not self._evaluations and not self._due:
            self._due.extend(self._next_training_group())
        return replace((self._evaluations or self._due).popleft(), id=number)

    def _next_training_group(self) -> list[Episode]:
        rules, number = self.rules, self._next_group
        self._next_group += 1
        start = None
        if rules.init_states is not None:
            start = start_state(number, rules.num_tasks, rules.init_states, rules.seed)
        return training_group(number, rules.groups.size, self._tasks.task(number), rules.seed, start)

    # --- learner ----------------------------------------------------------------------------------------------------

    def next_batch(self, timeout: float) -> SuperBatch | None:
        """The next super-batch once it is filled and collated; None when ``timeout`` seconds passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._filled is not None or self._stopped, timeout)
            if self._filled is None:
                return None
            batch, _ = self._filled
            self._filled = None
            self._batches += 1
            self._in_training += batch.num_episodes
            self._changed.notify_all()
            return batch

    def advance(self, version: int) -> None:
        """The update on the batch handed out last is done; ``version`` is the newest published, and opens the gate."""
        with self._changed:
            self.version = version
            self.ledger.trained += self._in_training
            self._in_training = 0
            self._changed.notify_all()

    def _fill(self) -> None:
        """Collate the next super-batch while the learner trains on the one before."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or (self._filled is None and self._select()))
                if self._stopped:
                    return
                chosen = self._buffer.take(self.rules.batch_episodes)
                version = self._batches
                self._filling = True
            with self.meter.time("collate"):
                batch = collate(chosen, version)
            with self._changed:
                self._filled, self._filling = (batch, chosen), False
                self._changed.notify_all()

    def _select(self) -> bool:
        """Drop what is too old for the next batch; True where enough is left to fill it."""
        stale = self._buffer.drop_older_than(self._batches - self.rules.max_age)
        if stale:
            self.ledger.stale += stale
            self._changed.notify_all()  # the gate has opened
        return self._buffer.ready(self.rules.batch_episodes)

    # --- evaluation -------------------------------------------------------------------------------------------------

    def order_evaluation(self, episodes: Sequence[Episode]) -> None:
        """Play these before any further training episode (ids are given anew)."""
        with self._changed:
            self._results = []
            self._evaluations.extend(episodes)
            self._changed.notify_all()

    def evaluation_results(self, count: int, timeout: float) -> list[EpisodeResult] | None:
        """All results of the last order once there are ``count``; None when ``timeout`` seconds passed."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._results) >= count or self._stopped, timeout):
                return None
            return list(self._results)

    def evaluations_done(self) -> int:
        with self._changed:
            return len(self._results)

    # --- life -------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Release every waiting caller."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def counters(self) -> dict[str, int]:
        """The ledger and what is under way; the sums agree at any moment."""
        with self._changed:
            buffered = len(self._buffer) + (self.rules.batch_episodes if self._filled or self._filling else 0)
            outcomes = {"played": self._played, "succeeded": self._succeeded}
            under_way = {"running": len(self._running), "buffered": buffered, "in_training": self._in_training}
            return asdict(self.ledger) | under_way | outcomes | {"version": self.version, "capacity": self.capacity()}

    def state(self) -> tuple[dict[str, Any], list[Trajectory]]:
        """(JSON-able counters, finished but untrained trajectories), for a checkpoint taken between two updates."""
        with self._changed:
            self._changed.wait_for(lambda: not self._filling, timeout=60.0)
            if self._in_training:
                raise RuntimeError(f"{self._in_training} episodes are being trained: checkpoint after advance()")
            running = [asdict(e) for _, e in self._running.values() if not e.evaluation]
            record = {
                "ledger": asdict(self.ledger),
                "batches": self._batches,
                "next_id": self._next_id,
                "next_group": self._next_group,
                "task_failure": list(self._tasks.failure),
                "due": running + [asdict(e) for e in self._due],
                "lost": len(self._running),
            }
            return record, (self._filled[1] if self._filled else []) + list(self._buffer)

    def restore(self, record: dict[str, Any], trajectories: Sequence[Trajectory]) -> None:
        """Go on from ``state()``: what was running then is lost, and is played again."""
        with self._changed:
            self.ledger = Ledger(**record["ledger"])
            self.ledger.lost += record["lost"]
            self.version = self._batches = record["batches"]  # a resumed run begins with its newest weights published
            self._next_id = record["next_id"]
            self._next_group = record["next_group"]
            self._tasks.restore(record["task_failure"])
            self._due.extend(Episode(**e) for e in record["due"])
            self.ledger.filtered += sum(self._buffer.add(trajectory) for trajectory in trajectories)
            self._changed.notify_all()
