"""A learner in the test's own process, and in groups of processes."""

from __future__ import annotations

import multiprocessing
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from multiprocessing import connection
from typing import Any

import numpy as np
import torch

from algos import make_algorithm
from tests.runtime_fakes import trajectory
from vla_rl.config.run_config import RunConfig
from vla_rl.core.actions import end_effector
from vla_rl.core.records import EnvSpec, SuperBatch
from vla_rl.replay.schedule import training_episode
from vla_rl.replay.super_batch import collate

TEXTS = ("reach the red block", "push the green block to the right")
SPEC = EnvSpec("fake", ("main",), 48, 3, end_effector(), 12, TEXTS)


def config(**groups: dict[str, Any]) -> RunConfig:
    base: dict[str, dict] = {
        "policy": {"name": "openvla_oft", "size": "nano", "chunk_size": 4},
        "learner": {"micro_batch": 64, "lr": 1e-3},
        "algo": {"name": "ppo", "minibatches": 2},
    }
    return RunConfig.model_validate({name: base.get(name, {}) | groups.get(name, {}) for name in base | groups})


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def make_learner(cfg: RunConfig, rank: int = 0, world_size: int = 1, port: int | None = None) -> Any:
    from vla_rl.learner.learner import Learner
    from vla_rl.learner.process_group import join_ranks
    from vla_rl.policies.build import build_policy

    join_ranks(rank, world_size, ("127.0.0.1", port or free_port()), "cpu")
    policy = build_policy(cfg.policy, SPEC, cfg.seed, cfg.algo.prompts(SPEC.instructions))
    algorithm = make_algorithm(cfg.algo)
    return Learner(cfg, policy, algorithm, rank=rank, world_size=world_size, device="cpu")


def random_batch(seed: int = 0, episodes: int = 5, policy_version: int = 0) -> SuperBatch:
    """Episodes of different lengths with random contents, recorded under the seed-0 policy's rough likelihoods."""
    rng = np.random.default_rng(seed)
    trajectories = []
    for i in range(episodes):
        chunks, truncated = int(rng.integers(1, 5)), bool(rng.integers(2))
        t = trajectory(training_episode(i, i % 2, 0), chunks, truncated=truncated, success=not truncated)
        rows = chunks + truncated
        num_steps = t.num_steps.copy()
        num_steps[-1] = rng.integers(1, 5)
        trajectories.append(
            replace(
                t,
                images=rng.integers(0, 256, (rows, 1, 48, 48, 3)).astype(np.uint8),
                proprio=rng.normal(size=(rows, 3)).astype(np.float32),
                record={"tokens": rng.integers(0, 256, (chunks, 4, 7)).astype(np.uint8)},
                logprobs=np.log(rng.uniform(0.5, 2.0, (chunks, 4, 7)) / 256).astype(np.float32),
                values=rng.normal(size=chunks).astype(np.float32),
                rewards=rng.normal(size=(chunks, 4)).astype(np.float32)
                * (np.arange(4) < num_steps[:, None]).astype(np.float32),
                num_steps=num_steps,
            )
        )
    return collate(trajectories, policy_version, SPEC.max_episode_steps)


def parameters(learner: Any) -> dict[str, np.ndarray]:
    return {name: p.detach().float().cpu().numpy().copy() for name, p in learner.parameters()}


def run_ranks(function: Callable, world_size: int, *arguments: Any) -> list[Any]:
    """``function(rank, world_size, port, *arguments)`` in that many processes; what each returned.

    The processes wait for the next function: libraries and process group take seconds, most of these functions less.
    """
    ranks = _ranks(world_size)
    try:
        return ranks.call(function, *arguments)
    except BaseException:
        _ranks.cache_clear()  # whoever is in the middle of something cannot be asked again
        ranks.end()
        raise


class _Ranks:
    """Processes that are the ranks of one group as long as this process lives."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs, rank, world_size, port), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, function: Callable, *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, arguments))
        deadline, waiting, found = time.monotonic() + 240, dict(enumerate(self._pipes)), {}
        while waiting:
            ready = connection.wait(waiting.values(), max(0.0, deadline - time.monotonic()))
            assert ready, f"no answer of ranks {sorted(waiting)}"
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                error, found[rank] = waiting.pop(rank).recv()
                assert error is None, f"rank {rank}: {error}"
        return [found[rank] for rank in range(len(self._pipes))]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@cache
def _ranks(world_size: int) -> _Ranks:
    return _Ranks(world_size)


def _rank(pipe: Any, rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((None, function(rank, world_size, port, *arguments)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
