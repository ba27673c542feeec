"""Virtual devices: the real runtime (actors, queues, leases, weight sync), with computing replaced by holding a device
for as long as a profile says.

This measures how the runtime handles many devices on a machine that has none. Nothing is learned.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.cluster.processes.common import PulseAddress, device_lease
from vla_rl.cluster.processes.inference import InferenceProcess
from vla_rl.cluster.processes.learner import LearnerProcess
from vla_rl.config.run_config import RunConfig
from vla_rl.core.devices.lock import DeviceLease
from vla_rl.core.ipc.shared_memory import Doorbell, SharedArrays
from vla_rl.core.records import ActionBatch, Array, Observation, PolicySpec, SuperBatch
from vla_rl.observability.meter import Meter
from vla_rl.placement.profile import Profile, load_profile
from vla_rl.placement.update_calls import update_calls
from vla_rl.placement.workload import Workload

_RENDEZVOUS_TIMEOUT_S = 600.0


def virtual_profile(config: RunConfig) -> Profile:
    """The profile of the run's virtual devices, with its time scale applied."""
    assert config.placement.virtual is not None
    return load_profile(Path(config.placement.virtual)).scaled(config.placement.time_scale)


class VirtualPolicyRunner:
    """A ``BatchPolicy`` that takes the time of inference and answers with zeros."""

    def __init__(self, profile: Profile, policy: PolicySpec, weights: Path | None, lease: DeviceLease) -> None:
        self.meter = Meter()
        self._profile, self._lease = profile, lease
        self._policy = policy
        self._published = None if weights is None else SharedArrays.attach(weights)["version"]
        self._version = 0 if self._published is None else int(self._published[0])

    def refresh(self) -> int:
        if self._published is not None and self._published[0] != self._version:
            self._version = int(self._published[0])
            _hold(self._lease, self._profile.weight_sync, self.meter.time("refresh"))  # the learner counts all of it
        return self._version

    def act(self, observation: Observation, draws: Mapping[str, Array], greedy: Array) -> ActionBatch:
        n, policy = len(observation.task), self._policy
        chunk = n, policy.chunk_size, policy.action_dim
        _hold(self._lease, self._profile.infer(n), self.meter.time("act", n))
        return ActionBatch(
            actions=np.zeros(chunk, np.float32),
            record={name: np.zeros((n, *x.shape), x.dtype) for name, x in policy.record.items()},
            logprobs=np.zeros(chunk, np.float32),
            values=np.zeros(n, np.float32),
            policy_version=self._version,
        )

    def offload(self) -> None:
        """Takes no time: ``Profile.onload`` covers the change of both sides."""

    def onload(self) -> None:
        """Takes no time: ``Profile.offload`` covers the change of both sides."""


class VirtualInferenceProcess(InferenceProcess):
    def build(self, attaches: bool = False) -> None:
        """There is nothing to build."""

    def _make_policy_runner(self, weights: Path | None) -> VirtualPolicyRunner:
        lease = device_lease(self._process, self._lock_server, self.spans)
        policy = self._config.policy.spec(self._spec)
        return VirtualPolicyRunner(virtual_profile(self._config), policy, weights, lease)


class VirtualLearner:
    """One rank that takes the time of an update, with the same leases as a real one."""

    def __init__(
        self, profile: Profile, workload: Workload, ranks: int, rendezvous: Rendezvous, lease: DeviceLease
    ) -> None:
        self.meter = Meter()
        self._profile, self._workload, self._ranks = profile, workload, ranks
        self._rendezvous, self._lease = rendezvous, lease

    def update(self, batch: SuperBatch) -> dict[str, float]:
        chunks = batch.num_chunks / self._workload.trained_per_chunk  # new ones
        passes = 0
        with self.meter.time("train"):
            for calls in update_calls(self._profile, self._workload, chunks, self._ranks).parts():
                for call in calls:
                    _hold(self._lease, call.seconds, self.meter.time(call.activity, call.n))
                    passes += call.activity == "micro_batch"
                self._rendezvous.wait()
        return {"learner/passes": float(passes)}

    def publish(self) -> None:
        _hold(self._lease, self._profile.weight_sync, self.meter.time("publish", 1))

    def offload(self) -> None:
        _hold(self._lease, self._profile.offload, self.meter.time("offload", 1))

    def onload(self) -> None:
        _hold(self._lease, self._profile.onload, self.meter.time("onload", 1))


class VirtualLearnerProcess(LearnerProcess):
    def setup(
        self,
        address: tuple[str, int] | None,
        weights: Path,
        state: Path | None,
        policy_version: int,
        pulse: PulseAddress | None = None,
    ) -> None:
        """See LearnerProcess. There is no state to continue from."""
        config, env = self._config, self._config.env
        self._learner = VirtualLearner(
            profile=virtual_profile(config),
            workload=Workload.of(config, env.max_episode_steps or 1, getattr(env, "length_spread", 0.0)),
            ranks=self._world_size,
            rendezvous=Rendezvous(weights.parent, self._process.index, self._world_size),
            lease=device_lease(self._process, self._lock_server, self.spans),
        )
        self._learner.meter.spans = self.spans
        if self._process.index == 0:
            self._published = SharedArrays.create(weights, {"version": ((1,), "<i8")})["version"]
            self._published[0] = policy_version

    def publish(self, policy_version: int, *, average: bool = False) -> None:
        self._learner.publish()
        if self._process.index == 0:
            self._published[0] = policy_version

    def share_frozen_weights(self, path: Path) -> None:
        """There are no weights."""

    def snapshot(self, folder: Path, metadata: dict[str, Any]) -> None:
        """There is nothing to save."""
        (folder / "learner").mkdir(parents=True, exist_ok=True)


class Rendezvous:
    """A barrier for the ranks of one node, by doorbells."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self._rank = rank
        self._bells = [Doorbell(folder / f"rank{r}.bell") for r in range(ranks)]

    def wait(self) -> None:
        """Wait until every rank has arrived. Raises TimeoutError after ten minutes."""
        first, mine, others = self._bells[0], self._bells[self._rank], self._bells[1:]
        if self._rank:
            first.ring([self._rank])
            self._collect(mine, 1)
        else:
            self._collect(mine, len(others))
            for bell in others:
                bell.ring([0])

    def _collect(self, bell: Doorbell, count: int) -> None:
        deadline = time.monotonic() + _RENDEZVOUS_TIMEOUT_S
        while count > 0:
            count -= len(bell.wait(deadline - time.monotonic()))
            if count > 0 and time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._rank} waited {_RENDEZVOUS_TIMEOUT_S:.0f} s for {count} others")


def _hold(lease: DeviceLease, seconds: float, measured: AbstractContextManager[Any]) -> None:
    """Sleep while holding the lease; ``measured`` is entered inside it, so that waiting does not count."""
    if seconds:
        with lease(), measured:
            time.sleep(seconds)
