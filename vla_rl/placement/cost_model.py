"""The best that a plan can achieve: how long one super-batch keeps each device, the cores, and links busy.

    seconds per super-batch = max over (devices, cores, links)     if all activities overlap perfectly
                            = sum over the phases                  if none do (mode=sync)

``vla_rl.placement.simulation`` adds what this leaves out: queues, device leases and stragglers.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from vla_rl.placement.plan import Plan, Process
from vla_rl.placement.profile import Profile
from vla_rl.placement.update_calls import update_calls
from vla_rl.placement.workload import Workload

_TINY = 1e-12  # seconds; in place of 0 where a rate is computed
Speeds = tuple[tuple[float, int], ...]  # (seconds for a chunk, number of env workers that need so many)


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds of work that one super-batch costs."""

    use: dict[str, float]  # by resource: "cores" and "remote cores" (of the busiest node), "device 0", "link of node 0"
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


def bound(plan: Plan, profile: Profile, workload: Workload) -> Bound:
    """The least time that each resource must spend, with full inference batches."""
    layout = plan.layout
    weight_sync = profile.weight_sync / workload.publish_every
    learn = update_calls(profile, workload, workload.chunks, len(layout.learner)).seconds + weight_sync
    learn += plan.offload * (profile.onload + profile.offload)
    use: dict[str, float] = defaultdict(float)
    for role, held in ((layout.inference, weight_sync), (layout.learner, learn)):
        for device in role:
            use[f"device {device}"] += held
    infer = profile.infer(plan.max_batch) / plan.max_batch
    costs = {remote: _simulator_seconds(plan, profile, workload, remote) for remote in (False, True)}
    simulate = [costs[worker.remote] for worker in plan.workers]
    shares = _chunks_by_server(plan, workload.chunks, simulate, infer, use)
    for server in plan.servers:
        for device in server.devices:
            use[f"device {device}"] += infer * shares[server.index] / len(server.devices)
    mine = _chunks_by_worker(plan, simulate, shares)
    for worker in plan.workers:
        for device in worker.devices:
            use[f"device {device}"] += simulate[worker.index] * mine[worker.index]
    on_cores, simulators_rate = _simulators(plan, workload.chunks, simulate, mine)
    use |= on_cores | _link_seconds(plan, workload, mine)
    imagined = _imagination_seconds(profile, workload)
    if plan.world_model is not None:
        use["world model"] = imagined  # one process, of which the cores must spare one
        for device in plan.servers[0].devices:
            use[f"device {device}"] += infer * workload.branches * workload.chunks / len(plan.servers[0].devices)
    phases = {
        "simulators": workload.chunks / simulators_rate,
        "inference": infer * workload.chunks * (1 + workload.branches) / len(layout.inference) + weight_sync,
        "learner": learn,
        **({"world model": imagined} if plan.world_model is not None else {}),
    }
    return Bound(dict(use), phases)


def _simulators(
    plan: Plan, chunks: float, simulate: Sequence[float], mine: Sequence[float]
) -> tuple[dict[str, float], float]:
    """(seconds of the busiest node's cores, of near and of remote ones; chunks/s of all simulators together).

    ``simulate`` and ``mine``: seconds for a chunk, and chunks, of each env worker.
    """
    seconds: dict[str, float] = {}
    rate, total = 0.0, sum(mine)
    nodes = defaultdict[int, list[Process]](list)
    for worker in plan.workers:
        nodes[worker.node].append(worker)
    for node, here in nodes.items():
        first, each = here[0], simulate[here[0].index]  # the others are like it
        at_once = len(here) if first.devices else min(plan.machines[node].cores, len(here))
        rate += at_once / max(each, _TINY)
        if not first.devices:
            share = chunks * (sum(mine[w.index] for w in here) / total) / at_once
            name = cores_of(first)
            seconds[name] = max(seconds.get(name, 0.0), each * max(share, *(mine[w.index] for w in here)))
    return seconds, rate


def cores_of(process: Process) -> str:
    """The name of the cores on which a process computes, as a resource."""
    return "remote cores" if process.remote else "cores"


def crossings(worker: Process, server: Process) -> Counter[int]:
    """How often an observation of a remote env worker crosses the link of each node: to the server, and within its
    trajectory to the replay store, on node 0. Answers are small, and count as nothing."""
    return Counter([worker.node, server.node, worker.node, 0])


