"""What runs where: pure functions from a configuration and a machine's resources to a plan.

    resources ──▶ layouts (every mode and split) ──▶ one is chosen ──▶ plan: processes, devices, locks, batch sizes

*collocated*  inference and learner share every device, by leases; so do simulators that run on devices.
*pipelined*   every device belongs to one role, and no process waits for a lease.
*hybrid*      simulators and inference divide the devices, the learner shares all of them.

A device is a GPU, with one process for each role that uses it. On a machine without a GPU, a device is a processor
core: a role has one process per node with a thread for each of its cores, and roles that overlap lease the node's cores
as a whole. Simulators that run on cores (LIBERO) have processes of their own and need no lease.

With several nodes, these take turns in the numbering of devices: however the devices are divided, every node has its
part of each role. An env worker and its inference server run on one node, because they share memory. Nodes without a
device take the env workers for which the others have no core left; these workers are remote. A request relay on their
node and a gateway on their server's node carry their requests (``vla_rl.inference.network``).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle, pairwise
from typing import Literal

from envs.libero.config import LiberoConfig
from envs.maniskill.config import ManiSkillConfig
from envs.metaworld.config import MetaWorldConfig
from envs.workload.config import WorkloadConfig
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.placement.resources import Kind, Node, Resources, homes

Mode = Literal["collocated", "pipelined", "hybrid"]


class PlanError(UserError):
    """No plan fits; the text shows the arithmetic, ``key`` is the configuration key to change."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key}: {text}")
        self.key, self.text = key, text


