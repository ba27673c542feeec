"""Gateways and request relays of a plan: how they start, find each other, and are replaced."""

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from vla_rl.cluster.launcher import Launcher
from vla_rl.cluster.processes.common import CALL_TIMEOUT_S, PulseAddress
from vla_rl.cluster.survivors import Loop
from vla_rl.placement.plan import Plan, Process


class Network:
    """Those of one start of a cluster; it makes their keys. Nothing is there if the plan has no remote env workers."""

    def __init__(self, launch: Launcher, plan: Plan, tasks: int, compress: bool, setup_s: float) -> None:
        """``tasks``: how many the simulator has; ``compress``: observations; ``setup_s``: in which processes start."""
        self._launch, self._plan, self._tasks, self._links = launch, plan, tasks, plan.links
        self._compress, self._setup_s = compress, setup_s
        self._actors: dict[Process, ActorHandle] = {}
        self._endpoints: dict[int, str] = {}  # by inference server
        if self._links:
            from vla_rl.inference.network.sockets import Keys

            self._of_gateways, self._of_relays = Keys.pair()

    def start(
        self,
        processes: Sequence[Process],
        get: Callable[[Any, str, float], Any],
        address: Callable[[Process], PulseAddress],
    ) -> dict[ray.ObjectRef, Loop]:
        """Start these, or new ones in their place; returns their loops. ``get``: as ``Cluster.get``."""
        gateways = [p for p in processes if p.role == "gateway"]
        relays = [p for p in processes if p.role == "request relay"]
        self._actors |= {process: self._launch.link(process) for process in processes}
        listening: list[Any] = [self._listen(gateway) for gateway in gateways]
        endpoints = get(listening, "gateways to listen", self._setup_s)
        self._endpoints |= {gateway.index: at for gateway, at in zip(gateways, endpoints, strict=True)}
        opened: list[Any] = [self._open(relay) for relay in relays]
        get(opened, "request relays to start", self._setup_s)
        loops: dict[Any, Loop] = {
            self._actors[process].run.remote(address(process)): (process.role, process.index) for process in processes
        }
        new = {gateway.index for gateway in gateways}
        for relay in self._plan.request_relays:
            for server, endpoint in self._of(relay).items():
                if relay in relays or server in new:
                    self._actors[relay].connect.remote(server, endpoint)
        return loops

    def reaches(self) -> list[ray.ObjectRef]:
        """Calls that end when every relay has reached its gateways. They fail with StallError."""
        return [
            self._actors[relay].reach.remote(self._of(relay), CALL_TIMEOUT_S) for relay in self._plan.request_relays
        ]

    def actors(self, role: str | None = None) -> list[ActorHandle]:
        """In the order of ``Plan.links``; of one role, or all."""
        return [self._actors[p] for p in self._links if p in self._actors and role in (None, p.role)]

    def _listen(self, gateway: Process) -> Any:
        workers = {node: len(guests) for node, guests in self._plan.guests_of(gateway.index).items()}
        pool = self._launch.pool(gateway.index)
        return self._actors[gateway].listen.remote(pool, workers, self._tasks, self._of_gateways)

    def _open(self, relay: Process) -> Any:
        pools = self._launch.guest_pools(relay.node)
        return self._actors[relay].open.remote(pools, self._of_relays, self._compress)

    def _of(self, relay: Process) -> dict[int, str]:
        """Where the gateways of a relay listen, by inference server."""
        return {server: self._endpoints[server] for server in self._launch.guest_pools(relay.node)}
