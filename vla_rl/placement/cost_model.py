"""The best that a plan can achieve: how long one super-batch keeps each device, and the cores, busy.

    seconds per super-batch = max over (each device, the cores)    if all activities overlap perfectly
                            = sum over the phases                  if none do (mode=sync)

``vla_rl.placement.simulation`` adds what this leaves out: queues, device leases and stragglers.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Self

from vla_rl.config.run_config import RunConfig
from vla_rl.placement.plan import Plan
from vla_rl.placement.profile import Profile


@dataclass(frozen=True, slots=True)
class Workload:
    """What a run asks of the machine."""

    episodes: int  # new real ones, of a super-batch
    branches: int  # imagined chunks for each of their chunks; 0: there is no world model
    reuse: int  # super-batches that hold an episode
    horizon: int  # time limit of an episode, in control steps
    spread: float  # episodes last horizon * (1 - u * spread) steps, u uniform in 0..1
    chunk_size: int
    micro_batch: int
    minibatches: int
    epochs: int
    extra_passes: int  # forward passes over the super-batch before the update
    max_staleness: int  # where an episode is first trained
    publish_every: int  # updates
    max_wait: float  # seconds that an inference request may wait for others

    @classmethod
    def of(cls, config: RunConfig, horizon: int, spread: float) -> Self:
        work = config.algo.work(config.policy.chunk_size)
        return cls(
            episodes=config.train.batch_episodes,
            branches=0 if config.world_model is None else config.world_model.branches,
            reuse=config.train.reuse,
            horizon=horizon,
            spread=spread,
            chunk_size=config.policy.chunk_size,
            micro_batch=config.learner.micro_batch,
            minibatches=work.minibatches,
            epochs=work.epochs,
            extra_passes=work.extra_passes,
            max_staleness=config.max_first_staleness,
            publish_every=config.publish_every,
            max_wait=config.placement.max_wait_ms * 1e-3,
        )

    @property
    def steps(self) -> float:
        """Mean number of control steps in the new episodes of a super-batch."""
        return self.episodes * self.horizon * (1 - self.spread / 2)

    @property
    def chunks(self) -> float:
        """Mean number of chunks in the new episodes; one that ends early leaves half a chunk unused on average."""
        return self.episodes * (self.horizon * (1 - self.spread / 2) / self.chunk_size + 0.5 * (self.spread > 0))

    @property
    def trained_per_chunk(self) -> int:
        """Chunks in a super-batch for each new real one: also those used again, and imagined ones."""
        return self.reuse + self.branches


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds of work that one super-batch costs."""

    use: dict[str, float]  # by resource: "cores", "device 0", ...
    phases: dict[str, float]  # "simulators", "inference", "learner", "world model", each on its own devices

    @property
    def limit(self) -> str:
        """The resource that is busy longest."""
        return max(self.use, key=lambda name: self.use[name])

    @property
    def seconds(self) -> float:
        """Least seconds per super-batch if all activities overlap."""
        return self.use[self.limit]

    @property
    def sequential_seconds(self) -> float:
        """Least seconds per super-batch if one phase follows the other."""
        return sum(self.phases.values())