@dataclass(frozen=True, slots=True)
class Layout:
    """Which devices each role uses."""

    mode: Mode
    simulators: tuple[int, ...]  # empty: on cores
    inference: tuple[int, ...]
    learner: tuple[int, ...]

    @property
    def shared(self) -> frozenset[int]:
        """Devices of several roles, which lease them."""
        roles = Counter(d for role in (self.simulators, self.inference, self.learner) for d in role)
        return frozenset(d for d, count in roles.items() if count > 1)

    def describe(self) -> str:
        """Such as ``pipelined 3+5``: numbers of devices of simulators (if any), inference and learner."""
        counts = [len(role) for role in (self.simulators, self.inference, self.learner) if role]
        return self.mode if self.mode == "collocated" else f"{self.mode} {'+'.join(map(str, counts))}"


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the plan."""

    # "env worker", "inference server", "learner", "world model", "weight relay", "request relay", "gateway" or
    # "replay store"
    role: str
    index: int
    kind: Kind  # where it computes
    devices: tuple[int, ...]  # empty: on cores, without a lease
    threads: int
    lock: str | None  # the device lock to lease for computing; None: it shares nothing
    node: int = 0
    remote: bool = False  # an env worker whose inference server is on another node

    @property
    def torch_device(self) -> str:
        return "cuda" if self.kind == "cuda" and self.devices else "cpu"


GATEWAY_WORKERS = 64  # a gateway's core carries the requests of about as many (docs/results/hosts.md)
STORE = Process("replay store", 0, "cpu", (), 1, None)  # of every plan


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes except the driver, the replay store and those between nodes, which follow from where the others
    are (``relays``, ``links``)."""

    layout: Layout
    workers: tuple[Process, ...]
    servers: tuple[Process, ...]
    learners: tuple[Process, ...]
    envs_per_worker: int
    splits: int  # groups of a worker's envs that advance independently
    max_batch: int  # rows of one inference batch
    machines: tuple[Node, ...]  # by the number of the node
    offload: bool = False  # devices hold the learner's state during its updates, and inference's between them
    world_model: Process | None = None  # asks the first inference server

    @property
    def processes(self) -> tuple[Process, ...]:
        models = () if self.world_model is None else (self.world_model,)
        return (*self.workers, *self.servers, *self.learners, *models)

    @property
    def nodes(self) -> int:
        return len(self.machines)

    @property
    def remote(self) -> tuple[Process, ...]:
        """Env workers whose inference server is on another node."""
        return tuple(worker for worker in self.workers if worker.remote)

    @property
    def env_hosts(self) -> tuple[int, ...]:
        """Nodes with remote env workers: places of hosts that may join and leave."""
        return tuple(sorted({worker.node for worker in self.remote}))

    @property
    def planned_only(self) -> str | None:
        """Why this version cannot run the plan; None if it can."""
        if len({machine.devices for machine in self.machines if machine.devices}) > 1:
            return "planned only: this version runs on nodes with equally many devices"
        return None

    def require_runtime(self) -> None:
        """Raise UserError if this version cannot run the plan."""
        if (reason := self.planned_only) is not None:
            raise UserError(f"{reason}; use alike nodes with devices, and others for env workers (placement.env_hosts)")

    @property
    def relays(self) -> tuple[Process, ...]:
        """They bring weights to the nodes of inference servers where the learner's first rank does not run."""
        away = sorted({s.node for s in self.servers} - {self.learners[0].node}) if self.learners else []
        return tuple(Process("weight relay", i, "cpu", (), 1, None, node) for i, node in enumerate(away))

    @property
    def gateways(self) -> tuple[Process, ...]:
        """One for each of ``guest_groups``, on the node of its inference server."""
        asked = (self.servers[server] for server, _ in self.guest_groups)
        return tuple(Process("gateway", index, "cpu", (), 1, None, s.node) for index, s in enumerate(asked))

    @property
    def request_relays(self) -> tuple[Process, ...]:
        """One on each node with remote env workers."""
        return tuple(Process("request relay", i, "cpu", (), 1, None, node) for i, node in enumerate(self.env_hosts))

    @property
    def links(self) -> tuple[Process, ...]:
        """What carries the requests of remote env workers."""
        return (*self.gateways, *self.request_relays)

    @property
    def locks(self) -> list[str]:
        """Names of all device locks."""
        return sorted({p.lock for p in self.processes if p.lock is not None})

    def servers_by_worker(self) -> tuple[int, ...]:
        """Index of the inference server that each env worker asks: one of its node, in turn; remote workers come last,
        and ask the one that then has fewest."""
        nodes = {server.node for server in self.servers}
        near = {node: cycle([s.index for s in self.servers if s.node == node]) for node in nodes}
        asked = {worker.index: next(near[worker.node]) for worker in self.workers if not worker.remote}
        clients = Counter(asked.values())
        for worker in self.remote:
            asked[worker.index] = server = min(range(len(self.servers)), key=lambda index: clients[index])
            clients[server] += 1
        return tuple(asked[worker.index] for worker in self.workers)

    def server_of(self, worker: int) -> int:
        return self.servers_by_worker()[worker]

    def clients_of(self, server: int) -> int:
        """How many processes ask an inference server: its env workers, then the world model."""
        return len(self.workers_of(server)) + (server == 0 and self.world_model is not None)

    def workers_of(self, server: int) -> list[int]:
        """The env workers that ask it, in the order of its rows: the remote ones last, node by node."""
        asking = [worker for worker, its in enumerate(self.servers_by_worker()) if its == server]
        return sorted(asking, key=lambda index: self.workers[index].remote * (1 + self.workers[index].node))

    def guests_of(self, server: int) -> dict[int, list[int]]:
        """The remote env workers that ask it, by their node, in the order of its rows."""
        guests = defaultdict[int, list[int]](list)
        for worker in self.workers_of(server):
            if self.workers[worker].remote:
                guests[self.workers[worker].node].append(worker)
        return dict(guests)

    @property
    def guest_groups(self) -> tuple[tuple[int, dict[int, list[int]]], ...]:
        """For each gateway: its inference server, and the remote env workers (by node) whose requests it carries.

        A gateway serves whole nodes: as many as have ``GATEWAY_WORKERS`` workers together, but at least one.
        """
        groups = list[tuple[int, dict[int, list[int]]]]()
        for server in self.servers:
            room = 0
            for node, workers in self.guests_of(server.index).items():
                if len(workers) > room:
                    groups.append((server.index, {}))
                    room = GATEWAY_WORKERS
                groups[-1][1][node] = workers
                room -= len(workers)
        return tuple(groups)

    def node_of(self, device: int) -> int:
        return homes(self.machines)[device]

    def local_device(self, device: int) -> int:
        """A device as it is numbered on its node."""
        nodes = homes(self.machines)
        return nodes[:device].count(nodes[device])

    def local_devices(self, process: Process) -> tuple[int, ...]:
        """The devices of a process, as numbered on its node."""
        return tuple(map(self.local_device, process.devices))

    def drawing_devices(self) -> tuple[int | None, ...]:
        """The device on which each env worker on cores draws: those of its node in turn; None without GPUs.

        Drawing needs no lease: it takes a device's graphics units and little of its time.
        """
        near = defaultdict[int, set[int]](set)
        for process in self.processes:
            if process.kind == "cuda":
                near[process.node].update(process.devices)
        turns = {node: cycle(sorted(devices)) for node, devices in near.items()}
        return tuple(None if w.devices or w.node not in turns else next(turns[w.node]) for w in self.workers)

    def drawing_device(self, process: Process) -> int | None:
        """As ``drawing_devices``, of one process; None of any that is no env worker."""
        return self.drawing_devices()[process.index] if process.role == "env worker" else None


