"""The env worker: plays episodes in a vectorized simulator, one action chunk at a time.

    assignments ──▶ [ env: reset ─▶ observe ─▶ request ──▶ (inference) ──▶ step ─▶ ... ] ──▶ finished trajectories

The environments of a worker are divided into splits. A split advances as soon as all of its running environments have
their answer. With one environment per split, none waits for a slower one; with several splits, one simulates while the
others wait for inference.
"""

import threading
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields
from typing import Protocol

import numpy as np

from envs.base import EnvError, VectorEnv
from vla_rl.core.devices.lock import DeviceLease
from vla_rl.core.errors import NotFiniteError
from vla_rl.core.ipc.mailbox import WorkerMailbox
from vla_rl.core.records import (
    EXPERT,
    EXPERT_STEPS,
    STATE,
    STATE_AFTER,
    ActionBatch,
    BootstrapRule,
    EpisodeResult,
    EpisodeSpec,
    PolicySpec,
    StepResult,
    TeacherRule,
    Trajectory,
    take_rows,
)
from vla_rl.observability.meter import Meter
from vla_rl.rollout.action_use import ActionUse
from vla_rl.rollout.recording import Recording
from vla_rl.rollout.teacher import Taught, Teacher

_IDLE_WAIT_S = 1.0  # longest uninterrupted wait; every event wakes the worker earlier


class AssignmentSource(Protocol):
    """Where episodes to play come from, and where finished ones go."""

    def take(self, worker: int, count: int, timeout: float) -> list[EpisodeSpec]:
        """Up to ``count`` episodes; blocks up to ``timeout`` seconds for the first."""

    def add(self, worker: int, finished: Trajectory | EpisodeResult) -> None: ...


