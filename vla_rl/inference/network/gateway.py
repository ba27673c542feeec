"""The gateway: writes the requests of other nodes' env workers into the rows of an inference server's pool.

relays ──ASK──▶ rows of guests ──doorbell──▶ InferenceServer ──doorbell──▶ ANSWER ──▶ relays

It keeps no request that is not in its rows. A gateway that starts again knows none, and relays ask it again.
"""

import threading
import time
from collections.abc import Mapping

import numpy as np
import zmq

from vla_rl.core.ipc.mailbox import WorkerMailbox, WorkerState
from vla_rl.core.records import Array
from vla_rl.inference.network.messages import FROM_RELAY, Kind, Layout, Message, MessageError, decode, encode
from vla_rl.inference.network.sockets import Door, Keys, receive, send
from vla_rl.observability.meter import Meter

_IDLE_WAIT_MS = 1000
_MOST_AT_ONCE = 64  # messages that are read before answers are looked at again
_NOTHING = -1  # in place of a ticket


class Gateway:
    """Carries requests and answers until ``stop()``. ``run`` has a thread of its own."""

    def __init__(
        self,
        mailbox: WorkerMailbox,
        guests: Mapping[int, int],  # workers of each node, in the order of the mailbox's rows
        envs_per_worker: int,
        tasks: int,  # a request for another one is dropped
        host: str,  # address to listen at
        keys: Keys,
    ) -> None:
        self.mailbox = mailbox
        self.meter = Meter()
        self._guests, self._each, self._tasks = dict(guests), envs_per_worker, tasks
        firsts = np.cumsum([0, *guests.values()])
        self._first = {node: int(first) for node, first in zip(guests, firsts, strict=False)}  # worker of each node
        workers = int(firsts[-1])
        rows = workers * envs_per_worker
        self._layout = Layout.of(mailbox.requests | mailbox.answers)
        self._ticket = np.full(rows, _NOTHING, np.int64)  # of the newest request, as its relay counts
        self._is_open = np.zeros(rows, bool)
        self._since = np.zeros(rows, np.int64)  # ns; of the request
        self._held = np.zeros(rows, np.int64)  # ns; until its answer
        self._last_answer = np.zeros(workers, np.int64)  # number of the message with it
        self._number = 0
        self._peers: dict[int, bytes] = {}  # the newest connection of each node
        self._door = Door(host, keys, self._layout.most_bytes(rows))
        for node in guests:  # until their relay says more
            self.leave(node)
        self._stop = threading.Event()

    @property
    def endpoint(self) -> str:
        """Where relays connect to, such as ``tcp://10.0.0.1:41234``."""
        return self._door.endpoint

    # consumes: messages of relays, answers. waits for: its socket, its doorbell. unblocked by: these, stop().
    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._door.socket, zmq.POLLIN)
        poller.register(self.mailbox.fileno(), zmq.POLLIN)
        while not self._stop.is_set():
            with self.meter.time("wait"):
                poller.poll(_IDLE_WAIT_MS)
            with self.meter.time("carry"):
                self._answer(np.array(self.mailbox.wait(0.0), np.int64))
                for _ in range(_MOST_AT_ONCE):
                    if (frames := receive(self._door.socket)) is None:
                        break
                    self._take(frames)

    def stop(self) -> None:
        self._stop.set()
        self.mailbox.wake()

    def leave(self, node: int) -> None:
        """This node's workers are gone, until a relay there is heard; may be called from any thread."""
        self._peers.pop(node, None)
        rows = self._rows(node)
        self.mailbox.show(rows, np.full(rows.stop - rows.start, WorkerState.ABSENT, np.int8))

    def close(self) -> None:
        """Call after the end of ``run``."""
        self._door.close()
        self.mailbox.close()

    def _take(self, frames: list[bytes]) -> None:
        try:
            message = decode(frames[1:], self._layout, FROM_RELAY, self._guests, self._each)
            if message.kind is Kind.ASK and not _in_range(message.records["task"], self._tasks):
                raise MessageError("a task that there is not")
        except MessageError:
            self.meter.count("dropped")
            return
        self._peers[message.node] = frames[0]
        rows = message.records["row"] + self._first[message.node] * self._each
        known = self._ticket[rows] == message.records["ticket"]
        if message.kind is Kind.ASK:
            self._ask(rows[~known], message.records[~known])
        else:  # there is an answer in any case: the relay hears that the way is open
            self._send(message.node, Kind.MISSING, _tickets(self._layout, message.records[~known]))
        self._show(message)
        self._repeat(message.node, rows[known & ~self._is_open[rows]])

    def _ask(self, rows: Array, records: Array) -> None:
        if not len(rows):
            return
        for name, column in self.mailbox.requests.items():
            column[rows] = records[name]
        self._ticket[rows], self._is_open[rows], self._since[rows] = records["ticket"], True, time.monotonic_ns()
        self.mailbox.submit(rows)
        self.meter.count("rows", len(rows))

    def _show(self, message: Message) -> None:
        """Tell the server what the relay's workers do. One that waits is busy if an answer is on its way to it."""
        if not len(message.states):
            return
        workers = self._workers(message.node)
        late = (message.states == WorkerState.WAITS) & (self._last_answer[workers] > message.number)
        states = np.where(late, WorkerState.BUSY, message.states)
        self.mailbox.show(self._rows(message.node), np.repeat(states, self._each))

    def _answer(self, rows: Array) -> None:
        """Send the answers that have arrived in these rows."""
        if not len(rows):
            return
        self._held[rows] = time.monotonic_ns() - self._since[rows]
        self._is_open[rows] = False
        for node in self._guests:
            own = self._rows(node)
            self._repeat(node, rows[(rows >= own.start) & (rows < own.stop)])

    def _repeat(self, node: int, rows: Array) -> None:
        """Send answers that are in these rows of a node, for the first time or again."""
        if not len(rows):
            return
        columns = {name: column[rows] for name, column in self.mailbox.answers.items()}
        own = rows - self._first[node] * self._each
        records = self._layout.records(Kind.ANSWER, own, self._ticket[rows], columns, held_ns=self._held[rows])
        self._number += 1
        self._last_answer[np.unique(rows // self._each)] = self._number
        self._send(node, Kind.ANSWER, records)

    def _send(self, node: int, kind: Kind, records: Array) -> None:
        if (peer := self._peers.get(node)) is not None:
            frames = encode(Message(kind, node, self._number, records))
            if not send(self._door.socket, [peer, *frames]):
                self.meter.count("unsent")

    def _workers(self, node: int) -> slice:
        return slice(self._first[node], self._first[node] + self._guests[node])

    def _rows(self, node: int) -> slice:
        workers = self._workers(node)
        return slice(workers.start * self._each, workers.stop * self._each)


def _tickets(layout: Layout, records: Array) -> Array:
    return layout.records(Kind.MISSING, records["row"], records["ticket"])


def _in_range(tasks: Array, count: int) -> bool:
    return bool(((tasks >= 0) & (tasks < count)).all())