def simulator_on_devices(config: RunConfig, kind: Kind) -> bool:
    """Whether the simulator computes on devices of this kind, rather than on cores."""
    if isinstance(config.env, ManiSkillConfig):
        return kind == "cuda" and config.env.backend == "physx_cuda"
    return isinstance(config.env, WorkloadConfig) and config.env.on_devices


def draws_on_devices(config: RunConfig, kind: Kind) -> bool:
    """Whether env workers on cores draw on devices of this kind."""
    return kind == "cuda" and isinstance(config.env, (LiberoConfig, ManiSkillConfig, MetaWorldConfig))


def sharing_learner(config: RunConfig, plan: Plan, server: Process) -> int | None:
    """Index of the learner whose frozen weights an inference server attaches: on its device, or on cores of its node.

    Only adapters leave weights frozen. ZeRO-3 divides them, offloading moves them away, and merging adapters changes
    them, so each of these rules it out.
    """
    shareable = config.policy.freezes_weights and config.policy.own_weights_key is None
    if not shareable or config.learner.zero_stage == 3 or plan.offload:
        return None
    near = [p for p in plan.learners if p.node == server.node and (p.kind == "cpu" or p.devices == server.devices)]
    return near[0].index if near else None


def layouts(devices: int, on_devices: bool, mode: Mode | None = None) -> Iterator[Layout]:
    """Every way to divide the devices among the roles, of all modes or of one.

    ``on_devices``: whether the simulator needs devices too.
    """
    everything = tuple(range(devices))
    if mode in (None, "collocated"):
        yield Layout("collocated", everything if on_devices else (), everything, everything)
    if mode in (None, "pipelined"):
        for parts in _partitions(everything, 3 if on_devices else 2):
            yield Layout("pipelined", *(parts if on_devices else ((), *parts)))
    if mode in (None, "hybrid"):
        for first, second in _partitions(everything, 2):
            yield Layout("hybrid", *((first, second) if on_devices else ((), first)), learner=everything)


def _partitions(devices: tuple[int, ...], parts: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to cut a sequence into that many contiguous parts, none empty; beyond 64 devices, in coarser steps."""
    step = math.ceil(len(devices) / 64)
    for cuts in combinations(range(step, len(devices), step), parts - 1):
        yield tuple(devices[i:j] for i, j in pairwise((0, *cuts, len(devices))))


def usable_devices(config: RunConfig, resources: Resources) -> int:
    """How many devices there are to divide: ``placement.devices`` or all; of cores, those that simulators leave.

    Raises PlanError if ``placement.devices`` asks for more than there are.
    """
    there = resources.devices
    if resources.kind == "cpu":
        near = [machine.cores for machine in resources.machines if machine.devices]
        away = resources.cores - sum(near)  # cores of nodes that only simulate
        there = max(min(2 * len(near), sum(near)), sum(near) - max(0, config.placement.env_workers - away))
    wanted = config.placement.devices
    if wanted is not None and wanted > there:
        raise PlanError("placement.devices", f"there are {there} ({resources.kind}) to divide; use at most that many")
    return wanted or there


def choose_layout(config: RunConfig, resources: Resources) -> Layout:
    """The layout by ``placement.mode`` and the numbers of devices that it names; "auto" decides by rule.

    The rule: a single device is shared; more are divided evenly, unless ``placement.offload=always`` wants them shared.
    Raises PlanError if the mode needs more devices than there are.
    """
    p, devices = config.placement, usable_devices(config, resources)
    on_devices = simulator_on_devices(config, resources.kind)
    roles = ("simulators, " if on_devices else "") + "inference and learner"
    needed = 3 if on_devices else 2
    split = devices >= needed and p.offload != "always"
    mode: Mode = p.mode if p.mode != "auto" else ("pipelined" if split else "collocated")
    smallest = {"collocated": 1, "pipelined": needed, "hybrid": 2}[mode]
    if devices < smallest:
        there = f"there {'is' if devices == 1 else 'are'} {devices}"
        text = f"{mode} divides devices among {roles} and needs {smallest}, {there}; use collocated"
        raise PlanError("placement.mode", text)
    candidates = [
        layout
        for layout in layouts(devices, on_devices, mode)
        if p.simulator_devices in (None, len(layout.simulators))
        and p.inference_devices in (None, len(layout.inference))
    ]
    if not candidates:
        asked = f"simulator_devices={p.simulator_devices} and inference_devices={p.inference_devices}"
        text = f"{mode} cannot divide {devices} devices among {roles} with {asked}"
        raise PlanError("placement.mode", f"{text}; leave one to every role, or set them to null")
    share = devices / (needed if mode == "pipelined" else 2)
    return min(candidates, key=lambda x: abs(len(x.inference) - share) + abs(len(x.simulators) - share))


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
