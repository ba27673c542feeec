"""What an env worker records of the episode that runs in one of its environments."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vla_rl.core.records import EpisodeResult, EpisodeSpec, Trajectory


@dataclass(slots=True)
class Recording:
    """One running episode."""

    episode: EpisodeSpec
    rng: np.random.Generator = field(init=False)  # of the action sampling; depends on the episode alone
    started: float = field(default_factory=time.perf_counter)
    images: list[np.ndarray] = field(default_factory=list)
    proprio: list[np.ndarray] = field(default_factory=list)
    elapsed: list[np.ndarray] = field(default_factory=list)
    decisions: list[tuple] = field(default_factory=list)  # (record, logprobs, value, policy version) of each chunk
    rewards: list[np.ndarray] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)
    # the potential at the start and after each chunk, of evaluation episodes
    progress: list[float] = field(default_factory=list)
    ended: tuple[bool, bool] | None = None  # (terminated, success), if only the bootstrap value is missing

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng((self.episode.seed, self.episode.member))

    def trajectory(self, worker: int, bootstrap_value: float, terminated: bool, success: bool) -> Trajectory:
        """The finished training episode."""
        records, logprobs, values, versions = zip(*self.decisions, strict=True)
        return Trajectory(
            episode=self.episode,
            images=np.stack(self.images),
            proprio=np.stack(self.proprio),
            elapsed=np.stack(self.elapsed),
            record={name: np.stack([record[name] for record in records]) for name in records[0]},
            logprobs=np.stack(logprobs),
            values=np.asarray(values, np.float32),
            policy_versions=np.asarray(versions, np.int32),
            rewards=np.stack(self.rewards),
            num_steps=np.asarray(self.num_steps, np.int32),
            bootstrap_value=bootstrap_value,
            terminated=terminated,
            truncated=not terminated,
            success=success,
            worker=worker,
            seconds=time.perf_counter() - self.started,
        )

    def result(self, terminated: bool, success: bool, frames: Sequence[np.ndarray]) -> EpisodeResult:
        """The finished evaluation episode."""
        versions = [version for *_, version in self.decisions]
        way = self._way()
        return EpisodeResult(
            episode=self.episode,
            success=success,
            steps=sum(self.num_steps),
            total_reward=float(np.sum(self.rewards)),
            oldest_policy_version=min(versions),
            newest_policy_version=max(versions),
            seconds=time.perf_counter() - self.started,
            frames=tuple(frames),
            terminated=terminated,
            best_progress=max(way, default=math.nan),
            final_progress=way[-1] if way else math.nan,
            values=self._values() if self.episode.record else (),
        )

    def _values(self) -> tuple[float, ...]:
        """Of each executed step: that of its chunk."""
        return tuple(np.repeat([value for _, _, value, _ in self.decisions], self.num_steps).tolist())

    def _way(self) -> list[float]:
        """After each chunk, the share of the way from the start to a potential of 1 that lies behind; not below 0."""
        start, *after = self.progress or [0.0]
        return [max(0.0, reached - start) / max(1.0 - start, 1e-6) for reached in after]
