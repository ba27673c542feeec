"""The processes of a layout: how many of each role, on which node and devices, with which threads and locks."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle

from envs.maniskill.config import ManiSkillConfig
from vla_rl.config.run_config import RunConfig
from vla_rl.placement.layouts import choose_layout
from vla_rl.placement.plan import Layout, Plan, PlanError, Process
from vla_rl.placement.resources import Resources, homes


def make_plan(config: RunConfig, resources: Resources, layout: Layout | None = None, *, training: bool = True) -> Plan:
    """The processes of a layout (by default, that of ``choose_layout``). Raises PlanError."""
    layout = layout or choose_layout(config, resources)
    p, learner = config.placement, config.learner
    servers = _processes("inference server", layout, layout.inference, resources, None, p.inference_threads)
    learners = _processes("learner", layout, layout.learner, resources, learner.ranks, learner.threads)
    if training and config.algo.one_rank and len(learners) > 1:
        text = (
            f"{config.algo.name} trains on one rank, and this plan ({layout.describe()}) has {len(learners)} learners"
        )
        raise PlanError("algo.name", f"{text}; set placement.devices=1, or on cores learner.ranks=1")
    workers = _workers(p.env_workers, layout, resources, servers, learners)
    servers = _with_workers(servers, workers)
    return Plan(
        layout=layout,
        workers=workers,
        servers=servers,
        learners=learners if training else (),
        envs_per_worker=p.envs_per_worker,
        splits=_num_splits(config, layout),
        max_batch=p.max_batch,
        offload=training and _always_offloads(config, layout),
        machines=resources.machines,
        world_model=_world_model(config, servers[0]) if training else None,
    )


def _world_model(config: RunConfig, server: Process) -> Process | None:
    """On the device of the first inference server; on cores with threads of its own, and without a lease."""
    if config.world_model is None:
        return None
    place = replace(server, role="world model", index=0, threads=config.world_model.threads)
    return replace(place, devices=(), lock=None) if server.kind == "cpu" else place


def _always_offloads(config: RunConfig, layout: Layout) -> bool:
    """Whether the config asks for it; "auto" is decided by ``search.fit_memory``, which knows what fits."""
    if config.placement.offload != "always":
        return False
    if not set(layout.inference) & set(layout.learner):
        text = f"always is for devices that inference and learner share, and this plan ({layout.describe()}) has none"
        raise PlanError("placement.offload", f"{text}; use auto, or placement.mode=collocated")
    return True


def _num_splits(config: RunConfig, layout: Layout) -> int:
    """How many groups of a worker's envs advance independently.

    Sync mode has one, so that simulation and inference alternate. On a device one call steps a whole split, and
    ManiSkill always steps all envs. On cores each env is a split, so that none waits for another.
    """
    if config.mode == "sync" or (layout.simulators and isinstance(config.env, ManiSkillConfig)):
        return 1
    return min(2, config.placement.envs_per_worker) if layout.simulators else config.placement.envs_per_worker


def _workers(
    count: int, layout: Layout, resources: Resources, servers: tuple[Process, ...], learners: tuple[Process, ...]
) -> tuple[Process, ...]:
    """One on each simulator device; or ``count`` on cores.

    Raises PlanError if a simulator's device is on a node without an inference server.
    """
    if not layout.simulators:
        return _seated(count, resources, servers, learners)
    workers = _processes("env worker", layout, layout.simulators, resources, None, None)
    alone = {worker.node for worker in workers} - {server.node for server in servers}
    if alone:
        text = f"{layout.describe()} leaves node {min(alone)} simulators without an inference server to ask; use more"
        raise PlanError("placement.inference_devices", text)
    return workers


def _seated(
    count: int, resources: Resources, servers: tuple[Process, ...], others: Iterable[Process]
) -> tuple[Process, ...]:
    """Env workers on cores: on the inference servers' nodes in turn. If there are nodes without a device, one that sees
    no core left goes to another server's node that has one, else to the first node without a device that has."""
    room = Counter({node: machine.cores for node, machine in enumerate(resources.machines)})
    for process in (*servers, *others):
        room[process.node] -= process.threads
    hosts = [node for node, m in enumerate(resources.machines) if not m.devices for _ in range(m.cores)]
    away, nodes, workers = cycle(hosts), sorted({server.node for server in servers}), list[Process]()
    for index in range(count):
        node = servers[index % len(servers)].node
        if hosts and room[node] <= 0:
            roomiest = max(nodes, key=lambda number: room[number])
            node = roomiest if room[roomiest] > 0 else next(away)
        room[node] -= 1
        workers.append(Process("env worker", index, "cpu", (), 1, None, node, remote=node not in nodes))
    return tuple(workers)


def _with_workers(servers: tuple[Process, ...], workers: tuple[Process, ...]) -> tuple[Process, ...]:
    """Those inference servers that have an env worker: each worker asks one, so that a node needs no more than it has,
    and the remote ones together no more than they are."""
    left, used = Counter(worker.node for worker in workers if not worker.remote), list[Process]()
    anywhere = sum(worker.remote for worker in workers)
    for server in servers:
        if left[server.node]:
            left[server.node] -= 1
        elif anywhere:
            anywhere -= 1
        else:
            continue
        used.append(replace(server, index=len(used)))
    return tuple(used)


def _processes(
    role: str, layout: Layout, devices: tuple[int, ...], resources: Resources, wanted: int | None, threads: int | None
) -> tuple[Process, ...]:
    """One on each device; on cores as many as wanted, by default one per node with a thread for each core."""
    kind, nodes, shared = resources.kind, homes(resources.machines), layout.shared
    if kind == "cpu":
        return _on_cores(role, layout, devices, nodes, wanted, threads)
    if role == "learner" and wanted not in (None, len(devices)):
        text = f"a plan ({layout.describe()}) has one on each of the learner's {len(devices)} GPUs; use null"
        raise PlanError("learner.ranks", text)
    return tuple(
        Process(role, i, kind, (d,), threads or 1, f"device {d}" if d in shared else None, nodes[d])
        for i, d in enumerate(devices)
    )


def _on_cores(
    role: str, layout: Layout, devices: tuple[int, ...], nodes: Sequence[int], wanted: int | None, threads: int | None
) -> tuple[Process, ...]:
    """``nodes``: of each device."""
    parts = [tuple(d for d in devices if nodes[d] == node) for node in sorted({nodes[d] for d in devices})]
    count = wanted or len(parts)
    if count > len(devices):
        raise PlanError("learner.ranks", f"{count} processes for {len(devices)} CPU cores; use at most that many")
    processes = []
    for index in range(count):
        part = parts[index % len(parts)]
        node, neighbours = nodes[part[0]], len(range(index % len(parts), count, len(parts)))
        lock = f"cores of node {node}" if layout.shared & set(part) else None
        if lock and neighbours > 1:
            text = f"{neighbours} processes would wait for each other while they wait for leases of the same cores"
            raise PlanError("learner.ranks", f"{text}; use {len(parts)}, or placement.mode=pipelined")
        each = threads or max(1, len(part) // neighbours)
        processes.append(Process(role, index, "cpu", part, each, lock, node))
    return tuple(processes)
