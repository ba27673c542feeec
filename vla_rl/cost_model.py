"""What a plan can achieve at best: how long each device and the cores are busy for one super-batch.

    seconds a super-batch = max over (each device, the cores)      if everything overlaps perfectly
                          = sum over the phases                    if nothing does (mode=sync)

The larger truth, with queues, turns and stragglers, is ``vla_rl.simulation``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from vla_rl.config import RunConfig
from vla_rl.placement import Plan
from vla_rl.profile import Profile


@dataclass(frozen=True, slots=True)
class Job:
    """What a run asks of the machine."""

    episodes: int  # of a super-batch
    horizon: int  # control steps
    spread: float  # episodes last horizon * (1 - u * spread) steps, u uniform in 0..1
    chunk_size: int
    micro_batch: int
    minibatches: int
    epochs: int
    extra_passes: int  # forward passes over the super-batch before the update
    max_age: int
    publish_every: int  # updates
    max_wait: float  # seconds that an inference request may wait for others
    sync: bool

    @classmethod
    def of(cls, config: RunConfig, horizon: int, spread: float) -> Job:
        return cls(
            episodes=config.train.batch_episodes,
            horizon=horizon,
            spread=spread,
            chunk_size=config.policy.chunk_size,
            micro_batch=config.learner.micro_batch,
            minibatches=config.algo.minibatches,
            epochs=config.algo.epochs,
            extra_passes=(config.algo.proximal == "recomputed") + (config.algo.kl_coef > 0),
            max_age=0 if config.mode == "sync" else config.train.max_age,
            publish_every=1 if config.mode == "sync" else config.train.publish_every,
            max_wait=config.placement.max_wait_ms * 1e-3,
            sync=config.mode == "sync",
        )

    @property
    def chunks(self) -> float:
        """Of a super-batch, on average."""
        return self.episodes * (self.horizon * (1 - self.spread / 2) / self.chunk_size + 0.5 * (self.spread > 0))

    @property
    def steps(self) -> float:
        """Control steps of a super-batch, on average."""
        return self.episodes * self.horizon * (1 - self.spread / 2)


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds of use that one super-batch costs each resource."""

    use: dict[str, float]  # "cores", "device 0", ...
    phases: dict[str, float]  # "simulators", "inference", "learner", each on its own devices

    @property
    def limit(self) -> str:
        """The resource that is busy longest."""
        return max(self.use, key=lambda name: self.use[name])

    @property
    def seconds(self) -> float:
        """Of a super-batch where everything overlaps."""
        return self.use[self.limit]

    @property
    def in_turns(self) -> float:
        """Of a super-batch where nothing does."""
        return sum(self.phases.values())


def bound(plan: Plan, profile: Profile, job: Job, cores: int) -> Bound:
    """The least time that each resource must spend, with full inference batches."""
    steps = job.steps / job.chunk_size  # simulation is paid by executed steps, in units of whole chunks
    layout = plan.layout
    use: dict[str, float] = defaultdict(float)
    if layout.simulators:
        group = math.ceil(plan.slots / plan.stages)
        a_chunk = (profile.simulate(group) * steps + profile.render(group) * job.chunks) / group
        simulate = (a_chunk + profile.reset * job.episodes) / len(layout.simulators)
        for device in layout.simulators:
            use[f"device {device}"] += simulate
    else:
        total = profile.simulate(1) * steps + profile.render(1) * job.chunks + profile.reset * job.episodes
        simulate = use["cores"] = total / min(cores, len(plan.workers))
    transfer = profile.transfer / job.publish_every
    infer = profile.infer(plan.max_batch) / plan.max_batch * job.chunks / len(layout.inference) + transfer
    for device in layout.inference:
        use[f"device {device}"] += infer
    learn = learner_seconds(profile, job, len(layout.learner)) + transfer
    learn += plan.offload * (profile.onload + profile.offload)
    for device in layout.learner:
        use[f"device {device}"] += learn
    return Bound(dict(use), {"simulators": simulate, "inference": infer, "learner": learn})


def learner_seconds(profile: Profile, job: Job, ranks: int) -> float:
    """Of one rank for one update."""
    mine = job.chunks / job.minibatches / ranks
    passes = math.ceil(mine / job.micro_batch)
    minibatch = passes * profile.train(mine / passes) + profile.step
    forward = job.extra_passes * job.minibatches * passes * profile.train(mine / passes) / 3  # a backward costs two
    return job.epochs * job.minibatches * minibatch + forward
