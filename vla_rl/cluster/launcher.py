"""How the processes of a run are made: the options of each Ray actor, and the paths at which they find each other."""

from collections import defaultdict
from itertools import accumulate, pairwise, starmap
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from vla_rl.cluster.fork_request import KIND
from vla_rl.cluster.fork_server import BASE, POLICY, SIMULATOR
from vla_rl.cluster.processes.common import working_in
from vla_rl.cluster.processes.env_worker import EnvWorkerProcess
from vla_rl.cluster.processes.inference import InferenceProcess
from vla_rl.cluster.processes.learner import LearnerProcess
from vla_rl.cluster.processes.network import GatewayProcess, RequestRelayProcess
from vla_rl.cluster.processes.store import StoreProcess
from vla_rl.cluster.processes.weight_relay import WeightRelayProcess
from vla_rl.cluster.processes.world_model import WorldModelProcess
from vla_rl.cluster.ray_session import RaySession
from vla_rl.cluster.variables import variables
from vla_rl.config.run_config import RunConfig
from vla_rl.core.ipc.mailbox import PoolAddress
from vla_rl.core.records import EnvSpec
from vla_rl.placement.plan import Plan, Process
from vla_rl.replay.rules import StoreRules


class Launcher:
    """Makes the processes of a plan in a Ray session. They do nothing until they are called."""

    def __init__(self, config: RunConfig, spec: EnvSpec, plan: Plan, session: RaySession) -> None:
        self._config, self._spec, self._plan, self._session = config, spec, plan, session
        self._server_class, self._learner_class = _roles(config)
        self._server_of = plan.servers_by_worker()
        self._workers_of = {server.index: plan.workers_of(server.index) for server in plan.servers}
        self._guests_of = {server.index: plan.guests_of(server.index) for server in plan.servers}
        self.guest_groups = plan.guest_groups  # by gateway

    def learner(self, process: Process) -> ActorHandle:
        made = self._actor(self._learner_class, process)
        return made.remote(self._config, self._spec, process, len(self._plan.learners), self._lock_server(process))

    def server(self, process: Process) -> ActorHandle:
        made = self._actor(self._server_class, process)
        return made.remote(self._config, self._spec, process, self._lock_server(process))

    def worker(self, process: Process) -> ActorHandle:
        return self._actor(EnvWorkerProcess, process).remote(self._config, process, self._lock_server(process))

    def store(self, rules: StoreRules) -> ActorHandle:
        made = self._actor(StoreProcess, concurrency=2 * len(self._plan.workers) + 17)
        return made.remote(rules, self._config.log.trace)

    def relay(self, process: Process) -> ActorHandle:
        """Of weights, to the process's node."""
        return self._actor(WeightRelayProcess, process, concurrency=17).remote(process, self.weights(process.node))

    def link(self, process: Process) -> ActorHandle:
        """A gateway or a request relay."""
        made = self._actor(GatewayProcess if process.role == "gateway" else RequestRelayProcess, process)
        return made.remote(process, self._config.log.trace)

    def world_model(self, process: Process) -> ActorHandle:
        made = self._actor(WorldModelProcess, process)
        return made.remote(self._config, self._spec, process, self._lock_server(process))

    def pool(self, server: int) -> PoolAddress:
        """Where an inference server and its env workers meet; remote ones are guests there."""
        plan = self._plan
        workers = len(self._workers_of[server])
        groups = [sum(map(len, nodes.values())) for its, nodes in self.guest_groups if its == server]
        ends = accumulate(groups, initial=workers - sum(groups))
        clients = workers + (server == 0 and plan.world_model is not None)
        return self._pool(plan.servers[server].node, server, clients, tuple(starmap(range, pairwise(ends))))

    def guests(self, gateway: int) -> range:
        """The workers of a gateway, by their position in the pool of its inference server."""
        server = self.guest_groups[gateway][0]
        return self.pool(server).guests[gateway - [its for its, _ in self.guest_groups].index(server)]

    def guest_pools(self, node: int) -> dict[int, PoolAddress]:
        """Where the remote env workers of a node meet their relay, by the inference server that they ask."""
        guests = self._guests_of.items()
        return {server: self._pool(node, server, len(workers[node])) for server, workers in guests if node in workers}

    def pools(self) -> dict[int, list[PoolAddress]]:
        """Those of the inference servers of each node."""
        found = defaultdict[int, list[PoolAddress]](list)
        for server in self._plan.servers:
            found[server.node].append(self.pool(server.index))
        return found

    def seat(self, worker: Process) -> tuple[PoolAddress, int]:
        """The pool of an env worker, and its position among that pool's workers."""
        server = self._server_of[worker.index]
        if worker.remote:
            its = self._guests_of[server][worker.node]
            return self._pool(worker.node, server, len(its)), its.index(worker.index)
        return self.pool(server), self._workers_of[server].index(worker.index)

    def _pool(self, node: int, server: int, clients: int, guests: tuple[range, ...] = ()) -> PoolAddress:
        folder = str(self._session.folder(node))
        return PoolAddress(folder, f"server{server}", clients, self._plan.envs_per_worker, guests)

    def weights(self, node: int) -> Path:
        """Of the published weights on a node."""
        return self._session.folder(node) / "weights"

    def frozen_weights(self, server: Process, learner: int) -> Path:
        """Of the weights that a server attaches, of a learner on cores."""
        return self._session.folder(server.node) / f"frozen{learner}"

    def _lock_server(self, process: Process) -> Path:
        return self._session.lock_server(process.node)

    def _actor(self, cls: type, process: Process | None = None, concurrency: int = 5) -> Any:
        """A Ray actor class with options: the plan, not Ray, decides on which node it runs and which device it sees."""
        node = process.node if process else 0
        environment = variables(self._plan, process, self._session.gpus(node)) | {KIND: _server_of(process)}
        placed = self._session.placed(node)
        here: Any = ray.remote(working_in(Path.cwd(), cls))
        return here.options(max_concurrency=concurrency, runtime_env={"env_vars": environment}, **placed)


def _server_of(process: Process | None) -> str:
    """The kind of fork server from which a process comes."""
    if process is None or process.role in ("gateway", "request relay"):
        return BASE
    return SIMULATOR if process.role == "env worker" else POLICY


def _roles(config: RunConfig) -> tuple[type[InferenceProcess], type[LearnerProcess]]:
    if config.placement.virtual is None:
        return InferenceProcess, LearnerProcess
    from vla_rl.cluster.processes.virtual import VirtualInferenceProcess, VirtualLearnerProcess

    return VirtualInferenceProcess, VirtualLearnerProcess
