"""The processes that carry requests of remote env workers: a gateway beside a server, a relay beside the workers."""

import time
from collections.abc import Mapping
from typing import Any

import ray

from vla_rl.cluster.processes.common import PulseAddress, Traced
from vla_rl.core.errors import StallError
from vla_rl.core.ipc.mailbox import PoolAddress, ServerMailbox, WorkerMailbox
from vla_rl.placement.plan import Process

_LOOK_S = 0.05


class _LinkProcess(Traced):
    """What both have in common."""

    def __init__(self, process: Process, trace: bool) -> None:
        self._process = process
        self.record_spans(process, trace)
        self._link: Any = None  # Gateway or Relay

    def run(self, pulse: PulseAddress) -> None:
        """Carry until ``stop``. Call after the process was told with whom it deals."""
        progress = pulse.open(self._process)
        self._link.meter.observer, self._link.meter.spans = progress, self.spans
        try:
            self._run(pulse)
        finally:
            progress.rest()

    def _run(self, pulse: PulseAddress) -> None:
        self._link.run()

    def stats(self) -> dict[str, float]:
        return self._link.meter.snapshot() if self._link else {}

    def stop(self) -> None:
        if self._link:
            self._link.stop()


class GatewayProcess(_LinkProcess):
    def listen(self, address: PoolAddress, guests: range, workers: Mapping[int, int], tasks: int, keys: Any) -> str:
        """Listen at this node's address, for relays on the nodes of ``workers`` (how many there are); returns where.

        ``guests``: their positions in the pool at ``address``; ``keys``: ``Keys`` of the gateways.
        """
        from vla_rl.inference.network.gateway import Gateway

        mailbox = WorkerMailbox(address, guests.start, len(guests))
        host = ray.util.get_node_ip_address()
        self._link = Gateway(mailbox, workers, address.envs_per_worker, tasks, host, keys)
        return self._link.endpoint

    def leave(self, node: int) -> None:
        """The host at ``node`` has left."""
        if self._link:
            self._link.leave(node)


class RequestRelayProcess(_LinkProcess):
    def open(self, addresses: Mapping[int, PoolAddress], keys: Any, compress: bool) -> None:
        """``addresses``: of this node's pools, by inference server; ``keys``: ``Keys`` of the relays."""
        from vla_rl.inference.network.relay import Relay

        mailboxes = {server: ServerMailbox(address) for server, address in addresses.items()}
        each = next(iter(addresses.values())).envs_per_worker
        self._link = Relay(mailboxes, each, self._process.node, keys, compress)

    def connect(self, server: int, endpoint: str) -> None:
        """Ask the gateway at ``endpoint`` for this inference server, from now on."""
        if self._link:  # else it is told again after ``open``: gateway and relay are replaced at the same time
            self._link.connect(server, endpoint)

    # waits for: the gateways' first answers. unblocked by: these, its time limit.
    def reach(self, endpoints: Mapping[int, str], timeout: float) -> None:
        """Return when the gateways have answered. Raises StallError, which names one that has not."""
        deadline = time.monotonic() + timeout
        for server, endpoint in endpoints.items():
            while not self._link.heard(server):
                if time.monotonic() > deadline:
                    here = ray.util.get_node_ip_address()
                    raise StallError(
                        f"{here} has not reached the gateway at {endpoint} for {timeout:.0f} s: let TCP connections "
                        "between the nodes pass, or start Ray with --node-ip-address of a network that both are in"
                    )
                time.sleep(_LOOK_S)

    def _run(self, pulse: PulseAddress) -> None:
        self._link.run(pulse.stall_s)
