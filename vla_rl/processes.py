"""What runs inside the processes of a cluster: each class builds one component there and forwards a handful of calls.

Imports of torch, simulators and algorithms wait until a process needs them.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from vla_rl.checkpoint import save_trajectories
from vla_rl.config import RunConfig
from vla_rl.mailbox import PoolAddress
from vla_rl.placement import Plan, Process
from vla_rl.replay import ReplayStore
from vla_rl.types import EnvSpec, Episode, EpisodeResult, SuperBatch, Trajectory

CALL_TIMEOUT_S = 60.0  # anything that only reads or writes state


class Orders:
    """The store as an env worker sees it."""

    def __init__(self, store: ActorHandle) -> None:
        self._store = store

    def take(self, worker: int, count: int, timeout: float) -> list[Episode]:
        return ray.get(self._store.take.remote(worker, count, timeout), timeout=timeout + CALL_TIMEOUT_S)

    def add(self, worker: int, finished: Trajectory | EpisodeResult) -> None:
        self._store.add.remote(worker, finished)


class EnvWorkerProcess:
    def __init__(self, config: RunConfig, index: int) -> None:
        self._config, self._index = config, index
        self._worker: Any = None

    def run(self, address: PoolAddress, row_owner: int, plan: Plan, store: ActorHandle) -> None:
        """Build everything in the thread that will use it (an OpenGL context belongs to one thread), then play."""
        from envs import make_env
        from vla_rl.mailbox import WorkerMailbox
        from vla_rl.rollout import EnvWorker

        env = make_env(self._config.env, plan.slots)
        mailbox = WorkerMailbox(address, row_owner)
        self._worker = EnvWorker(self._index, env, mailbox, Orders(store), self._config.policy.chunk_size, plan.stages)
        self._worker.run()

    def stats(self) -> dict[str, float]:
        return self._worker.meter.snapshot() if self._worker else {}

    def stop(self) -> None:
        if self._worker:
            self._worker.stop()


class InferenceProcess:
    def __init__(self, config: RunConfig, spec: EnvSpec, process: Process) -> None:
        self._config, self._spec, self._process = config, spec, process
        self._server: Any = None

    def setup(self, address: PoolAddress, weights: Path | None) -> None:
        import torch

        from vla_rl.actor import PolicyActor
        from vla_rl.inference import BatchRule, InferenceServer
        from vla_rl.learner import DTYPES
        from vla_rl.mailbox import ServerMailbox
        from vla_rl.policies import build_policy
        from vla_rl.weights import WeightReader

        torch.set_num_threads(self._process.threads)
        policy = build_policy(self._config.policy, self._spec, self._config.seed)
        policy.to(DTYPES[self._config.learner.precision])
        reader = WeightReader(weights) if weights else None
        settings = self._config.policy
        actor = PolicyActor(
            policy, settings.temperature, reader, self._process.device, latency_s=settings.latency_ms * 1e-3
        )
        rule = BatchRule(self._config.placement.max_batch, self._config.placement.max_wait_ms * 1e-3)
        self._server = InferenceServer(actor, ServerMailbox(address), rule)

    def run(self) -> None:
        self._server.run()

    def stats(self) -> dict[str, float]:
        return self._server.meter.snapshot() if self._server else {}

    def stop(self) -> None:
        if self._server:
            self._server.stop()


class LearnerProcess:
    def __init__(self, config: RunConfig, spec: EnvSpec, process: Process) -> None:
        self._config, self._spec, self._process = config, spec, process
        self._learner: Any = None
        self._publisher: Any = None

    def address(self) -> tuple[str, int]:
        """A free port on this process's node, for the process group."""
        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), s.getsockname()[1]

    def setup(self, address: tuple[str, int], weights: Path, state: Path | None, version: int) -> None:
        """Build the model, join the other ranks, continue from ``state`` if given, and publish ``version``."""
        import torch

        from algos import make_algorithm
        from vla_rl.learner import Learner, join_ranks
        from vla_rl.policies import build_policy
        from vla_rl.weights import WeightPublisher, create_weights

        torch.set_num_threads(self._process.threads)
        rank, world_size = self._process.index, self._config.learner.ranks
        join_ranks(rank, world_size, *address, self._process.device)
        policy = build_policy(self._config.policy, self._spec, self._config.seed)
        self._learner = Learner(
            self._config,
            policy,
            make_algorithm(self._config.algo),
            rank=rank,
            world_size=world_size,
            device=self._process.device,
        )
        if state is not None:
            self._learner.load(state)
        if rank == 0:
            create_weights(weights, self._learner.parameters())
            self._publisher = WeightPublisher(weights)
        self.publish(version)

    def update(self, batch: SuperBatch, iteration: int) -> dict[str, float]:
        return self._learner.update(batch, iteration)

    def publish(self, version: int) -> None:
        self._learner.publish(version, self._publisher)

    def save(self, folder: Path, metadata: dict[str, Any]) -> None:
        """Learner state on all ranks, and the policy as a checkpoint that stands alone from rank 0."""
        from vla_rl.policies import save_policy

        self._learner.save(folder / "learner")
        with self._learner.whole_policy() as policy:
            if self._process.index == 0:
                save_policy(policy, folder / "policy", metadata)

    def stats(self) -> dict[str, float]:
        return self._learner.meter.snapshot()


class StoreProcess(ReplayStore):
    def save(self, folder: Path) -> dict[str, Any]:
        """Write the finished, untrained trajectories; returns the counters."""
        record, trajectories = self.state()
        save_trajectories(folder / "trajectories.npz", trajectories)
        return record
