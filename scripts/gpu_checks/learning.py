"""A learner in this process, and the super-batches that it trains on."""

import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from algos import make_algorithm
from algos.algorithm import Algorithm
from algos.off_policy import OffPolicyAlgorithm
from gpu_checks.setting import spec_of
from vla_rl.config.run_config import RunConfig
from vla_rl.core.ipc.shared_memory import shared_root
from vla_rl.core.records import Array, ArrayLayout, EpisodeSpec, SuperBatch, Trajectory
from vla_rl.learner.gradient_learner import GradientLearner
from vla_rl.learner.learner import Learner
from vla_rl.learner.process_group import join_ranks
from vla_rl.policies.base.policy import Policy
from vla_rl.replay.super_batch import collate


def make_learner(config: RunConfig, policy: Policy, device: str) -> Learner:
    """The only rank of its group."""
    _join_alone(device)
    algorithm = make_algorithm(config.algo)
    assert isinstance(algorithm, Algorithm)  # each check names one that trains on super-batches
    return Learner(config, policy, algorithm, rank=0, world_size=1, device=device)


def make_off_policy_learner(config: RunConfig, policy: Policy, device: str) -> GradientLearner:
    """Likewise, of an algorithm with a replay memory."""
    _join_alone(device)
    algorithm = make_algorithm(config.algo)
    assert isinstance(algorithm, OffPolicyAlgorithm)
    return GradientLearner(config, policy, algorithm, spec_of(config.policy.size_name), device=device)


def _join_alone(device: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    join_ranks(0, 1, ("127.0.0.1", port), device)


def super_batch(config: RunConfig, episodes: int, chunks: int, policy_version: int = 0) -> SuperBatch:
    """Episodes of random contents; every other one succeeds."""
    spec, k, rng = spec_of(config.policy.size_name), config.policy.chunk_size, np.random.default_rng(policy_version)
    record = config.policy.spec(spec).record
    played = [_episode(i, spec.image_size, chunks, k, record, rng) for i in range(episodes)]
    return collate(played, policy_version, chunks * k)


def _drawn(layout: ArrayLayout, chunks: int, rng: np.random.Generator) -> Array:
    """Decisions of these chunks: bins, or normalized actions."""
    shape = chunks, *layout.shape
    if np.dtype(layout.dtype) == np.uint8:
        return rng.integers(0, 256, shape).astype(np.uint8)
    return rng.uniform(-1, 1, shape).astype(layout.dtype)


def _episode(
    number: int, pixels: int, chunks: int, k: int, record: Mapping[str, ArrayLayout], rng: np.random.Generator
) -> Trajectory:
    return Trajectory(
        episode=EpisodeSpec(id=number, task=number % 2, seed=number, group=number),
        images=rng.integers(0, 256, (chunks, 1, pixels, pixels, 3)).astype(np.uint8),
        proprio=np.zeros((chunks, 0), np.float32),
        elapsed=np.linspace(0, 1, chunks, endpoint=False, dtype=np.float32),
        record={name: _drawn(layout, chunks, rng) for name, layout in record.items()},
        logprobs=np.full((chunks, k, 7), -np.log(256), np.float32),
        values=rng.normal(size=chunks).astype(np.float32),
        policy_versions=np.zeros(chunks, np.int32),
        rewards=np.eye(1, chunks * k, chunks * k - 1, dtype=np.float32).reshape(chunks, k) * (number % 2),
        num_steps=np.full(chunks, k, np.int32),
        bootstrap_value=0.0,
        terminated=True,
        truncated=False,
        success=bool(number % 2),
    )


@contextmanager
def shared_folder() -> Iterator[Path]:
    """In shared memory; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="check_gpu-", dir=shared_root()) as folder:
        yield Path(folder)
