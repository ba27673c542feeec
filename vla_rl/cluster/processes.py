"""What runs inside the processes of a cluster: each class builds one component there and forwards a handful of calls.

Imports of torch, simulators and algorithms wait until a process needs them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from algos import make_algorithm
from vla_rl.config.run_config import RunConfig
from vla_rl.core.devices.lock import DeviceLock, Turn
from vla_rl.core.ipc.mailbox import PoolAddress
from vla_rl.core.machine import free_port
from vla_rl.core.records import EnvSpec, Episode, EpisodeResult, SuperBatch, Trajectory
from vla_rl.inference.inference_server import Actor
from vla_rl.placement.plan import Plan, Process
from vla_rl.placement.profile import Memory
from vla_rl.replay.store import ReplayStore, StoreRules
from vla_rl.replay.trajectory_file import save_trajectories

_TURN_TIMEOUT_S = 600.0  # for whoever has it: longer than any micro-batch
_BUCKETS_AHEAD = 2
CALL_TIMEOUT_S = 60.0  # anything that only reads or writes state


def turns(process: Process, locks: Path) -> Turn:
    """How a process computes: in turns with others, through the lock server at ``locks``, or as it likes."""
    if process.turns is None:
        return nullcontext
    lock = DeviceLock(locks, process.turns, f"{process.role} {process.index}")
    return partial(lock.turn, _TURN_TIMEOUT_S)


class Orders:
    """The store as an env worker sees it."""

    def __init__(self, store: ActorHandle) -> None:
        self._store = store

    def take(self, worker: int, count: int, timeout: float) -> list[Episode]:
        return ray.get(self._store.take.remote(worker, count, timeout), timeout=timeout + CALL_TIMEOUT_S)

    def add(self, worker: int, finished: Trajectory | EpisodeResult) -> None:
        self._store.add.remote(worker, finished)


class EnvWorkerProcess:
    def __init__(self, config: RunConfig, process: Process, locks: Path) -> None:
        self._config, self._process, self._locks = config, process, locks
        self._worker: Any = None

    def run(self, address: PoolAddress, row_owner: int, plan: Plan, store: ActorHandle) -> None:
        """Build everything in the thread that will use it (an OpenGL context belongs to one thread), then play."""
        from envs import make_env
        from envs.base.shaping import shaped
        from vla_rl.core.ipc.mailbox import WorkerMailbox
        from vla_rl.rollout.env_worker import EnvWorker

        env = shaped(make_env(self._config.env, plan.slots), self._config.env.shaping)
        mailbox = WorkerMailbox(address, row_owner)
        config = self._config
        self._worker = EnvWorker(
            *(self._process.index, env, mailbox, Orders(store), config.policy.chunk_size, plan.stages),
            final_values=config.algo.final_values,
            turn=turns(self._process, self._locks),
        )
        self._worker.run()

    def stats(self) -> dict[str, float]:
        return self._worker.meter.snapshot() if self._worker else {}

    def stop(self) -> None:
        if self._worker:
            self._worker.stop()


class InferenceProcess:
    def __init__(self, config: RunConfig, spec: EnvSpec, process: Process, locks: Path) -> None:
        self._config, self._spec, self._process, self._locks = config, spec, process, locks
        self._policy: Any = None
        self._server: Any = None

    def build(self) -> None:
        """Import libraries and make the policy: what takes long, and needs no other process."""
        import torch

        from vla_rl.learner.learner import DTYPES
        from vla_rl.policies import build_policy

        torch.set_num_threads(self._process.threads)
        self._policy = build_policy(self._config.policy, self._spec, self._config.seed)
        self._policy.to(DTYPES[self._config.learner.precision])

    def connect(self, address: PoolAddress, weights: Path | None, max_batch: int, lent: bytes | None = None) -> None:
        """After ``build``, and after the learner has published its first weights. ``lent``: frozen weights to act with
        in place of the own ones."""
        if lent is not None:
            from vla_rl.core.ipc.frozen_weights import borrow

            borrow(self._policy, lent)
        from vla_rl.core.ipc.mailbox import ServerMailbox
        from vla_rl.inference.inference_server import BatchRule, InferenceServer

        rule = BatchRule(max_batch, self._config.placement.max_wait_ms * 1e-3)
        self._server = InferenceServer(self._make_actor(weights), ServerMailbox(address), rule)

    def _make_actor(self, weights: Path | None) -> Actor:
        from vla_rl.core.ipc.weights import WeightReader
        from vla_rl.inference.policy_runner import PolicyActor

        reader = WeightReader(weights) if weights else None
        settings = self._config.policy
        return PolicyActor(
            *(self._policy, settings.temperature, reader, self._process.torch_device),
            latency_s=settings.latency_ms * 1e-3,
            turn=turns(self._process, self._locks),
        )

    def run(self) -> None:
        self._server.run()

    def leave(self) -> None:
        """Make room on the device: the policy leaves it until ``come_back``."""
        self._server.leave(_TURN_TIMEOUT_S)

    def come_back(self) -> None:
        self._server.come_back()

    def memory(self) -> Memory:
        """What the policy takes, after ``build``; here no ZeRO stage has divided it."""
        from vla_rl.placement.profile import memory_of

        return memory_of(self._config, self._policy)

    def stats(self) -> dict[str, float]:
        """Of the server, with its waits for turns, and of the actor, without them."""
        return self._server.meter.snapshot() | self._server.actor.meter.snapshot() if self._server else {}

    def stop(self) -> None:
        if self._server:
            self._server.stop()


class LearnerProcess:
    def __init__(
        self,
        config: RunConfig,
        spec: EnvSpec,
        process: Process,
        world_size: int,
        locks: Path,
        offload: bool = False,
    ) -> None:
        self._config, self._spec, self._process = config, spec, process
        self._world_size, self._locks, self._offload = world_size, locks, offload
        self._learner: Any = None
        self._publisher: Any = None
        self._reader: Any = None

    def address(self) -> tuple[str, int]:
        """A free port on this process's node, for the process group."""
        return ray.util.get_node_ip_address(), free_port()

    def setup(self, address: tuple[str, int], weights: Path, state: Path | None, version: int) -> None:
        """Build the model, join the other ranks, continue from ``state`` if given, and publish ``version``."""
        import torch

        from vla_rl.core.ipc.weights import WeightPublisher, WeightReader, create_weights
        from vla_rl.learner.learner import Learner, join_ranks
        from vla_rl.policies import build_policy

        torch.set_num_threads(self._process.threads)
        rank, device = self._process.index, self._process.torch_device
        join_ranks(rank, self._world_size, *address, device)
        policy = build_policy(self._config.policy, self._spec, self._config.seed)
        self._learner = Learner(
            self._config,
            policy,
            make_algorithm(self._config.algo),
            rank=rank,
            world_size=self._world_size,
            device=device,
            turn=turns(self._process, self._locks),
            offload=self._offload,
        )
        if state is not None:
            self._learner.load(state)
        if rank == 0:
            create_weights(weights, self._learner.parameters())
            self._publisher, self._reader = WeightPublisher(weights), WeightReader(weights)
        self.publish(version)

    def update(self, batch: SuperBatch, iteration: int) -> dict[str, float]:
        return self._learner.update(batch, iteration)

    def publish(self, version: int) -> None:
        self._learner.publish(version, self._publisher)

    def lend(self) -> bytes | None:
        """Frozen weights, to one process on this device or these cores; see ``lending``."""
        from vla_rl.core.ipc.frozen_weights import lend

        return lend(self._learner.policy)

    def weights_nbytes(self) -> int:
        """Of one version; rank 0."""
        return self._reader.nbytes

    def bucket(self, version: int, index: int) -> np.ndarray | None:
        """A part of a published version, for another node; rank 0. See ``WeightReader.bucket``."""
        return self._reader.bucket(version, index)

    def release(self) -> None:
        """After an update whose weights are not handed over."""
        self._learner.release()

    def save(self, folder: Path, metadata: dict[str, Any]) -> None:
        """Learner state on all ranks, and the policy as a checkpoint that stands alone from rank 0."""
        from vla_rl.policies import save_policy

        with self._learner.on_device():
            self._learner.save(folder / "learner")
            with self._learner.whole_policy() as policy:
                if self._process.index == 0:
                    save_policy(policy, folder / "policy", metadata)

    def stats(self) -> dict[str, float]:
        return self._learner.meter.snapshot()


