"""The replay store: assigns episodes to env workers, keeps finished ones, and forms the next super-batch.

    workers ──take──▶ [ evaluations first, then the admission gate ] ──▶ episodes
    workers ──add───▶ [ groups ] ──▶ staleness bound ──▶ collate (own thread) ──next_batch──▶ learner ──advance──▶ gate

Two mechanisms bound staleness. Admission: an episode starts only if it can be trained in time (the gate of AReaL,
arXiv:2505.24298). Consumption: what became too stale nevertheless is dropped, if ``StoreRules.drop_stale``. The policy
version that a super-batch updates is known when the batch is filled, so its staleness is exact.

Conservation: every episode that was assigned ends exactly once (``Ledger``).
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from vla_rl.core.records import EpisodeResult, EpisodeSpec, SuperBatch, Trajectory
from vla_rl.observability.meter import Meter
from vla_rl.replay.groups import Groups, young_enough
from vla_rl.replay.imagined import Bundles
from vla_rl.replay.ledger import Ledger
from vla_rl.replay.retries import Retries
from vla_rl.replay.rules import StoreRules
from vla_rl.replay.schedule import TaskSchedule, start_state, training_group
from vla_rl.replay.super_batch import collate


class ReplayStore:
    """Thread-safe; every blocking call has a time limit, after which it returns nothing."""

    def __init__(self, rules: StoreRules, *, is_open: bool = True) -> None:
        """A store that is not open assigns nothing until ``open()``."""
        self.rules = rules
        self.meter = Meter()
        self.ledger = Ledger()
        self.published_version = 0
        self._next_version = 0  # the policy version that the next super-batch updates
        self._is_open = is_open
        self._next_id = 0
        self._running: dict[int, tuple[int, EpisodeSpec]] = {}  # id -> (worker, episode)
        self._dead = set[int]()  # workers
        self._retries = Retries()
        self._given_up = set[int]()  # groups with an episode that was set aside
        self._set_aside = 0
        self._next_group = 0
        # of finished training episodes, including filtered ones
        self._played = self._succeeded = self._steps = self._chunks = 0
        self._tasks = TaskSchedule(rules.num_tasks, rules.seed, rules.task_rule)
        self._due: deque[EpisodeSpec] = deque()  # the rest of a group that has begun
        self._evaluations: deque[EpisodeSpec] = deque()
        self._results: list[EpisodeResult] = []
        self._buffer = Groups(rules.groups)
        self._bundles = Bundles()
        self._taken: list[Trajectory] = []  # new episodes of the super-batch that is being filled, or filled
        self._filled: SuperBatch | None = None
        self._earlier: deque[list[Trajectory]] = deque(maxlen=rules.reuse - 1)  # new episodes of the last super-batches
        self._in_training = 0
        self._failure: Exception | None = None  # of the thread that fills
        self._stopped = False
        self._changed = threading.Condition()
        self._collator = threading.Thread(target=self._fill, name="collate", daemon=True)
        self._collator.start()

    def take(self, worker: int, count: int, timeout: float) -> list[EpisodeSpec]:
        """Assign up to ``count`` episodes to a worker: evaluations first, then what the gate admits.

        ``worker``: a number that no successor of a dead worker has. A call of a dead one may be waiting still.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._stopped and worker not in self._dead:
                if episodes := self._assign(worker, count):
                    self._running.update({e.id: (worker, e) for e in episodes})
                    self.ledger.started += len(episodes)
                    return episodes
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            return []

    def _assign(self, worker: int, count: int) -> list[EpisodeSpec]:
        """Up to ``count`` episodes that may start in a worker now."""
        own = [e for owner, e in self._running.values() if owner == worker]
        if not self._is_open or self._retries.reserves(worker, own):
            return []
        if not own and (again := self._retries.take(worker)) is not None:
            self._changed.notify_all()  # another worker may be needed no more
            return [self._numbered(again)]
        return [self._next_episode() for _ in range(min(count, self._available()))]

    def add(self, worker: int, finished: Trajectory | EpisodeResult) -> bool:
        """Take in a finished episode. One that is already counted as lost is refused (False)."""
        with self._changed:
            if self._running.pop(finished.episode.id, None) is None:
                self.meter.count("refused")
                return False
            self._retries.ended(finished.episode)
            if isinstance(finished, EpisodeResult):
                self.ledger.evaluated += 1
                self._results.append(finished)
            else:
                self._played += 1
                self._succeeded += finished.success
                self._steps += finished.steps
                self._chunks += len(finished.num_steps)
                self._tasks.observe(finished.episode.task, finished.success)
                given_up = finished.episode.group in self._given_up
                self.ledger.filtered += 1 if given_up else self._buffer.add(finished)
            self._changed.notify_all()
            return True

    def add_imagined(self, episode_id: int, imagined: Sequence[Trajectory], passed: bool) -> None:
        """What was imagined from a real episode. ``passed``: whether it may be trained on, by the model's audit."""
        with self._changed:
            waits = any(t.episode.id == episode_id for t in self._buffer)
            self._bundles.add(episode_id, imagined, passed, waits)
            self._changed.notify_all()

    def worker_lost(self, worker: int, with_host: bool = False) -> int:
        """A worker died: count its episodes as lost, and schedule them again. Returns how many.

        One that is lost twice is played alone in its worker. If that is lost, too, it crashes its simulator: it is set
        aside. ``with_host``: the worker is lost with its host, for which no episode is to blame.
        """
        with self._changed:
            self._dead.add(worker)
            self._retries.worker_lost(worker)
            lost = [e for owner, e in self._running.values() if owner == worker]
            self._lose(lost, blame=not with_host)
            self._changed.notify_all()
            return len(lost)

    def _lose(self, episodes: Sequence[EpisodeSpec], *, blame: bool) -> None:
        for episode in episodes:
            del self._running[episode.id]
            if episode.group in self._given_up and not episode.evaluation:
                self._retries.ended(episode)
                continue
            times = self._retries.lost(episode, blame)
            if times < 2:
                (self._evaluations if episode.evaluation else self._due).append(episode)
            elif times > 2:
                self._put_aside(episode)
        self.ledger.lost += len(episodes)

    def _put_aside(self, episode: EpisodeSpec) -> None:
        """Play it no more. The rest of its group would wait for it and is dropped; an evaluation counts it apart."""
        self._set_aside += 1
        if episode.evaluation:
            version = self.published_version
            self._results.append(EpisodeResult(episode, False, 0, 0.0, version, version, 0.0, set_aside=True))
        else:
            self._given_up.add(episode.group)
            self.ledger.filtered += self._buffer.give_up(episode.group)
            self._due = deque(e for e in self._due if e.group != episode.group)
            self._retries.give_up(episode.group)

    def _available(self) -> int:
        return len(self._evaluations) or len(self._due) + self.capacity()

    def capacity(self) -> int:
        """Training episodes, in whole groups, that may start now: none of them becomes too stale or superfluous."""
        b = self.rules.batch_episodes
        running = sum(not e.evaluation for _, e in self._running.values())
        waiting = len(self._due) + sum(not e.evaluation for e in self._retries)
        under_way = running + waiting + len(self._buffer) + len(self._taken)
        last_version = min(self.rules.max_first_staleness + self.published_version + 1, self.rules.iterations)
        free = max(0, (last_version - self._next_version) * b - under_way)
        return free - free % self.rules.groups.size

    @property
    def _imagines(self) -> bool:
        """Whether new episodes wait for what is imagined from them: as long as the audit passes."""
        return bool(self.rules.branches and self._bundles.passed)

    def _next_episode(self) -> EpisodeSpec:
        if not self._evaluations and not self._due:
            self._due.extend(self._next_training_group())
        return self._numbered((self._evaluations or self._due).popleft())

    def _numbered(self, episode: EpisodeSpec) -> EpisodeSpec:
        number, self._next_id = self._next_id, self._next_id + 1
        return replace(episode, id=number)

    def _next_training_group(self) -> list[EpisodeSpec]:
        rules, number = self.rules, self._next_group
        self._next_group += 1
        start = None
        if rules.init_states is not None:
            start = start_state(number, rules.num_tasks, rules.init_states, rules.seed)
        return training_group(number, rules.groups.size, self._tasks.task(number), rules.seed, start)

    def next_batch(self, timeout: float) -> SuperBatch | None:
        """The next super-batch once it is filled and collated; None after ``timeout`` seconds.

        Raises RuntimeError if the episodes could not be collated.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._filled or self._failure or self._stopped, timeout)
            if self._failure is not None:
                raise RuntimeError(f"the next super-batch could not be formed: {self._failure}") from self._failure
            if self._filled is None:
                return None
            batch, new = self._filled, self._taken
            self._filled, self._taken = None, []
            self._next_version += 1
            self._in_training += len(new)
            self.ledger.reused += batch.num_episodes - batch.new_episodes - batch.imagined_episodes
            self._earlier.append(new)
            self._changed.notify_all()
            return batch

    def advance(self, published_version: int) -> None:
        """The update on the last batch is done. A newer published version opens the admission gate further."""
        with self._changed:
            self.published_version = published_version
            self.ledger.trained += self._in_training
            self._in_training = 0
            self._changed.notify_all()

    def _fill(self) -> None:
        """Collate the next super-batch while the learner trains on the one before."""
        try:
            while self._fill_one():
                pass
        except Exception as error:  # next_batch raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    # consumes: complete groups. waits for: enough episodes that are not too stale. unblocked by: add(), stop().
    def _fill_one(self) -> bool:
        """False if the store has stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or (self._filled is None and self._select()))
            if self._stopped:
                return False
            new, version = self._buffer.take(self.rules.batch_episodes), self._next_version
            again = young_enough(self._earlier, version - self.rules.max_staleness)
            imagined = self._bundles.take(new, use=self._imagines)
            self._taken = new
        with self.meter.time("collate"):
            batch = collate(new, version, self.rules.max_episode_steps, again, imagined)
        with self._changed:
            self._filled = batch
            self._changed.notify_all()
        return True

    def _select(self) -> bool:
        """Drop what is too stale for the next batch; True if enough is left to fill it."""
        oldest = self._next_version - self.rules.max_staleness
        if self.rules.drop_stale and (stale := self._buffer.drop_older_than(oldest)):
            self.ledger.stale += stale
            self._bundles.drop_except(self._buffer)
            self._changed.notify_all()  # the gate has opened further
        size = self.rules.batch_episodes
        if self._buffer.ready < size:
            return False
        return not self._imagines or self._bundles.complete(self._buffer.first(size))

    def assign_evaluation(self, episodes: Sequence[EpisodeSpec]) -> None:
        """Assign these before any further training episode; they get new ids."""
        with self._changed:
            self._results = []
            self._evaluations.extend(episodes)
            self._changed.notify_all()

    def evaluation_results(self, count: int, timeout: float, known: int = 0) -> list[EpisodeResult]:
        """Results of the last evaluation after the first ``known``, once there are ``count`` in all.

        After ``timeout`` seconds, those that there are.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._results) >= count or self._stopped, timeout)
            return self._results[known:]

    def open(self) -> None:
        """Assign episodes from now on."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def close(self) -> None:
        """Assign no further episode, not even to callers that already wait in ``take``."""
        with self._changed:
            self._is_open = False

    def stop(self) -> None:
        """Release every waiting caller."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def counters(self) -> dict[str, int]:
        """The ledger and the episodes that are still on their way; the sums agree at any moment."""
        with self._changed:
            buffered = len(self._buffer) + len(self._taken)
            under_way = {"running": len(self._running), "buffered": buffered, "in_training": self._in_training}
            under_way["set_aside"] = self._set_aside
            gate = {"published_version": self.published_version, "capacity": self.capacity()}
            imagined = self._bundles.counters() if self.rules.branches else {}
            return asdict(self.ledger) | under_way | self._outcomes() | gate | imagined

    def _outcomes(self) -> dict[str, int]:
        counts = {"played": self._played, "succeeded": self._succeeded}
        return counts | {"control_steps": self._steps, "control_chunks": self._chunks}

    def state(self) -> tuple[dict[str, Any], list[Trajectory]]:
        """JSON-able counters and the trajectories that are still to be trained, for a checkpoint between two updates.

        The first ones have been trained, and will be again.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._filled is not None, timeout=60.0)
            if self._in_training:
                raise RuntimeError(f"{self._in_training} episodes are being trained: checkpoint after advance()")
            again = [trajectory for part in self._earlier for trajectory in part]
            record = self._record([]) | {"earlier": [len(part) for part in self._earlier]}
            return record, again + self._taken + list(self._buffer)

    def outline(self) -> dict[str, Any]:
        """``state`` without trajectories, at any moment: what another store goes on from if this one dies.

        What waits to be trained will have been lost with it, and is played again.
        """
        with self._changed:
            record = self._record([t.episode for t in (*self._taken, *self._buffer)])
            return record | {"in_training": self._in_training, "published_version": self.published_version}

    def _record(self, waiting: Sequence[EpisodeSpec]) -> dict[str, Any]:
        """What ``restore`` needs, but trajectories. ``waiting``: finished episodes that will have been lost."""
        running = [e for _, e in self._running.values() if not e.evaluation and e.group not in self._given_up]
        due = [e for e in (*self._retries, *self._due) if not e.evaluation]
        return {
            "ledger": asdict(self.ledger),
            "policy_version": self._next_version,
            "next_id": self._next_id,
            "next_group": self._next_group,
            "task_failure": list(self._tasks.failure),
            "due": [asdict(e) for e in (*running, *waiting, *due)],
            "lost": len(self._running) + len(waiting),
            "set_aside": self._set_aside,
            **self._outcomes(),
            "earlier": [],
            "imagined": self._bundles.state(),
        }

    def restore(self, record: dict[str, Any], trajectories: Sequence[Trajectory]) -> None:
        """Continue from ``state()`` or ``outline()``. Episodes that were running then are counted as lost and
        scheduled again."""
        with self._changed:
            self.ledger = Ledger(**record["ledger"])
            self.ledger.lost += record["lost"]
            self._next_version = record["policy_version"]
            # a resumed run starts by publishing its newest weights
            self.published_version = record.get("published_version", self._next_version)
            self._in_training = record.get("in_training", 0)
            self._next_id = record["next_id"]
            self._next_group = record["next_group"]
            self._tasks.restore(record["task_failure"])
            self._due.extend(EpisodeSpec(**e) for e in record["due"])
            self._steps, self._chunks = record["control_steps"], record.get("control_chunks", 0)
            self._played, self._succeeded = record.get("played", 0), record.get("succeeded", 0)
            self._set_aside = record.get("set_aside", 0)
            rest = iter(trajectories)
            self._earlier.extend(list(islice(rest, count)) for count in record["earlier"])
            self.ledger.filtered += sum(self._buffer.add(trajectory) for trajectory in rest)
            self._bundles.restore(record["imagined"])
            self._bundles.excuse(self._buffer)
            self._changed.notify_all()
