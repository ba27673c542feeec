"""Virtual devices: the whole real runtime, with actors, queues, turns and hand-over, in which computing is replaced by
holding the device for as long as a profile says.

It measures what the runtime makes of many devices on a machine that has none. Nothing is learned.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.cluster.processes import InferenceProcess, LearnerProcess, turns
from vla_rl.config.run_config import RunConfig
from vla_rl.core.devices.lock import Turn
from vla_rl.core.ipc.shared_memory import Doorbell, SharedArrays
from vla_rl.core.records import ActionBatch, EnvSpec, Observation, SuperBatch
from vla_rl.observability.meter import Meter
from vla_rl.placement.cost_model import Job
from vla_rl.placement.profile import Memory, Profile, load_profile

_RENDEZVOUS_TIMEOUT_S = 600.0


def virtual_profile(config: RunConfig) -> Profile:
    """Of the run's virtual devices, with its time scale applied."""
    assert config.placement.virtual is not None
    return load_profile(Path(config.placement.virtual)).dilated(config.placement.time_scale)


class VirtualActor:
    """Takes the time of inference and answers with zeros."""

    def __init__(self, profile: Profile, spec: EnvSpec, chunk_size: int, weights: Path | None, turn: Turn) -> None:
        self.meter = Meter()
        self._profile, self._turn = profile, turn
        self._shape = (chunk_size, spec.action_dim)
        self._newest = None if weights is None else SharedArrays.attach(weights)["version"]
        self._version = 0 if self._newest is None else int(self._newest[0])

    def refresh(self) -> int:
        if self._newest is not None and self._newest[0] != self._version:
            self._version = int(self._newest[0])
            _hold(self._turn, self._profile.transfer, self.meter.time("refresh"))  # the learner counts all of it
        return self._version

    def act(self, observation: Observation, uniforms: np.ndarray, greedy: np.ndarray) -> ActionBatch:
        n = len(observation.task)
        _hold(self._turn, self._profile.infer(n), self.meter.time("act", n))
        return ActionBatch(
            actions=np.zeros((n, *self._shape), np.float32),
            tokens=np.zeros((n, *self._shape), np.uint8),
            logprobs=np.zeros((n, *self._shape), np.float32),
            values=np.zeros(n, np.float32),
            version=self._version,
        )

    def offload(self) -> None:
        """Its part of the time is in that of the learner's coming (``Profile.onload``)."""

    def onload(self) -> None:
        """As ``offload`` (``Profile.offload``)."""


class VirtualInferenceProcess(InferenceProcess):
    def build(self) -> None:
        """Nothing to import, nothing to make."""

    def memory(self) -> Memory:
        return virtual_profile(self._config).memory

    def _make_actor(self, weights: Path | None) -> VirtualActor:
        turn = turns(self._process, self._locks)
        return VirtualActor(virtual_profile(self._config), self._spec, self._config.policy.chunk_size, weights, turn)


class VirtualLearner:
    """One rank that takes the time of an update, in the same turns as a real one."""

    def __init__(
        self, profile: Profile, job: Job, ranks: int, ranks_meet: Rendezvous, turn: Turn, offload: bool
    ) -> None:
        self.meter = Meter()
        self._profile, self._job, self._ranks = profile, job, ranks
        self._meet, self._turn, self._offload = ranks_meet, turn, offload

    def update(self, batch: SuperBatch, iteration: int) -> dict[str, float]:
        job, profile = self._job, self._profile
        mine = batch.num_chunks / job.minibatches / self._ranks
        passes = max(1, math.ceil(mine / job.micro_batch))
        if self._offload:
            _hold(self._turn, profile.onload, self.meter.time("onload", 1))
        with self.meter.time("train"):
            for _ in range(passes * job.minibatches * job.extra_passes):
                _hold(self._turn, profile.train(mine / passes) / 3, nullcontext())
            for _ in range(job.epochs * job.minibatches):
                for _ in range(passes):
                    micro_batch = self.meter.time("micro_batch", mine / passes)
                    _hold(self._turn, profile.train(mine / passes), micro_batch)
                _hold(self._turn, profile.step, self.meter.time("step", 1))
                self._meet.wait()
        return {"learner/passes": float(passes * job.minibatches * job.epochs)}

    def publish(self) -> None:
        _hold(self._turn, self._profile.transfer, self.meter.time("publish", 1))
        self.release()

    def release(self) -> None:
        if self._offload:
            _hold(self._turn, self._profile.offload, self.meter.time("offload", 1))


class VirtualLearnerProcess(LearnerProcess):
    def setup(self, address: tuple[str, int], weights: Path, state: Path | None, version: int) -> None:
        """See LearnerProcess. There is no state to continue from."""
        config, env = self._config, self._config.env
        job = Job.of(config, env.max_episode_steps or 1, getattr(env, "length_spread", 0.0))
        meet = Rendezvous(weights.parent, self._process.index, self._world_size)
        turn = turns(self._process, self._locks)
        profile = virtual_profile(config)
        self._learner = VirtualLearner(profile, job, self._world_size, meet, turn, self._offload)
        if self._process.index == 0:
            self._newest = SharedArrays.create(weights, {"version": ((1,), "<i8")})["version"]
            self._newest[0] = version

    def publish(self, version: int) -> None:
        self._learner.publish()
        if self._process.index == 0:
            self._newest[0] = version

    def lend(self) -> None:
        """There are no weights."""

    def save(self, folder: Path, metadata: dict[str, Any]) -> None:
        """There is nothing to save."""
        (folder / "learner").mkdir(parents=True, exist_ok=True)


class Rendezvous:
    """Where the ranks of one node wait for each other, by doorbells."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self._rank = rank
        self._bells = [Doorbell(folder / f"rank{r}.bell") for r in range(ranks)]

    def wait(self) -> None:
        """Until every rank has come. Raises TimeoutError after ten minutes."""
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


def _hold(turn: Turn, seconds: float, measured: AbstractContextManager[Any]) -> None:
    """``measured``: entered while the turn lasts, so that no waiting counts."""
    if seconds:
        with turn(), measured:
            time.sleep(seconds)
