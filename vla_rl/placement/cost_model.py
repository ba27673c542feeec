"""What a plan can achieve at best: how long each device and the cores are busy for one super-batch.

    seconds a super-batch = max over (each device, the cores)      if everything overlaps perfectly
                          = sum over the phases                    if nothing does (mode=sync)

The larger truth, with queues, turns and stragglers, is ``vla_rl.placement.simulation``.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from vla_rl.config.run_config import RunConfig
from vla_rl.placement.plan import Plan
from vla_rl.placement.profile import Profile


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
    layout, simulators = plan.layout, len(plan.layout.simulators) or min(cores, len(plan.workers))
    transfer = profile.transfer / job.publish_every
    learn = learner_seconds(profile, job, len(layout.learner)) + transfer
    learn += plan.offload * (profile.onload + profile.offload)
    use: dict[str, float] = defaultdict(float)
    for role, held in ((layout.inference, transfer), (layout.learner, learn)):
        for device in role:
            use[f"device {device}"] += held
    infer = profile.infer(plan.max_batch) / plan.max_batch
    simulate = _simulator_seconds(plan, profile, job)
    shares = _divided(plan, job.chunks, simulate, infer, dict(use))
    for server in plan.servers:
        for device in server.devices:
            use[f"device {device}"] += infer * shares[server.index] / len(server.devices)
    assignment = plan.assignment()
    asking = Counter(assignment)
    mine = [shares[server] / asking[server] for server in assignment]  # chunks of each env worker
    for worker in plan.workers:
        for device in worker.devices:
            use[f"device {device}"] += simulate * mine[worker.index]
    if not layout.simulators:
        use["cores"] = simulate * max(job.chunks / simulators, *mine)
    phases = {
        "simulators": simulate * job.chunks / simulators,
        "inference": infer * job.chunks / len(layout.inference) + transfer,
        "learner": learn,
    }
    return Bound(dict(use), phases)


def _simulator_seconds(plan: Plan, profile: Profile, job: Job) -> float:
    """Of a core or a device for one chunk, with its share of an episode's start."""
    steps = job.steps / job.chunk_size  # simulation is paid by executed steps, in units of whole chunks
    group = math.ceil(plan.slots / plan.stages) if plan.layout.simulators else 1
    return (profile.simulate(group) * steps + profile.render(group) * job.chunks) / group / job.chunks + (
        profile.reset * job.episodes / job.chunks
    )


def _divided(plan: Plan, chunks: float, simulate: float, infer: float, held: dict[str, float]) -> list[float]:
    """Chunks of a super-batch that each inference server gets where the last is played soonest.

    A server plays no more than it can infer and the env workers that ask it can simulate, and they are not as many for
    each: of 16 workers, 5 servers have 3 or 4. ``held``: seconds that devices need for other things.
    """
    server, worker, tiny = plan.servers[0], plan.workers[0], 1e-12  # the others are like them
    if worker.devices == server.devices:  # a chunk costs the device both
        simulate, infer = 0.0, simulate + infer
    server_held, worker_held = (held.get(f"device {p.devices[0]}", 0.0) if p.devices else 0.0 for p in (server, worker))

    def played(asking: int, seconds: float) -> float:
        """Chunks of a server with as many workers."""
        inferred = len(server.devices) * max(0.0, seconds - server_held) / max(infer, tiny)
        return min(inferred, asking * max(0.0, seconds - worker_held) / max(simulate, tiny))

    asking = Counter(plan.assignment())
    servers = Counter(asking.values())  # by their number of workers
    low, high = 0.0, max(held.values()) + chunks * (simulate + infer) + tiny
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        enough = sum(number * played(workers, middle) for workers, number in servers.items()) >= chunks
        low, high = (low, middle) if enough else (middle, high)
    most = {workers: played(workers, high) for workers in servers}
    total = sum(number * most[workers] for workers, number in servers.items())
    return [chunks * most[asking[server.index]] / total for server in plan.servers]


def learner_seconds(profile: Profile, job: Job, ranks: int) -> float:
    """Of one rank for one update."""
    mine = job.chunks / job.minibatches / ranks
    passes = math.ceil(mine / job.micro_batch)
    minibatch = passes * profile.train(mine / passes) + profile.step
    forward = job.extra_passes * job.minibatches * passes * profile.train(mine / passes) / 3  # a backward costs two
    return job.epochs * job.minibatches * minibatch + forward
