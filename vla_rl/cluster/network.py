"""Gateways and request relays of a plan: how they start, find each other, and are replaced."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from vla_rl.cluster.launcher import Launcher
from vla_rl.cluster.processes.common import CALL_TIMEOUT_S, PulseAddress
from vla_rl.cluster.survivors import Loop
from vla_rl.placement.plan import Plan, Process

Steps = Generator[Any, Any, None]  # yields a call, and is sent its result: others go on while it waits


class Network:
    """Those of one start of a cluster; it makes their keys. Nothing is there if the plan has no remote env workers.

    Gateways are always there. A relay comes and goes with its host.
    """

    def __init__(self, launch: Launcher, plan: Plan, tasks: int, compress: bool, setup_s: float) -> None:
        """``tasks``: how many the simulator has; ``compress``: observations; ``setup_s``: in which processes start."""
        self._launch, self._plan, self._tasks = launch, plan, tasks
        self._compress, self._setup_s = compress, setup_s
        self._actors: dict[Process, ActorHandle] = {}
        self._endpoints: dict[tuple[int, int], str] = {}  # by the inference server and the node of those who ask it
        if plan.links:
            from vla_rl.inference.network.sockets import Keys

            self._of_gateways, self._of_relays = Keys.pair()

    def start(
        self,
        gateways: Sequence[Process],
        get: Callable[[Any, str, float], Any],
        address: Callable[[Process], PulseAddress],
    ) -> dict[ray.ObjectRef, Loop]:
        """Start these, or new ones in their place; returns their loops. ``get``: as ``Cluster.get``."""
        self._actors |= {gateway: self._launch.link(gateway) for gateway in gateways}
        listening: list[Any] = [self._listen(gateway) for gateway in gateways]
        endpoints = get(listening, "gateways to listen", self._setup_s)
        groups = [self._launch.guest_groups[gateway.index] for gateway in gateways]
        for (server, nodes), endpoint in zip(groups, endpoints, strict=True):
            self._endpoints |= {(server, node): endpoint for node in nodes}
        loops: dict[Any, Loop] = {
            self._actors[gateway].run.remote(address(gateway)): (gateway.role, gateway.index) for gateway in gateways
        }
        for relay in self._plan.request_relays:
            if relay in self._actors:
                self._connect(relay, {server for server, nodes in groups if relay.node in nodes})
        return loops

    def start_relay(self, relay: Process, pulse: PulseAddress, keep: Callable[[ray.ObjectRef, Process], None]) -> Steps:
        """Start one, or a new one in its place. ``keep`` is called with its loop.

        Ends when the gateways have answered. A call fails with StallError if they do not.
        """
        actor = self._actors[relay] = self._launch.link(relay)
        pools = self._launch.guest_pools(relay.node)
        yield actor.open.remote(pools, self._of_relays, self._compress)
        keep(actor.run.remote(pulse), relay)
        self._connect(relay, set(pools))
        yield actor.reach.remote(self._of(relay), CALL_TIMEOUT_S)

    def leave(self, relay: Process) -> None:
        """Its host has left: end it if it still lives, and let inference wait for nobody there."""
        if (actor := self._actors.pop(relay, None)) is not None:
            ray.kill(actor)
        for process, gateway in self._actors.items():
            if process.role == "gateway" and relay.node in self._launch.guest_groups[process.index][1]:
                gateway.leave.remote(relay.node)

    def actors(self) -> dict[Process, ActorHandle]:
        """Those that are there."""
        return dict(self._actors)

    def _listen(self, gateway: Process) -> Any:
        server, nodes = self._launch.guest_groups[gateway.index]
        workers = {node: len(guests) for node, guests in nodes.items()}
        pool, guests = self._launch.pool(server), self._launch.guests(gateway.index)
        return self._actors[gateway].listen.remote(pool, guests, workers, self._tasks, self._of_gateways)

    def _connect(self, relay: Process, servers: set[int]) -> None:
        for server, endpoint in self._of(relay).items():
            if server in servers:
                self._actors[relay].connect.remote(server, endpoint)

    def _of(self, relay: Process) -> dict[int, str]:
        """Where the gateways of a relay listen, by inference server."""
        return {server: self._endpoints[server, relay.node] for server in self._launch.guest_pools(relay.node)}
