"""Pieces for tests of the runtime that are about processes and data flow, not about simulators or models."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from vla_rl.core.actions import end_effector
from vla_rl.core.records import ActionBatch, EnvSpec, EpisodeResult, EpisodeSpec, Observation, Trajectory
from vla_rl.observability.meter import Meter
from vla_rl.policies.openvla_oft.config import OpenVLAOFTConfig

K, A, SIZE = 4, 7, 16
SPEC = EnvSpec("fake", ("main",), SIZE, 3, end_effector(), 12, ("do it", "do that"))
POLICY = OpenVLAOFTConfig(chunk_size=K).spec(SPEC)


def trajectory(
    episode: EpisodeSpec, chunks: int = 3, version: int = 0, *, truncated: bool = False, success: bool = True
) -> Trajectory:
    """Every array holds numbers that tell episode and chunk."""
    rows = chunks + truncated
    marks = (episode.id + np.arange(chunks) / 100).astype(np.float32)
    return Trajectory(
        episode=episode,
        images=np.full((rows, 1, SIZE, SIZE, 3), episode.id % 251, np.uint8),
        proprio=np.tile(np.arange(rows, dtype=np.float32)[:, None], (1, 3)),
        elapsed=(np.arange(rows) * K / SPEC.max_episode_steps).astype(np.float32),
        record={"tokens": np.full((chunks, K, A), episode.id % 256, np.uint8)},
        logprobs=np.broadcast_to(marks[:, None, None], (chunks, K, A)).copy(),
        values=marks,
        policy_versions=np.full(chunks, version, np.int32),
        rewards=np.eye(1, chunks * K, chunks * K - 1, dtype=np.float32).reshape(chunks, K) * success,
        num_steps=np.full(chunks, K, np.int32),
        bootstrap_value=0.5 if truncated else 0.0,
        terminated=not truncated,
        truncated=truncated,
        success=success,
    )


def result(episode: EpisodeSpec, version: int = 0) -> EpisodeResult:
    return EpisodeResult(episode, episode.id % 2 == 0, 10, 1.0, version, version, 0.1)


class EchoPolicy:
    """Answers with numbers computed from the observation, so that a mix-up of rows shows."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.version = 0
        self.batches: list[int] = []
        self.on_device = True

    def refresh(self) -> int:
        return self.version

    def offload(self) -> None:
        self.on_device = False

    def onload(self) -> None:
        self.on_device = True

    def act(self, observation: Observation, draws: Mapping[str, np.ndarray], greedy: np.ndarray) -> ActionBatch:
        assert self.on_device
        n = len(observation.task)
        self.batches.append(n)
        mark = observation.images[:, 0, 0, 0, 0].astype(np.float32)
        return ActionBatch(
            actions=np.broadcast_to(mark[:, None, None], (n, K, A)).astype(np.float32),
            record={"tokens": np.broadcast_to(observation.task[:, None, None], (n, K, A)).astype(np.uint8)},
            logprobs=draws["uniforms"].copy(),
            values=greedy.astype(np.float32),
            policy_version=self.version,
        )


@contextmanager
def limited_files(nbytes: int) -> Iterator[None]:
    """Within the block no file of this process grows beyond ``nbytes``, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