def bound(plan: Plan, profile: Profile, workload: Workload, cores: int) -> Bound:
    """The least time that each resource must spend, with full inference batches."""
    layout, simulators = plan.layout, len(plan.layout.simulators) or min(cores, len(plan.workers))
    weight_sync = profile.weight_sync / workload.publish_every
    learn = learner_seconds(profile, workload, len(layout.learner)) + weight_sync
    learn += plan.offload * (profile.onload + profile.offload)
    use: dict[str, float] = defaultdict(float)
    for role, held in ((layout.inference, weight_sync), (layout.learner, learn)):
        for device in role:
            use[f"device {device}"] += held
    infer = profile.infer(plan.max_batch) / plan.max_batch
    simulate = _simulator_seconds(plan, profile, workload)
    shares = _chunks_by_server(plan, workload.chunks, simulate, infer, use)
    for server in plan.servers:
        for device in server.devices:
            use[f"device {device}"] += infer * shares[server.index] / len(server.devices)
    assignment = plan.servers_by_worker()
    workers_of = Counter(assignment)
    mine = [shares[server] / workers_of[server] for server in assignment]  # chunks of each env worker
    for worker in plan.workers:
        for device in worker.devices:
            use[f"device {device}"] += simulate * mine[worker.index]
    if not layout.simulators:
        use["cores"] = simulate * max(workload.chunks / simulators, *mine)
    imagined = _imagination_seconds(profile, workload)
    if plan.world_model is not None:
        use["world model"] = imagined  # one process, of which the cores must spare one
        for device in plan.servers[0].devices:
            use[f"device {device}"] += infer * workload.branches * workload.chunks / len(plan.servers[0].devices)
    phases = {
        "simulators": simulate * workload.chunks / simulators,
        "inference": infer * workload.chunks * (1 + workload.branches) / len(layout.inference) + weight_sync,
        "learner": learn,
        **({"world model": imagined} if plan.world_model is not None else {}),
    }
    return Bound(dict(use), phases)


def _imagination_seconds(profile: Profile, workload: Workload) -> float:
    """Seconds of the world model's process for one super-batch, without the inference that it asks for.

    The frozen policy encodes an episode, imagined chunks are rated one by one, and the model learns from the episode.
    """
    chunks = workload.chunks / workload.episodes  # of an episode
    rating = profile.imagine(1) * chunks * workload.branches
    return workload.episodes * (profile.infer(chunks) + rating + profile.model_train(chunks))


def _simulator_seconds(plan: Plan, profile: Profile, workload: Workload) -> float:
    """Seconds of a core or a device for one chunk, including its share of an episode's start."""
    steps = workload.steps / workload.chunk_size  # simulation costs the executed steps, in units of whole chunks
    size = math.ceil(plan.envs_per_worker / plan.splits) if plan.layout.simulators else 1
    simulate = (profile.simulate(size) * steps + profile.render(size) * workload.chunks) / size / workload.chunks
    return simulate + profile.reset * workload.episodes / workload.chunks


def _chunks_by_server(plan: Plan, chunks: float, simulate: float, infer: float, held: dict[str, float]) -> list[float]:
    """Chunks of a super-batch that each inference server gets if the last one is done as early as possible.

    A server is limited by its own inference and by its env workers' simulation, and servers may have different numbers
    of workers: with 16 workers, 5 servers have 3 or 4. ``held``: seconds that each device needs for other work.
    """
    server, worker, tiny = plan.servers[0], plan.workers[0], 1e-12  # the others are like them
    if worker.devices == server.devices:  # a chunk costs the device both
        simulate, infer = 0.0, simulate + infer
    server_held, worker_held = (held.get(f"device {p.devices[0]}", 0.0) if p.devices else 0.0 for p in (server, worker))

    def played(workers: int, seconds: float) -> float:
        """Chunks that a server with this many workers gets done in that time."""
        inferred = len(server.devices) * max(0.0, seconds - server_held) / max(infer, tiny)
        return min(inferred, workers * max(0.0, seconds - worker_held) / max(simulate, tiny))

    workers_of = Counter(plan.servers_by_worker())
    servers = Counter(workers_of.values())  # by their number of workers
    low, high = 0.0, max(held.values()) + chunks * (simulate + infer) + tiny
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        enough = sum(number * played(workers, middle) for workers, number in servers.items()) >= chunks
        low, high = (low, middle) if enough else (middle, high)
    most = {workers: played(workers, high) for workers in servers}
    total = sum(number * most[workers] for workers, number in servers.items())
    return [chunks * most[workers_of[server.index]] / total for server in plan.servers]


def learner_seconds(profile: Profile, workload: Workload, ranks: int) -> float:
    """Seconds of one rank for one update."""
    mine = workload.trained_per_chunk * workload.chunks / workload.minibatches / ranks
    passes = math.ceil(mine / workload.micro_batch)
    train = passes * profile.train(mine / passes)
    forward = workload.extra_passes * workload.minibatches * train / 3  # a backward pass costs two forward passes
    return workload.epochs * workload.minibatches * (train + profile.step) + forward
