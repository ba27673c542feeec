"""Imagination beyond one chunk: predicted observations, and how many chunks they may be trusted for.

state ──chunk──▶ ensemble: proprioception ──▶ frame model: frame ──▶ encoder: features ──▶ state
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vla_rl.core.records import Array, Trajectory
from vla_rl.world_model.archive import Episode
from vla_rl.world_model.frame_archive import FrameEpisode
from vla_rl.world_model.frame_trainer import FrameTrainer
from vla_rl.world_model.horizon import HorizonGate, Prediction
from vla_rl.world_model.imagined_env import ChunkRating, State
from vla_rl.world_model.trainer import ModelTrainer

_STARTS = 4  # states of an episode from which its real future is imagined
_PICTURES = 8  # that are kept to be looked at


class Encoder(Protocol):
    """See ``FrozenEncoder``."""

    def encode(self, images: Array, proprio: Array, task: Array, elapsed: Array) -> Array:
        """Features [n, F] of n observations."""

    def likely_chunks(self, features: Array) -> Array:
        """[n, K A]: the part of the features that is the frozen policy's most likely chunk, normalized."""


@dataclass(frozen=True, slots=True)
class Future:
    """A real future and its prediction, to be looked at: uint8 [1 + d, H, W, 3] each, of the main view."""

    real: Array
    predicted: Array


class Futures:
    """Predicts observations, learns to, and judges itself on real episodes."""

    def __init__(
        self, trainer: ModelTrainer, frames: FrameTrainer, encoder: Encoder, gate: HorizonGate, max_horizon: int
    ) -> None:
        self.frames, self.gate = frames, gate
        self._trainer, self._encoder, self._max_horizon = trainer, encoder, max_horizon
        self._pictures = deque[Future](maxlen=_PICTURES)

    @property
    def horizon(self) -> int:
        """Chunks that may be imagined in a row."""
        return self.gate.horizon if self.frames.ready else 1

    def advance(self, states: Sequence[State], rating: ChunkRating, elapsed: Sequence[float]) -> list[State]:
        """The states after rated chunks (see ``Dynamics``)."""
        before, after = (self._trainer.standardized(x) for x in (_stack(states, "proprio"), rating.next_proprio))
        task = np.array([state.task for state in states], np.int32)
        images = self.frames.predict(_stack(states, "images"), _stack(states, "first"), task, before, after)
        features = self._encoder.encode(images, rating.next_proprio, task, np.array(elapsed, np.float32))
        return [
            State(images[i], state.first, rating.next_proprio[i], state.task, elapsed[i], features[i])
            for i, state in enumerate(states)
        ]

    def judge(self, trajectory: Trajectory, episode: Episode) -> None:
        """Imagine the real future of some of its states. Call it before the episode is learned from."""
        chunks = trajectory.num_chunks
        if not self.frames.ready or chunks < 2:
            return
        rng = np.random.default_rng(trajectory.episode.id)
        starts = rng.permutation(chunks - 1)[:_STARTS]
        states = [state_of(trajectory, episode, int(t)) for t in starts]
        shown = [[state.images[0]] for state in states]
        for depth in range(1, self._max_horizon):
            inside = [i for i, t in enumerate(starts) if t + depth < chunks]
            starts, states, shown = starts[inside], [states[i] for i in inside], [shown[i] for i in inside]
            if not inside:
                break
            executed = episode.actions[starts + depth - 1]
            elapsed = episode.elapsed[starts + depth]
            predicted = self._imagine(states, executed, elapsed)
            other = self._imagine(states, np.roll(executed, 1, axis=0), elapsed)  # the chunks of other states
            self.gate.add(depth, self._compare(trajectory, episode, starts, depth, predicted, other))
            states = predicted
            for pictures, state in zip(shown, predicted, strict=True):
                pictures.append(state.images[0])
        if len(starts):
            real = trajectory.images[starts[0] : starts[0] + len(shown[0]), 0]
            self._pictures.append(Future(real, np.stack(shown[0])))

    def _imagine(self, states: Sequence[State], actions: Array, elapsed: Array) -> list[State]:
        features, proprio, before = (_stack(states, name) for name in ("features", "proprio", "elapsed"))
        rating = self._trainer.rate(features, proprio, before, actions)
        return self.advance(states, rating, elapsed.tolist())

    def _compare(
        self,
        played: Trajectory,
        episode: Episode,
        starts: Array,
        depth: int,
        predicted: Sequence[State],
        other: Sequence[State],
    ) -> list[Prediction]:
        """``other``: predicted for the chunks of other states."""
        n, ends = len(starts), starts + depth
        features = [episode.features[starts], episode.features[ends], _stack(predicted, "features")]
        chunks = self._encoder.likely_chunks(np.concatenate(features)).reshape(3, n, -1)
        before, after = played.images[starts], played.images[ends]
        return [
            Prediction.of(before[i], after[i], predicted[i].images, other[i].images, chunks[:, i]) for i in range(n)
        ]

    def learn(self, trajectory: Trajectory) -> None:
        """Train on a real episode."""
        self.frames.learn(FrameEpisode.of(trajectory, self._trainer.standardized(trajectory.proprio)))

    def metrics(self) -> dict[str, float]:
        """For the run's log."""
        loss = {"loss_frames": self.frames.loss} if np.isfinite(self.frames.loss) else {}
        return self.gate.metrics() | loss

    def save(self, folder: Path) -> dict[str, Any]:
        """Write frames, model and pictures; returns what ``load`` needs, JSON-able."""
        if self._pictures:
            numbered = list(enumerate(self._pictures))
            arrays: dict[str, Any] = {f"real{i}": f.real for i, f in numbered} | {
                f"predicted{i}": f.predicted for i, f in numbered
            }
            np.savez(folder / "futures.npz", **arrays)
        return {"frames": self.frames.save(folder), "gate": self.gate.state()}

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Continue from ``save``; the pictures begin anew."""
        self.frames.load(folder, state["frames"])
        self.gate.restore(state["gate"])


def state_of(trajectory: Trajectory, episode: Episode, chunk: int) -> State:
    """A real state: the one before this chunk of a real episode."""
    return State(
        images=trajectory.images[chunk],
        first=trajectory.images[0],
        proprio=trajectory.proprio[chunk],
        task=trajectory.episode.task,
        elapsed=float(trajectory.elapsed[chunk]),
        features=episode.features[chunk],
    )


def _stack(states: Sequence[State], name: str) -> Array:
    """[n, ...] of an attribute; numbers as float32."""
    values = [getattr(state, name) for state in states]
    return np.array(values, np.float32) if isinstance(values[0], float) else np.stack(values)


def read_futures(path: Path) -> list[Future]:
    """Pictures of a checkpoint, the oldest first."""
    with np.load(path) as file:
        return [Future(file[f"real{i}"], file[f"predicted{i}"]) for i in range(len(file.files) // 2)]
