"""The relay: carries the requests of this node's env workers to gateways of other nodes, and brings the answers back.

workers ──doorbell──▶ rows ──ASK──▶ gateway ──ANSWER──▶ rows ──doorbell──▶ workers

Requests stay in the rows of shared memory until they are answered. So a relay that starts again finds them, and what
the network loses is asked again: after a second, a relay sends the tickets of what it waits for, and then only those
requests that the gateway does not know.
"""

import threading
import time
from collections.abc import Mapping

import numpy as np
import zmq

from vla_rl.core.errors import StallError
from vla_rl.core.ipc.mailbox import ServerMailbox
from vla_rl.core.records import Array
from vla_rl.inference.network.messages import FROM_GATEWAY, Kind, Layout, Message, MessageError, decode, encode
from vla_rl.inference.network.sockets import Keys, Line, receive, send
from vla_rl.observability.meter import Meter

_IDLE_WAIT_MS = 1000
_INQUIRE_NS = 1_000_000_000  # after so long without an answer, and again
_LOST = 8  # an inquiry without a reply for so many times as long is taken for lost
_MOST_BYTES = 1 << 20  # of a message with several requests: a connection that sends one for long seems to be dead
_NOTHING = -1  # in place of a ticket


class Link:
    """One pool of this node, and the gateway of its inference server."""

    def __init__(
        self, mailbox: ServerMailbox, envs_per_worker: int, node: int, keys: Keys, compress: bool, meter: Meter
    ) -> None:
        self.mailbox = mailbox
        self.line: Line | None = None
        self.heard_ns = 0  # when the gateway's last message came; 0: none since it was connected
        self._each, self._node, self._keys, self._meter = envs_per_worker, node, keys, meter
        self._compress = compress
        self._layout = Layout.of(mailbox.arrays)
        self._at_once = max(1, _MOST_BYTES // self._layout.dtypes[Kind.ASK].itemsize)  # requests of a message
        self._rows = len(mailbox.arrays["ticket"])
        self._sent = np.full(self._rows, _NOTHING, np.int64)  # the newest ticket that was sent
        self._sent_ns = np.zeros(self._rows, np.int64)  # when that was, for the first time
        self._asked_ns = np.zeros(self._rows, np.int64)  # when it was sent or inquired last
        self._shown = self._states()
        self._received = self._acknowledged = 0  # number of the last message with answers
        self._inquired_ns = 0  # when, as long as the reply has not come; 0: there is nothing to reply to
        self._waits_since = 0  # ns; for anything from the gateway; 0: for nothing

    def connect(self, endpoint: str) -> None:
        """To a gateway that knows none of the requests."""
        self.close()
        self._sent[:] = _NOTHING
        self.heard_ns = self._received = self._acknowledged = 0
        self.line = Line(endpoint, self._keys, self._layout.most_bytes(self._rows))
        self._send(Kind.INQUIRE, np.empty(0, np.int64))  # whether it is there
        self._waits_since = self._inquired_ns = time.monotonic_ns()

    def carry(self) -> None:
        """Send and receive what there is; returns at once. Without a connection, requests wait in their rows."""
        self.mailbox.wait(0.0)  # the doorbell has only woken this loop
        if self.line is None:
            return
        while (frames := receive(self.line.socket)) is not None:
            self._take(frames)
        ticket, answered = (self.mailbox.arrays[name] for name in ("ticket", "answered"))
        new = np.flatnonzero((ticket != answered) & (self._sent != ticket))
        if len(new) or self._received != self._acknowledged or (self._shown != self._states()).any():
            self._ask(new)
        self._inquire((ticket != answered) & (self._sent == ticket))

    def silent_s(self) -> float:
        """For how many seconds the gateway has left a question without an answer."""
        return (time.monotonic_ns() - self._waits_since) * 1e-9 if self._waits_since else 0.0

    def close(self) -> None:
        if self.line is not None:
            self.line.close()
            self.line = None

    def _states(self) -> Array:
        return self.mailbox.arrays["worker_state"][:: self._each].copy()

    def _ask(self, rows: Array) -> None:
        """Send requests, perhaps again; with no rows, what the workers do."""
        again = self._sent[rows] == self.mailbox.arrays["ticket"][rows]
        self._sent_ns[rows[~again]] = time.monotonic_ns()
        for first in range(0, max(1, len(rows)), self._at_once):
            self._send(Kind.ASK, rows[first : first + self._at_once])
        self._meter.count("network_repeated", int(again.sum()))

    def _inquire(self, is_open: Array) -> None:
        """Ask for requests that wait for long. One inquiry at a time: two would make the gateway miss a request twice,
        and it would be sent twice."""
        now = time.monotonic_ns()
        late = np.flatnonzero(is_open & (now - self._asked_ns > _INQUIRE_NS))
        if len(late) and now - self._inquired_ns > _LOST * _INQUIRE_NS:
            self._send(Kind.INQUIRE, late)
            self._inquired_ns, self._waits_since = now, self._waits_since or now

    def _send(self, kind: Kind, rows: Array) -> None:
        assert self.line is not None
        tickets = self.mailbox.arrays["ticket"][rows]  # copied first: a newer request does not match
        columns = {} if kind is Kind.INQUIRE else {n: self.mailbox.arrays[n][rows] for n in self._layout.names(kind)}
        states = self._states()
        records = self._layout.records(kind, rows, tickets, columns)
        frames = encode(Message(kind, self._node, self._received, records, states), self._compress)
        self._sent[rows], self._asked_ns[rows] = tickets, time.monotonic_ns()
        if send(self.line.socket, frames):
            self._shown, self._acknowledged = states, self._received
            self._meter.count("network_bytes", sum(map(len, frames)))

    def _take(self, frames: list[bytes]) -> None:
        workers = {self._node: self._rows // self._each}
        try:
            message = decode(frames, self._layout, FROM_GATEWAY, workers, self._each)
        except MessageError:
            self._meter.count("dropped")
            return
        self.heard_ns, self._waits_since = time.monotonic_ns(), 0
        self._meter.count("network_bytes", sum(map(len, frames)))
        arrays, records = self.mailbox.arrays, message.records
        rows, tickets = records["row"], records["ticket"]
        is_open = (arrays["ticket"][rows] == tickets) & (arrays["answered"][rows] != tickets)
        self._received = message.number
        if message.kind is Kind.ANSWER:
            self._deliver(records[is_open])
            return
        self._inquired_ns = 0
        if is_open.any():
            self._ask(rows[is_open])

    def _deliver(self, records: Array) -> None:
        rows = records["row"]
        if not len(rows):
            return
        for name in self._layout.names(Kind.ANSWER):
            self.mailbox.arrays[name][rows] = records[name]
        took = time.monotonic_ns() - self._sent_ns[rows] - records["held_ns"]
        self._meter.add("network", float(took.sum()) * 1e-9)
        self._meter.count("network_rows", len(rows))
        self.mailbox.deliver(rows, records["ticket"])


class Relay:
    """Carries requests and answers until ``stop()``. ``run`` has a thread of its own."""

    def __init__(
        self,
        mailboxes: Mapping[int, ServerMailbox],  # of this node's pools, by the number of their inference server
        envs_per_worker: int,
        node: int,
        keys: Keys,
        compress: bool = False,  # what is sent
    ) -> None:
        self.meter = Meter()
        self._links = {
            server: Link(mailbox, envs_per_worker, node, keys, compress, self.meter)
            for server, mailbox in mailboxes.items()
        }
        self._endpoints: dict[int, str] = {}  # where each server's gateway is
        self._stop = threading.Event()

    def connect(self, server: int, endpoint: str) -> None:
        """From now on, ask the gateway at ``endpoint`` for this inference server; may be called from any thread."""
        self._endpoints[server] = endpoint
        self._links[server].mailbox.wake()

    def heard(self, server: int) -> bool:
        """Whether the gateway of this server has answered since ``connect``."""
        link = self._links[server]
        line = link.line
        return line is not None and line.endpoint == self._endpoints.get(server) and link.heard_ns > 0

    # consumes: requested rows, messages of gateways. waits for: doorbells, sockets. unblocked by: these, connect(),
    # stop().
    def run(self, most_silent_s: float) -> None:
        """Raises StallError if a gateway leaves questions without an answer for so many seconds."""
        poller = self._poller()
        try:
            while not self._stop.is_set():
                with self.meter.time("wait"):
                    poller.poll(_IDLE_WAIT_MS)
                with self.meter.time("carry"):
                    if self._connect():
                        poller = self._poller()
                    for link in self._links.values():
                        link.carry()
                        _require_heard(link, most_silent_s)
        finally:
            for link in self._links.values():
                link.close()

    def stop(self) -> None:
        self._stop.set()
        for link in self._links.values():
            link.mailbox.wake()

    def _connect(self) -> bool:
        """Whether a gateway is at another place than before."""
        moved = [
            (link, endpoint)
            for server, link in self._links.items()
            if (endpoint := self._endpoints.get(server)) and (link.line is None or link.line.endpoint != endpoint)
        ]
        for link, endpoint in moved:
            link.connect(endpoint)
        return bool(moved)

    def _poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        for link in self._links.values():
            poller.register(link.mailbox.fileno(), zmq.POLLIN)
            if link.line is not None:
                poller.register(link.line.socket, zmq.POLLIN)
        return poller


def _require_heard(link: Link, most_silent_s: float) -> None:
    if link.line is not None and link.silent_s() > most_silent_s:
        raise StallError(f"nothing has come from the gateway at {link.line.endpoint} for {most_silent_s:.0f} s")
