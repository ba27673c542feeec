"""Imagination: from each real episode, a bundle of imagined ones that begin in its states.

    real episode ──▶ [ encode ] ──▶ one group of imagined episodes per chunk ──take──▶ EnvWorker, ImaginedEnv, policy
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
from vla_rl.core.records import Array, EpisodeResult, EpisodeSpec, Trajectory
from vla_rl.observability.meter import Meter
from vla_rl.world_model.archive import Episode
from vla_rl.world_model.audit import Audit, Verdict
from vla_rl.world_model.encoder import FrozenEncoder
from vla_rl.world_model.imagined_env import ChunkRating, Start
from vla_rl.world_model.trainer import ModelTrainer

_CHUNK_BITS = 20  # chunks of one episode are fewer than 2 to this power
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
    imagined: list[Trajectory] = field(default_factory=list)


class Imagination:
    """Assigns imagined episodes (as ``AssignmentSource``), and answers ``ImaginedEnv`` (as ``ChunkRater``).

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
    ) -> None:
        self.meter = Meter()
        prior = config.audit_prior, config.audit_prior_error
        self.audit = Audit(config.audit_chunks, prior, config.audit_least, config.max_scale)
        self.verdict: Verdict = self.audit.verdict()
        self._config, self._encoder, self._trainer, self._sink = config, encoder, trainer, sink
        self._discount = discount
        self._pending: dict[int, _Pending] = {}  # by the real episode's id
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
            self._trainer.learn([episode])
            self._sink.add_imagined(trajectory.episode.id, [], ready and self.verdict.passed)
            return
        with self._changed:
            self._pending[trajectory.episode.id] = _Pending(trajectory, episode)
            self._due.extend(self._specs(trajectory))
            self._changed.notify_all()

    def _specs(self, trajectory: Trajectory) -> list[EpisodeSpec]:
        """``branches`` imagined episodes for each chunk. ``seed`` names the state, ``member`` the branch."""
        specs = []
        for chunk in range(trajectory.num_chunks):
            state = (trajectory.episode.id << _CHUNK_BITS) + chunk
            group = _FIRST_GROUP - self._next_id // self._config.branches
            for member in range(self._config.branches):
                specs.append(EpisodeSpec(self._next_id, trajectory.episode.task, state, group=group, member=member))
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
        number = finished.episode.seed >> _CHUNK_BITS
        with self._changed:
            pending = self._pending[number]
            pending.imagined.append(replace(finished, model_version=self._trainer.version))
            if len(pending.imagined) < pending.trajectory.num_chunks * self._config.branches:
                return
            del self._pending[number]
        self._complete(pending)

    def _complete(self, pending: _Pending) -> None:
        imagined = sorted(pending.imagined, key=lambda t: (t.episode.seed, t.episode.member))
        self._judge(pending, imagined)
        scale = self.verdict.scale
        scaled = [replace(t, rewards=t.rewards * np.float32(scale)) for t in imagined]
        self._sink.add_imagined(pending.trajectory.episode.id, scaled, self.verdict.passed)
        self._trainer.learn([pending.episode])

    def _judge(self, pending: _Pending, imagined: Sequence[Trajectory]) -> None:
        """Audit the real chunks against the imagined ones."""
        episode, chunks = pending.episode, pending.trajectory.num_chunks
        rated = self._trainer.rate(episode.features, episode.proprio[:chunks], episode.elapsed, episode.actions)
        others = np.array([t.total_reward for t in imagined]).reshape(chunks, self._config.branches)
        k = pending.trajectory.rewards.shape[1]
        earned = np.where(episode.event < k, 1.0, self._discount * episode.returns)
        self.audit.add(rated.mean - self._config.disagreement * rated.deviation, others, earned)
        self.verdict = self.audit.verdict()

    def start(self, number: int) -> Start:
        """See ``ChunkRater``."""
        pending, chunk = self._pending[number >> _CHUNK_BITS], number & ((1 << _CHUNK_BITS) - 1)
        trajectory = pending.trajectory
        return Start(
            images=trajectory.images[chunk],
            proprio=trajectory.proprio[chunk],
            task=trajectory.episode.task,
            elapsed=float(trajectory.elapsed[chunk]),
            features=pending.episode.features[chunk],
        )

    def rate(self, starts: Sequence[Start], actions: Array) -> ChunkRating:
        """See ``ChunkRater``."""
        features, proprio = np.stack([s.features for s in starts]), np.stack([s.proprio for s in starts])
        return self._trainer.rate(features, proprio, np.array([s.elapsed for s in starts], np.float32), actions)

    def stop(self) -> None:
        """Release every waiting caller."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def metrics(self) -> dict[str, float]:
        """For the run's log."""
        losses = {f"loss_{name}": value for name, value in self._trainer.losses.items()}
        sizes = {"archive_episodes": float(len(self._trainer.archive)), "version": float(self._trainer.version)}
        return self.verdict.metrics() | losses | sizes

    def state(self) -> dict[str, Any]:
        """JSON-able, for a checkpoint. Real episodes whose bundle is not complete are left out, and never learned."""
        return {"audit": self.audit.state(), "next_id": self._next_id}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from ``state()``."""
        self.audit.restore(state["audit"])
        self.verdict = self.audit.verdict()
        self._next_id = state["next_id"]