class RelayProcess:
    """Brings weights to a node without the learner's first rank."""

    def __init__(self, weights: Path) -> None:
        self._path = weights
        self._learner: Any = None
        self._relay: Any = None

    def connect(self, learner: ActorHandle) -> None:
        """After the learner has published its first weights."""
        from vla_rl.core.ipc.weights import WeightRelay, create_buffers

        nbytes: Any = ray.get(learner.weights_nbytes.remote(), timeout=CALL_TIMEOUT_S)
        create_buffers(self._path, nbytes)
        self._learner, self._relay = learner, WeightRelay(self._path)

    def pull(self, version: int) -> None:
        """Publish ``version`` on this node, unless a newer one has taken its place meanwhile."""
        self._relay.relay(version, self._buckets(version))

    def _buckets(self, version: int) -> Iterator[np.ndarray | None]:
        """In order, with some under way ahead."""
        asked: deque[ray.ObjectRef] = deque()
        for index in range(self._relay.num_buckets):
            asked.append(self._learner.bucket.remote(version, index))
            if len(asked) > _BUCKETS_AHEAD:
                yield ray.get(asked.popleft(), timeout=CALL_TIMEOUT_S)
        for ref in asked:
            yield ray.get(ref, timeout=CALL_TIMEOUT_S)


class StoreProcess(ReplayStore):
    """Closed until ``open``: env workers start with everything else, and wait until the run's state is restored. Closed
    again before the processes end in order."""

    def __init__(self, rules: StoreRules) -> None:
        super().__init__(rules)
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        """From now on no episode is started, not even for those who wait in ``take`` already."""
        self._open.clear()

    def _available(self) -> int:
        return super()._available() if self._open.is_set() else 0

    def take(self, worker: int, count: int, timeout: float) -> list[Episode]:
        return super().take(worker, count, timeout) if self._open.wait(timeout) else []

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the finished, untrained trajectories; returns the counters."""
        record, trajectories = self.state()
        save_trajectories(folder / "trajectories.npz", trajectories)
        return record
