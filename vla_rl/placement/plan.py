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

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import cycle
from typing import Literal

from envs.libero.config import LiberoConfig
from envs.maniskill.config import ManiSkillConfig
from envs.metaworld.config import MetaWorldConfig
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.placement.resources import Kind, Node, homes

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