def _link_seconds(plan: Plan, workload: Workload, mine: Sequence[float]) -> dict[str, float]:
    """Seconds for which the links of remote env workers' nodes, and of those that they ask, pass on observations."""
    seconds: dict[str, float] = defaultdict(float)
    assignment = plan.servers_by_worker()
    for worker in plan.remote:
        for node, times in crossings(worker, plan.servers[assignment[worker.index]]).items():
            nbytes = times * workload.row_bytes * mine[worker.index]
            seconds[f"link of node {node}"] += nbytes / plan.machines[node].link.rate
    return seconds


def _imagination_seconds(profile: Profile, workload: Workload) -> float:
    """Seconds of the world model's process for one super-batch, without the inference that it asks for.

    The frozen policy encodes an episode, imagined chunks are rated one by one, and the model learns from the episode.
    """
    chunks = workload.chunks / workload.episodes  # of an episode
    rating = profile.imagine(1) * chunks * workload.branches
    return workload.episodes * (profile.infer(chunks) + rating + profile.model_train(chunks))


def _simulator_seconds(plan: Plan, profile: Profile, workload: Workload, remote: bool) -> float:
    """Seconds of a core or a device for one chunk, including its share of an episode's start."""
    steps = workload.steps / workload.chunk_size  # simulation costs the executed steps, in units of whole chunks
    size = math.ceil(plan.envs_per_worker / plan.splits) if plan.layout.simulators else 1
    render = profile.rendering(remote)
    simulate = (profile.simulate(size) * steps + render(size) * workload.chunks) / size / workload.chunks
    return simulate + profile.reset * workload.episodes / workload.chunks


def _chunks_by_server(
    plan: Plan, chunks: float, simulate: Sequence[float], infer: float, held: dict[str, float]
) -> list[float]:
    """Chunks of a super-batch that each inference server gets if the last one is done as early as possible.

    A server is limited by its own inference and by its env workers' simulation, and servers may have different numbers
    of workers: with 16 workers, 5 servers have 3 or 4. ``simulate``: seconds of each env worker for a chunk.
    ``held``: seconds that each device needs for other work.
    """
    server, worker = plan.servers[0], plan.workers[0]  # the others are like them
    if worker.devices == server.devices:  # a chunk costs the device both
        simulate, infer = [0.0] * len(simulate), simulate[0] + infer
    server_held, worker_held = (held.get(f"device {p.devices[0]}", 0.0) if p.devices else 0.0 for p in (server, worker))

    def played(workers: Speeds, seconds: float) -> float:
        """Chunks that a server with these workers gets done in that time."""
        inferred = len(server.devices) * max(0.0, seconds - server_held) / max(infer, _TINY)
        free = max(0.0, seconds - worker_held)
        return min(inferred, sum(number * free / max(each, _TINY) for each, number in workers))

    workers_of = _speeds_by_server(plan, simulate)
    servers = Counter(workers_of)  # by their workers
    low, high = 0.0, max(held.values()) + chunks * (max(simulate) + infer) + _TINY
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        enough = sum(number * played(workers, middle) for workers, number in servers.items()) >= chunks
        low, high = (low, middle) if enough else (middle, high)
    most = {workers: played(workers, high) for workers in servers}
    total = sum(number * most[workers] for workers, number in servers.items())
    return [chunks * most[workers] / total for workers in workers_of]


def _speeds_by_server(plan: Plan, simulate: Sequence[float]) -> list[Speeds]:
    """Of each inference server: how many of its env workers need so many seconds for a chunk."""
    counts = [Counter[float]() for _ in plan.servers]
    for server, each in zip(plan.servers_by_worker(), simulate, strict=True):
        counts[server][each] += 1
    return [tuple(sorted(count.items())) for count in counts]


def _chunks_by_worker(plan: Plan, simulate: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Chunks of each env worker: of its server's share, the more the faster it is."""
    speeds = _speeds_by_server(plan, simulate)

    def parts(each: float, workers: Speeds) -> float:
        """How many parts of this worker's size the share has."""
        return sum(number * (max(each, _TINY) / max(other, _TINY)) for other, number in workers)

    return [
        shares[server] / parts(each, speeds[server])
        for server, each in zip(plan.servers_by_worker(), simulate, strict=True)
    ]
