"""Imagination: from each real episode, a bundle of imagined ones that begin in its states.

    real episode ──▶ [ encode ] ──▶ a group of imagined episodes per state ────take──▶ EnvWorker, ImaginedEnv, policy
                                                                                           │
    audit ◀── rate the real chunks ◀── [ bundle complete ] ◀──────────add──────────────────┘
      │                                      │
      └── scale ──▶ bundle ──▶ store         └──▶ model learns from the real episode

The order matters: a real episode is imagined on and audited *before* the model learns from it, so the audit is honest.
Imagined episodes start in the newest real states, the policy's newest version chooses, and real ones set the pace.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from vla_rl.config.world_model import WorldModelConfig
from vla_rl.core.devices.lock import DeviceLease
from vla_rl.core.records import Array, EpisodeResult, EpisodeSpec, Trajectory, chunk_number, chunk_of
from vla_rl.observability.meter import Meter
from vla_rl.world_model.archive import Episode
from vla_rl.world_model.audit import Audit, Verdict
from vla_rl.world_model.encoder import FrozenEncoder
from vla_rl.world_model.frame_trainer import FrameTrainer
from vla_rl.world_model.futures import Futures, state_of
from vla_rl.world_model.horizon import HorizonGate
from vla_rl.world_model.imagined_env import ChunkRating, State
from vla_rl.world_model.trainer import ModelTrainer

_MOST_PENDING = 64  # real episodes
_FIRST_GROUP = -2  # and downwards: real episodes have groups from 0 on, evaluations have -1


class BundleSink(Protocol):
    """Where complete bundles go."""

    def add_imagined(self, episode_id: int, imagined: Sequence[Trajectory], passed: bool) -> None:
        """The imagined episodes of a real one: ``branches`` in a row for each of its chunks, or none.

        ``passed``: whether they may be trained on, by the audit.
        """


@dataclass(slots=True)
class _Pending:
    """A real episode whose bundle is not complete."""

    trajectory: Trajectory
    episode: Episode
    horizon: int
    starts: list[int]  # chunks from whose states is imagined
    imagined: list[Trajectory] = field(default_factory=list)


class Imagination:
    """Assigns imagined episodes (as ``AssignmentSource``), and answers ``ImaginedEnv`` (as ``Dynamics``).

    Thread-safe: real episodes come from one thread, the env worker's two threads take and return imagined ones.
    """

    def __init__(
        self,
        config: WorldModelConfig,
        encoder: FrozenEncoder,
        trainer: ModelTrainer,
        sink: BundleSink,
        *,
        discount: float,
        futures: Futures | None = None,  # for horizons above one chunk
    ) -> None:
        self.meter = Meter()
        prior = config.audit_prior, config.audit_prior_error
        self.audit = Audit(config.audit_chunks, prior, config.audit_least, config.max_scale)
        self.verdict: Verdict = self.audit.verdict()
        self._config, self._encoder, self._trainer, self._sink = config, encoder, trainer, sink
        self._discount, self.futures = discount, futures
        self._pending: dict[int, _Pending] = {}  # by the real episode's id
        self._previous: Trajectory | None = None  # real episode that was learned from, for the placebo
        self._due: deque[EpisodeSpec] = deque()
        self._next_id = 0
        self._stopped = False
        self._changed = threading.Condition()

    def observe(self, trajectory: Trajectory) -> None:
        """A real episode has ended: imagine from its states.

        Learn from it at once if the model is not ready, or if simulators are so much faster than imagination that too
        many episodes wait.
        """
        episode = Episode.of(
            trajectory, self._encoder.features(trajectory), self._encoder.actions(trajectory), self._discount
        )
        ready = self._trainer.ready
        if not ready or len(self._pending) >= _MOST_PENDING:
            self._learn(trajectory, episode)
            self._sink.add_imagined(trajectory.episode.id, [], ready and self.verdict.passed)
            return
        horizon = 1 if self.futures is None else self.futures.horizon
        first = trajectory.episode.id % min(horizon, trajectory.num_chunks)
        pending = _Pending(trajectory, episode, horizon, list(range(first, trajectory.num_chunks, horizon)))
        with self._changed:
            self._pending[trajectory.episode.id] = pending
            self._due.extend(self._specs(pending))
            self._changed.notify_all()

    def _specs(self, pending: _Pending) -> list[EpisodeSpec]:
        """``branches`` imagined episodes from each start. ``seed`` names the state, ``member`` the branch."""
        specs, real = [], pending.trajectory.episode
        for chunk in pending.starts:
            state = chunk_number(real.id, chunk)
            group = _FIRST_GROUP - self._next_id // self._config.branches
            for member in range(self._config.branches):
                specs.append(EpisodeSpec(self._next_id, real.task, state, group=group, member=member))
                self._next_id += 1
        return specs

    def take(self, worker: int, count: int, timeout: float) -> list[EpisodeSpec]:
        """See ``AssignmentSource``."""
        with self._changed:
            self._changed.wait_for(lambda: self._due or self._stopped, timeout)
            return [self._due.popleft() for _ in range(min(count, len(self._due)))]

    def add(self, worker: int, finished: Trajectory | EpisodeResult) -> None:
        """See ``AssignmentSource``."""
        assert isinstance(finished, Trajectory)
        self.meter.count("imagined")
        number, _ = chunk_of(finished.episode.seed)
        with self._changed:
            pending = self._pending[number]
            pending.imagined.append(replace(finished, model_version=self._trainer.version))
            if len(pending.imagined) < len(pending.starts) * self._config.branches:
                return
            del self._pending[number]
        self._complete(pending)

    def _complete(self, pending: _Pending) -> None:
        imagined = sorted(pending.imagined, key=lambda t: (t.episode.seed, t.episode.member))
        self._judge(pending, imagined)
        scale = self.verdict.scale
        scaled = [replace(t, rewards=t.rewards * np.float32(scale)) for t in imagined]
        self._sink.add_imagined(pending.trajectory.episode.id, scaled, self.verdict.passed)
        self._learn(pending.trajectory, pending.episode)

    def _judge(self, pending: _Pending, imagined: Sequence[Trajectory]) -> None:
        """Audit the real chunks at the starts against the first chunks of the imagined episodes from there."""
        episode, starts, branches = pending.episode, pending.starts, self._config.branches
        real = self._rated(episode, starts, episode.actions[starts])
        first = np.stack([self._encoder.actions(t)[0] for t in imagined])
        others = self._rated(episode, np.repeat(starts, branches), first).reshape(len(starts), branches)
        k = pending.trajectory.rewards.shape[1]
        earned = np.where(episode.event < k, 1.0, self._discount * episode.returns)
        self.audit.add(real, others, earned[starts])
        self.verdict = self.audit.verdict()
        if self.futures is not None:
            self.futures.judge(pending.trajectory, episode)

    def _rated(self, episode: Episode, chunks: Sequence[int] | Array, actions: Array) -> Array:
        """[n]: ratings of ``actions`` [n, K, A] in the states before these chunks, less the penalty."""
        state = episode.features[chunks], episode.proprio[chunks], episode.elapsed[chunks]
        rating = self._trainer.rate(*state, actions)
        return rating.mean - self._config.disagreement * rating.deviation

    def _learn(self, trajectory: Trajectory, episode: Episode) -> None:
        if self._config.placebo:
            previous, self._previous = self._previous or trajectory, trajectory
            episode = Episode.of(ending_like(trajectory, previous), episode.features, episode.actions, self._discount)
        self._trainer.learn([episode])
        if self.futures is not None and self._trainer.ready:
            self.futures.learn(trajectory)

    def start(self, number: int) -> tuple[State, int]:
        """See ``Dynamics``."""
        episode_id, chunk = chunk_of(number)
        pending = self._pending[episode_id]
        return state_of(pending.trajectory, pending.episode, chunk), pending.horizon

    def rate(self, states: Sequence[State], actions: Array) -> ChunkRating:
        """See ``Dynamics``."""
        features, proprio = np.stack([s.features for s in states]), np.stack([s.proprio for s in states])
        return self._trainer.rate(features, proprio, np.array([s.elapsed for s in states], np.float32), actions)

    def advance(self, states: Sequence[State], rating: ChunkRating, elapsed: Sequence[float]) -> list[State]:
        """See ``Dynamics``. Raises RuntimeError where imagined episodes are one chunk long."""
        if self.futures is None:
            raise RuntimeError("world_model.horizon=1 has no states after a chunk")
        return self.futures.advance(states, rating, elapsed)

    def stop(self) -> None:
        """Release every waiting caller."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def metrics(self) -> dict[str, float]:
        """For the run's log."""
        losses = {f"loss_{name}": value for name, value in self._trainer.losses.items()}
        sizes = {"archive_episodes": float(len(self._trainer.archive)), "version": float(self._trainer.version)}
        futures = {} if self.futures is None else self.futures.metrics()
        return self.verdict.metrics() | losses | sizes | futures

    def state(self) -> dict[str, Any]:
        """JSON-able, for a checkpoint. Real episodes whose bundle is not complete are left out, and never learned."""
        return {"audit": self.audit.state(), "next_id": self._next_id}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from ``state()``."""
        self.audit.restore(state["audit"])
        self.verdict = self.audit.verdict()
        self._next_id = state["next_id"]


def ending_like(played: Trajectory, other: Trajectory) -> Trajectory:
    """``played`` with the outcome of another episode."""
    return replace(
        played,
        num_steps=np.append(played.num_steps[:-1], other.num_steps[-1:]),
        terminated=other.terminated,
        truncated=other.truncated,
        success=other.success,
    )


def make_imagination(
    config: WorldModelConfig,
    encoder: FrozenEncoder,
    trainer: ModelTrainer,
    sink: BundleSink,
    *,
    discount: float,
    seed: int,
    device: str,
    lease: DeviceLease,
) -> Imagination:
    """With a frame model if ``config.horizon`` needs one, on ``device``."""
    futures = None
    if config.horizon > 1:
        frames = FrameTrainer(config, seed, device, lease)
        futures = Futures(trainer, frames, encoder, HorizonGate(config.horizon, config.horizon_gap), config.horizon)
    return Imagination(config, encoder, trainer, sink, discount=discount, futures=futures)
