"""The env worker: plays episodes in its slots, one action chunk at a time.

    orders ──▶ [ slot: reset ─▶ observe ─▶ request ──▶ (inference) ──▶ step ─▶ ... ] ──▶ finished trajectories

Slots are grouped in stages. A stage advances as soon as all of its running slots have their answer, so with one slot a
stage nothing waits for a slower neighbour, and while one stage simulates the others are being inferred.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from envs.base import VectorEnv
from vla_rl.core.devices.lock import Turn
from vla_rl.core.ipc.mailbox import WorkerMailbox
from vla_rl.core.records import ActionBatch, Episode, EpisodeResult, FinalValues, Trajectory
from vla_rl.observability.meter import Meter

_IDLE_WAIT_S = 1.0  # longest uninterrupted wait; every event wakes the worker earlier


class OrderSource(Protocol):
    """Where episodes to play come from, and where finished ones go."""

    def take(self, worker: int, count: int, timeout: float) -> list[Episode]:
        """Up to ``count`` episodes; blocks up to ``timeout`` seconds for the first."""

    def add(self, worker: int, finished: Trajectory | EpisodeResult) -> None: ...


@dataclass(slots=True)
class _Slot:
    """One running episode and what was recorded of it."""

    episode: Episode
    rng: np.random.Generator
    started: float = field(default_factory=time.perf_counter)
    images: list[np.ndarray] = field(default_factory=list)
    proprio: list[np.ndarray] = field(default_factory=list)
    decisions: list[tuple] = field(default_factory=list)  # (tokens, logprobs, value, version) a chunk
    rewards: list[np.ndarray] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)
    ended: tuple[bool, bool] | None = None  # (terminated, success), while the final observation's value is to come

    def trajectory(self, worker: int, final_value: float, terminated: bool, success: bool) -> Trajectory:
        tokens, logprobs, values, versions = zip(*self.decisions, strict=True)
        return Trajectory(
            episode=self.episode,
            images=np.stack(self.images),
            proprio=np.stack(self.proprio),
            tokens=np.stack(tokens),
            logprobs=np.stack(logprobs),
            values=np.asarray(values, np.float32),
            versions=np.asarray(versions, np.int32),
            rewards=np.stack(self.rewards),
            num_steps=np.asarray(self.num_steps, np.int32),
            final_value=final_value,
            terminated=terminated,
            truncated=not terminated,
            success=success,
            worker=worker,
            seconds=time.perf_counter() - self.started,
        )

    def result(self, success: bool, frames: Sequence[np.ndarray]) -> EpisodeResult:
        versions = [version for *_, version in self.decisions]
        return EpisodeResult(
            episode=self.episode,
            success=success,
            steps=sum(self.num_steps),
            total_reward=float(np.sum(self.rewards)),
            oldest_version=min(versions),
            newest_version=max(versions),
            seconds=time.perf_counter() - self.started,
            frames=tuple(frames),
        )


class EnvWorker:
    """Plays the episodes it is ordered to play until told to stop."""

    def __init__(
        self,
        worker: int,
        env: VectorEnv,
        mailbox: WorkerMailbox,
        orders: OrderSource,
        chunk_size: int,
        stages: int,
        final_values: FinalValues = "truncated",
        turn: Turn = nullcontext,
    ) -> None:
        """``stages`` groups of slots advance independently; 1 = all slots in step, env.num_slots = each for itself.
        ``final_values``: which training episodes are observed once more at their end, for the value of what follows.
        ``turn``: on a device that others use as well; every call of the simulator takes one."""
        self.worker = worker
        self.env = env
        self.mailbox = mailbox
        self.orders = orders
        self.meter = Meter()
        self._draws = (chunk_size, env.spec.action_dim)
        self._final_values = final_values
        self._turn = turn
        self._stages = [[int(s) for s in part] for part in np.array_split(np.arange(env.num_slots), stages)]
        self._slots: dict[int, _Slot] = {}
        self._answered: set[int] = set()
        self._inbox: deque[Episode] = deque()
        self._free = threading.Semaphore(env.num_slots)  # slots that nobody has asked an episode for
        self._stop = threading.Event()

    # consumes: orders and answers. waits for: its doorbell. unblocked by: the server's answers, new orders, stop().
    def run(self) -> None:
        """Play until ``stop()``; unfinished episodes are abandoned (the store counts them as lost)."""
        receiver = threading.Thread(target=self._receive_orders, name="orders", daemon=True)
        receiver.start()
        try:
            while not self._stop.is_set():
                self._start_episodes()
                with self.meter.time("wait"):
                    self._answered.update(self.mailbox.wait(_IDLE_WAIT_S))
                for stage in self._stages:
                    running = [s for s in stage if s in self._slots]
                    if running and self._answered.issuperset(running):
                        self._answered.difference_update(running)
                        self._advance(running)
                        self._start_episodes()
        finally:
            self._stop.set()
            self._free.release()
            receiver.join(timeout=5.0)
            self.env.close()

    def stop(self) -> None:
        self._stop.set()
        self._free.release()
        self.mailbox.wake()

    def _receive_orders(self) -> None:
        """Ask for one episode per free slot; a closed admission gate blocks this thread, never the simulator."""
        wanted = 0
        while not self._stop.is_set():
            if wanted == 0:
                self._free.acquire()
                wanted = 1
            while self._free.acquire(blocking=False):
                wanted += 1
            episodes = self.orders.take(self.worker, wanted, _IDLE_WAIT_S)
            if episodes:
                wanted -= len(episodes)
                self._inbox.extend(episodes)
                self.mailbox.wake()

    def _start_episodes(self) -> None:
        """Fill free slots with ordered episodes."""
        started: list[int] = []
        for slot in range(self.env.num_slots):
            if slot in self._slots or not self._inbox:
                continue
            episode = self._inbox.popleft()
            self._slots[slot] = _Slot(episode, np.random.default_rng((episode.seed, episode.member)))
            with self._turn(), self.meter.time("reset", 1):
                self.env.reset([slot], [episode])
            started.append(slot)
        if started:
            self._request(started)

    def _request(self, slots: list[int]) -> None:
        """Observe the slots and ask for their next chunks."""
        with self._turn(), self.meter.time("render", len(slots)):
            self.env.observe(slots, self.mailbox.observation)
        uniforms = np.zeros((len(slots), *self._draws), np.float32)
        for i, slot in enumerate(slots):
            state = self._slots[slot]
            uniforms[i] = state.rng.random(self._draws, dtype=np.float32)
            if not state.episode.evaluation:
                state.images.append(self.mailbox.observation.images[slot].copy())
                state.proprio.append(self.mailbox.observation.proprio[slot].copy())
        greedy = np.array([self._slots[s].episode.greedy for s in slots])
        self.mailbox.request(slots, uniforms, greedy)

    def _advance(self, slots: list[int]) -> None:
        """Execute the answered chunks of one stage, then finish or observe each of its slots."""
        batch, versions = self.mailbox.answer(slots)
        outcomes = [self._slots[s].ended for s in slots]
        for slot, value, outcome in zip(slots, batch.values.tolist(), outcomes, strict=True):
            if outcome is not None:
                self._finish(slot, value, *outcome)
        rows = np.flatnonzero([outcome is None for outcome in outcomes])
        if rows.size == 0:
            return
        moving = [slots[i] for i in rows.tolist()]
        self._record_decisions(moving, batch, versions, rows)
        with self._turn(), self.meter.time("simulate") as call:
            result = self.env.step(moving, batch.actions[rows])
            executed = int(result.num_steps.sum())
            call.size = executed / self._draws[0]  # whole chunks: an episode may end within one
        self.meter.count("env_steps", executed)
        self.meter.count("chunks", len(moving))
        going: list[int] = []
        for i, slot in enumerate(moving):
            state = self._slots[slot]
            state.rewards.append(result.rewards[i].copy())
            state.num_steps.append(int(result.num_steps[i]))
            outcome = bool(result.terminated[i]), bool(result.success[i])
            if not (result.terminated[i] or result.truncated[i]):
                going.append(slot)
            elif self._wants_final_value(state.episode, *outcome):
                state.ended = outcome
                going.append(slot)
            else:
                self._finish(slot, 0.0, *outcome)
        if going:
            self._request(going)

    def _wants_final_value(self, episode: Episode, terminated: bool, success: bool) -> bool:
        if episode.evaluation or self._final_values == "never":
            return False
        return self._final_values == "always" or not terminated

    def _record_decisions(self, slots: list[int], batch: ActionBatch, versions: np.ndarray, rows: np.ndarray) -> None:
        for slot, i in zip(slots, rows.tolist(), strict=True):
            decision = (batch.tokens[i], batch.logprobs[i], float(batch.values[i]), int(versions[i]))
            self._slots[slot].decisions.append(decision)

    def _finish(self, slot: int, final_value: float, terminated: bool, success: bool) -> None:
        state = self._slots.pop(slot)
        self.meter.count("episodes")
        if state.episode.evaluation:
            self.orders.add(self.worker, state.result(success, self.env.frames(slot)))
        else:
            self.meter.count("trajectories")
            self.meter.count("trajectory_steps", sum(state.num_steps))
            self.orders.add(self.worker, state.trajectory(self.worker, final_value, terminated, success))
        self._free.release()