class EnvWorker:
    """Plays the episodes that it is assigned, until ``stop()``."""

    def __init__(
        self,
        worker: int,
        env: VectorEnv,
        mailbox: WorkerMailbox,
        assignments: AssignmentSource,
        policy: PolicySpec,
        splits: int,  # groups of environments that advance independently, 1 .. env.num_envs
        bootstrap_rule: BootstrapRule = "truncated",  # which episodes are observed once more, to bootstrap from that
        lease: DeviceLease = nullcontext,  # of the simulator's device, if others share it
        teacher: TeacherRule | None = None,  # when the expert plays a chunk; None: never
        keeps_state: bool = False,  # whether the simulator's state around each chunk is recorded
    ) -> None:
        self.worker = worker
        self.env = env
        self.mailbox = mailbox
        self.assignments = assignments
        self.meter = Meter()
        self._action_use = ActionUse(env.spec.actions, self.meter)
        self._policy = policy
        self._bootstrap_rule = bootstrap_rule
        self._lease = lease
        self._teacher = None if teacher is None else Teacher(teacher, env, policy.chunk_size)
        self._keeps_state = keeps_state
        self._splits = [[int(e) for e in part] for part in np.array_split(np.arange(env.num_envs), splits)]
        self._running: dict[int, Recording] = {}  # by env id
        self._answered: set[int] = set()
        self._inbox: deque[EpisodeSpec] = deque()
        self._free = threading.Semaphore(env.num_envs)  # idle environments for which no episode was requested yet
        self._failure: Exception | None = None  # of the thread that requests episodes
        self._has_potential = True  # until the simulator says otherwise
        self._stop = threading.Event()

    # consumes: assignments, answers. waits for: its doorbell. unblocked by: answers, new assignments, stop().
    def run(self) -> None:
        """Play until ``stop()``. Unfinished episodes are abandoned, and the store counts them as lost. The simulator is
        not closed.

        Raises what the simulator or the source of episodes raises, and NotFiniteError if numbers of the simulator
        are not finite.
        """
        receiver = threading.Thread(target=self._receive_assignments, name="assignments", daemon=True)
        receiver.start()
        try:
            while not self._stop.is_set():
                self._start_episodes()
                with self.meter.time("wait"):
                    self._answered.update(self.mailbox.wait_idle(_IDLE_WAIT_S))
                for split in self._splits:
                    running = [e for e in split if e in self._running]
                    if running and self._answered.issuperset(running):
                        self._answered.difference_update(running)
                        self._advance(running)
                        self._start_episodes()
        finally:
            self._stop.set()
            self._free.release()
            receiver.join(timeout=5.0)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self._stop.set()
        self._free.release()
        self.mailbox.wake()

    def _receive_assignments(self) -> None:
        """Request an episode for each idle environment. A closed admission gate blocks only this thread."""
        try:
            while not self._stop.is_set():
                self._free.acquire()
                self._request_episodes()
        except Exception as error:  # run() raises it
            self._failure = error
            self.stop()

    # consumes: assignments. waits for: the source of episodes. unblocked by: an episode, stop().
    def _request_episodes(self) -> None:
        """Request episodes until every idle environment has one; the first one is counted already."""
        wanted = 1
        while wanted and not self._stop.is_set():
            while self._free.acquire(blocking=False):
                wanted += 1
            episodes = self.assignments.take(self.worker, wanted, _IDLE_WAIT_S)
            if episodes:
                wanted -= len(episodes)
                self._inbox.extend(episodes)
                self.mailbox.wake()

    def _start_episodes(self) -> None:
        """Reset idle environments to the episodes that have been assigned."""
        started: list[int] = []
        for env_id in range(self.env.num_envs):
            if env_id in self._running or not self._inbox:
                continue
            episode = self._inbox.popleft()
            self._running[env_id] = Recording(episode)
            with self._lease(), self.meter.time("reset", 1):
                self.env.reset([env_id], [episode])
                self._record_progress([env_id] if episode.evaluation else [])
            started.append(env_id)
        if started:
            self._request(started)

    def _request(self, env_ids: list[int]) -> None:
        """Observe these environments and request their next chunks."""
        with self._lease(), self.meter.time("render", len(env_ids)):
            self.env.observe(env_ids, self.mailbox.observation)
        self._require_finite("observed", env_ids, self.mailbox.observation.proprio[env_ids])
        draws = {
            name: np.zeros((len(env_ids), *numbers.shape), np.float32) for name, numbers in self._policy.draws.items()
        }
        for i, env_id in enumerate(env_ids):
            recording = self._running[env_id]
            for name, numbers in self._policy.draws.items():
                draws[name][i] = numbers.draw(recording.rng)
            if not recording.episode.evaluation:
                recording.images.append(self.mailbox.observation.images[env_id].copy())
                recording.proprio.append(self.mailbox.observation.proprio[env_id].copy())
                recording.elapsed.append(self.mailbox.observation.elapsed[env_id].copy())
        greedy = np.array([self._running[e].episode.greedy for e in env_ids])
        self.mailbox.request(env_ids, draws, greedy)

    def _advance(self, env_ids: list[int]) -> None:
        """Execute the answered chunks of one split, then finish or observe each of its environments."""
        batch, versions = self.mailbox.answer(env_ids)
        ended = [self._running[e].ended for e in env_ids]
        for env_id, value, outcome in zip(env_ids, batch.values.tolist(), ended, strict=True):
            if outcome is not None:  # the answer was for its final observation
                self._finish(env_id, value, *outcome)
        rows = np.flatnonzero([outcome is None for outcome in ended])
        if rows.size == 0:
            return
        moving = [env_ids[i] for i in rows.tolist()]
        with self._lease(), self.meter.time("simulate") as call:
            states = self._states(STATE, moving)
            taught = self._teach(moving, versions[rows])
            actions = batch.actions[rows]
            result = self._step(moving, actions, taught)
            executed = int(result.num_steps.sum())
            call.size = executed / self._policy.chunk_size  # in whole chunks: an episode may end within one
            states |= self._states(STATE_AFTER, moving)
            self._record_progress([e for e in moving if self._running[e].episode.evaluation])
        for i, env_id in enumerate(moving):
            if env_id in taught:
                actions[i] = taught[env_id].actions
        self._record_decisions(moving, batch, versions, rows, taught, states)
        self._require_finite("rewarded", moving, result.rewards)
        self.meter.count("env_steps", executed)
        self.meter.count("chunks", len(moving))
        self._action_use.count(actions, result.num_steps)
        to_observe: list[int] = []
        for i, env_id in enumerate(moving):
            recording = self._running[env_id]
            recording.rewards.append(result.rewards[i].copy())
            recording.num_steps.append(int(result.num_steps[i]))
            terminated, success = bool(result.terminated[i]), bool(result.success[i])
            if not (terminated or result.truncated[i]):
                to_observe.append(env_id)
            elif self._needs_bootstrap_value(recording.episode, terminated):
                recording.ended = terminated, success
                to_observe.append(env_id)
            else:
                self._finish(env_id, 0.0, terminated, success)
        if to_observe:
            self._request(to_observe)

    def _require_finite(self, what: str, env_ids: list[int], numbers: np.ndarray) -> None:
        """A simulator that has blown up must not reach the learner. Raises NotFiniteError."""
        for env_id, row in zip(env_ids, numbers, strict=True):
            if not np.isfinite(row).all():
                episode = self._running[env_id].episode
                raise NotFiniteError(f"the simulator {what} numbers that are not finite in {episode}: {row}")

    def _needs_bootstrap_value(self, episode: EpisodeSpec, terminated: bool) -> bool:
        if episode.evaluation or self._bootstrap_rule == "never":
            return False
        return self._bootstrap_rule == "always" or not terminated

    def _teach(self, env_ids: list[int], versions: np.ndarray) -> dict[int, Taught]:
        """The chunks that the expert has played in the place of the policy's, by environment."""
        if self._teacher is None:
            return {}
        taught = {}
        for env_id, version in zip(env_ids, versions.tolist(), strict=True):
            recording = self._running[env_id]
            if self._teacher.takes_over(recording.episode, len(recording.decisions), version) and (
                played := self._teacher.play(env_id)
            ):
                taught[env_id] = played
        return taught

    def _step(self, env_ids: list[int], actions: np.ndarray, taught: Mapping[int, Taught]) -> StepResult:
        """What executing these chunks has led to, of the policy or of the expert."""
        own = [i for i, env_id in enumerate(env_ids) if env_id not in taught]
        if len(own) == len(env_ids):
            return self.env.step(env_ids, actions)
        parts = [taught[env_id].outcome for env_id in env_ids if env_id in taught]
        order = [i for i, env_id in enumerate(env_ids) if env_id in taught] + own
        if own:
            parts.append(self.env.step([env_ids[i] for i in own], actions[own]))
        back = np.argsort(order)
        return StepResult(*(np.concatenate([getattr(p, f.name) for p in parts])[back] for f in fields(StepResult)))

    def _record_decisions(
        self,
        env_ids: list[int],
        batch: ActionBatch,
        versions: np.ndarray,
        rows: np.ndarray,
        taught: Mapping[int, Taught],
        states: Mapping[str, np.ndarray],  # [n, S] of each name
    ) -> None:
        for n, (env_id, i) in enumerate(zip(env_ids, rows.tolist(), strict=True)):
            record = take_rows(batch.record, i) | take_rows(states, n)
            if self._teacher is not None:
                played = taught.get(env_id)
                record[EXPERT] = np.zeros_like(batch.actions[i]) if played is None else played.actions
                record[EXPERT_STEPS] = np.array(0 if played is None else played.outcome.num_steps[0], np.int32)
            decision = (record, batch.logprobs[i], float(batch.values[i]), int(versions[i]))
            self._running[env_id].decisions.append(decision)

    def _states(self, name: str, env_ids: list[int]) -> dict[str, np.ndarray]:
        """The simulator's states now, under the name that they have in the record; nothing if none are kept."""
        return {name: self.env.state(env_ids)} if self._keeps_state else {}

    def _record_progress(self, env_ids: list[int]) -> None:
        if not env_ids or not self._has_potential:
            return
        try:
            reached = self.env.potential(env_ids)
        except EnvError:  # evaluations do without
            self._has_potential = False
            return
        for env_id, value in zip(env_ids, reached.tolist(), strict=True):
            self._running[env_id].progress.append(value)

    def _finish(self, env_id: int, bootstrap_value: float, terminated: bool, success: bool) -> None:
        recording = self._running.pop(env_id)
        self.meter.count("episodes")
        if recording.episode.evaluation:
            self.assignments.add(self.worker, recording.result(terminated, success, self.env.frames(env_id)))
        else:
            self.meter.count("trajectories")
            self.meter.count("trajectory_steps", sum(recording.num_steps))
            trajectory = recording.trajectory(self.worker, bootstrap_value, terminated, success)
            self.assignments.add(self.worker, trajectory)
        self._free.release()
