"""The process of a learner rank."""

from pathlib import Path
from typing import Any

import numpy as np
import ray

from vla_rl.cluster.processes.common import PulseAddress, Traced, Vital, device_lease
from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import free_port
from vla_rl.core.postponed import Writes, Written, postponed
from vla_rl.core.records import EnvSpec, SuperBatch
from vla_rl.placement.plan import Process


class LearnerProcess(Traced, Vital):
    def __init__(self, config: RunConfig, spec: EnvSpec, process: Process, world_size: int, lock_server: Path) -> None:
        self._config, self._spec, self._process = config, spec, process
        self._world_size, self._lock_server = world_size, lock_server
        self.record_spans(process, config.log.trace)
        self._learner: Any = None
        self._publisher: Any = None
        self._reader: Any = None
        self._writes = Writes()

    def address(self) -> tuple[str, int]:
        """A free port on this process's node, for the process group."""
        return ray.util.get_node_ip_address(), free_port()

    def setup(
        self,
        address: tuple[str, int] | None,
        weights: Path,
        state: Path | None,
        policy_version: int,
        pulse: PulseAddress | None = None,
    ) -> None:
        """Build the model, join the other ranks, continue from ``state`` if given, and publish ``policy_version``.

        ``address``: of rank 0, where ranks of several machines meet; None: all are on this one.
        ``pulse``: where to show progress; None: nobody watches.
        """
        from vla_rl.core.devices.settings import set_up_torch
        from vla_rl.core.ipc.weights import WeightPublisher, WeightReader, create_weight_buffers
        from vla_rl.learner.build import make_learner
        from vla_rl.learner.process_group import join_ranks
        from vla_rl.policies.build import build_policy, torch_dtype

        rank, device = self._process.index, self._process.torch_device
        set_up_torch(device, self._process.threads, self._config.learner.matmul)
        here = ray.util.get_node_ip_address()
        join_ranks(rank, self._world_size, address or weights.with_name("ranks"), device, here)
        config, prompts = self._config, self._config.algo.prompts(self._spec.instructions)
        dtype = torch_dtype(config.learner.precision)
        policy = build_policy(config.policy, self._spec, config.seed, prompts, device=device, dtype=dtype)
        lease = device_lease(self._process, self._lock_server, self.spans)
        ranks: Any = {"rank": rank, "world_size": self._world_size, "device": device, "lease": lease}
        self._learner = make_learner(config, policy, self._spec, **ranks)
        self._learner.meter.spans = self.spans
        if state is not None:
            self._learner.load(state)
        if rank == 0:
            create_weight_buffers(weights, self._learner.published_nbytes())
            self._publisher, self._reader = WeightPublisher(weights), WeightReader(weights)
        self.publish(policy_version)
        if pulse is not None:
            progress = pulse.open(self._process)
            self._learner.meter.observer = progress
            progress.beat()

    def update(self, batch: SuperBatch) -> dict[str, float]:
        from vla_rl.cluster.processes.faults import unreliable_batch

        return self._learner.update(unreliable_batch(batch))

    def publish(self, policy_version: int, *, average: bool = False) -> None:
        self._learner.publish(policy_version, self._publisher, average=average)

    def offload(self) -> None:
        self._learner.offload()

    def onload(self) -> None:
        self._learner.onload()

    def share_frozen_weights(self, path: Path) -> bytes | None:
        """A message with which an inference server on this device, or on these cores, attaches the frozen weights.

        ``path``: of a file for those of a learner on cores.
        """
        from vla_rl.core.ipc.frozen_weights import share_frozen_weights

        return share_frozen_weights(self._learner.policy, path)

    def weights_nbytes(self) -> int:
        """Bytes of one published version; rank 0."""
        return self._reader.nbytes

    def bucket(self, version: int, number: int) -> np.ndarray | None:
        """A part of a publication, for another node; rank 0. See ``WeightReader.bucket``."""
        return self._reader.bucket(version, number)

    def snapshot(self, folder: Path, metadata: dict[str, Any]) -> None:
        """Copy the learner's state on all ranks, and on rank 0 also the policy as a checkpoint of its own."""
        from vla_rl.policies.build import save_policy

        with postponed() as self._writes:
            self._learner.save(folder / "learner")
            with self._learner.whole_policy() as policy:
                if self._process.index == 0:
                    save_policy(self._config.policy, policy, folder / "policy", metadata)

    def write(self, folder: Path) -> Written:
        """Write what the last ``snapshot`` has copied. Meanwhile everything else may be called."""
        return self._writes.run(folder)

    def stats(self) -> dict[str, float]:
        return self._learner.meter.snapshot()
