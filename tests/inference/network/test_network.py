"""vla_rl.inference.network: env workers of two nodes ask one inference server, over the loopback interface."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from tests.runtime_fakes import POLICY, SPEC, A, EchoPolicy, K
from vla_rl.core.errors import StallError
from vla_rl.core.ipc.mailbox import PoolAddress, ServerMailbox, WorkerMailbox, WorkerState, create_pool
from vla_rl.core.records import Observation, take_rows
from vla_rl.inference.inference_server import BatchRule, InferenceServer
from vla_rl.inference.network import relay as relays
from vla_rl.inference.network.gateway import Gateway
from vla_rl.inference.network.messages import Kind, Layout, Message, encode
from vla_rl.inference.network.relay import Relay
from vla_rl.inference.network.sockets import Door, Keys, Line, send

EACH, NEAR, GUESTS = 2, 1, {1: 2, 5: 1}  # one env worker beside the server, two on node 1, one on node 5
ABSENT, BUSY, WAITS = WorkerState.ABSENT, WorkerState.BUSY, WorkerState.WAITS


class Site:
    """The pools of all nodes, and what runs between them."""

    def __init__(self, folder: Path) -> None:
        self.policy, self.running = EchoPolicy(), list[tuple[Any, threading.Thread]]()
        self.of_gateways, self.of_relays = Keys.pair()
        guests = range(NEAR, NEAR + sum(GUESTS.values()))
        self.home = self._pool(folder / "home", guests.stop, (guests,))
        self.away = {node: self._pool(folder / f"node{node}", workers) for node, workers in GUESTS.items()}
        self.near = WorkerMailbox(self.home, 0)
        self.far = {
            (node, w): WorkerMailbox(address, w) for node, address in self.away.items() for w in range(GUESTS[node])
        }

    @staticmethod
    def _pool(folder: Path, workers: int, guests: tuple[range, ...] = ()) -> PoolAddress:
        folder.mkdir()
        address = PoolAddress(str(folder), "server0", workers, EACH, guests)
        create_pool(address, SPEC, POLICY)
        return address

    def server(self, max_batch: int = 8, max_wait_s: float = 0.005) -> InferenceServer:
        return self._start(InferenceServer(self.policy, ServerMailbox(self.home), BatchRule(max_batch, max_wait_s)))

    def gateway(self) -> Gateway:
        mailbox = WorkerMailbox(self.home, NEAR, sum(GUESTS.values()))
        tasks = len(SPEC.instructions)
        return self._start(Gateway(mailbox, GUESTS, EACH, tasks, "127.0.0.1", self.of_gateways))

    def relay(self, node: int, gateway: Gateway, compress: bool = False) -> Relay:
        relay = Relay({0: ServerMailbox(self.away[node])}, EACH, node, self.of_relays, compress)
        relay.connect(0, gateway.endpoint)
        return self._start(relay, 60.0)

    def _start(self, loop: Any, *args: Any) -> Any:
        thread = threading.Thread(target=loop.run, args=args)
        thread.start()
        self.running.append((loop, thread))
        return loop

    def end(self, loop: Any) -> None:
        """As if its process had died."""
        ((_, thread),) = (one for one in self.running if one[0] is loop)
        loop.stop()
        thread.join(5.0)
        assert not thread.is_alive()
        self.running = [one for one in self.running if one[0] is not loop]
        if isinstance(loop, Gateway):
            loop.close()

    def close(self) -> None:
        for loop, _ in list(self.running):
            self.end(loop)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


def ask(mailbox: WorkerMailbox, marks: dict[int, int], greedy: bool = False) -> np.ndarray:
    """Request a chunk for each env; the observation shows the mark."""
    for env_id, mark in marks.items():
        mailbox.observation.images[env_id] = mark
        mailbox.observation.task[env_id] = mark % 2
        mailbox.observation.proprio[env_id] = mailbox.observation.elapsed[env_id] = 0
    uniforms = np.random.default_rng(mark).random((len(marks), K, A)).astype(np.float32)
    mailbox.request(list(marks), {"uniforms": uniforms}, np.full(len(marks), greedy))
    return uniforms


def answers(mailbox: WorkerMailbox, count: int, seconds: float = 10.0) -> dict[int, int]:
    """The marks that were answered, by env id."""
    found, deadline = dict[int, int](), time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        for env_id in mailbox.wait(0.1):
            found[env_id] = int(mailbox.answer([env_id])[0].actions[0, 0, 0])
    return found


def soon(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- as through shared memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [False, True])
def test_answers_are_those_of_shared_memory_and_batches_mix(site: Site, compress: bool) -> None:
    mailboxes = [site.near, *site.far.values()]
    uniforms = [ask(mailbox, {0: 10 * i + 1, 1: 10 * i + 2}, greedy=i == 2) for i, mailbox in enumerate(mailboxes)]
    site.policy.version = 3
    gateway = site.gateway()
    sent = [site.relay(node, gateway, compress).meter for node in GUESTS]
    soon(lambda: len(ServerMailbox(site.home).pending_rows()) == 8)
    site.server(max_batch=8, max_wait_s=60.0)
    for i, mailbox in enumerate(mailboxes):
        arrived = list[int]()
        soon(lambda mailbox=mailbox, arrived=arrived: arrived.extend(mailbox.wait(0.1)) or len(arrived) == 2)
        batch, versions = mailbox.answer([0, 1])
        assert batch.actions[:, 0, 0].tolist() == [10 * i + 1, 10 * i + 2]
        assert batch.record["tokens"][:, 0, 0].tolist() == [(10 * i + m) % 2 for m in (1, 2)]
        assert np.array_equal(batch.logprobs, uniforms[i])
        assert batch.values.tolist() == [float(i == 2)] * 2
        assert versions.tolist() == [3, 3]
    assert site.policy.batches == [8], "rows of all three nodes in one batch"
    frames = 6 * SPEC.image_size**2 * 3  # of one colour each
    assert (sum(meter.snapshot()["network_bytes"] for meter in sent) < frames) is compress


def test_the_server_sees_what_remote_workers_do(site: Site) -> None:
    """The rule of batches counts on it: when all wait, a batch fires at once."""
    site.server(max_batch=8, max_wait_s=60.0)
    gateway = site.gateway()
    for node in GUESTS:
        site.relay(node, gateway)
    ask(site.far[1, 1], {0: 7})
    mailboxes = [site.near, *site.far.values()]
    waiting = [threading.Thread(target=mailbox.wait_idle, args=(10.0,)) for mailbox in mailboxes]
    for thread in waiting:
        thread.start()
    waiting[2].join(10.0)
    assert site.policy.batches == [1]
    state = ServerMailbox(site.home).arrays["worker_state"]
    soon(lambda: state.tolist() == [WAITS, WAITS, WAITS, WAITS, BUSY, BUSY, WAITS, WAITS])
    for mailbox in mailboxes:
        mailbox.wake()
    for thread in waiting:
        thread.join(5.0)


def test_inference_waits_for_nobody_on_a_host_that_is_not_there(site: Site) -> None:
    gateway, state = site.gateway(), ServerMailbox(site.home).arrays["worker_state"]
    soon(lambda: (state[EACH:] == ABSENT).all())
    relay = site.relay(1, gateway)
    soon(lambda: (state[EACH : 3 * EACH] == WorkerState.UNKNOWN).all())
    assert (state[3 * EACH :] == ABSENT).all(), "the other host has not joined"
    site.end(relay)
    gateway.leave(1)
    assert (state[EACH:] == ABSENT).all()
    site.server(max_wait_s=60.0)
    ask(site.far[5, 0], {0: 1})
    site.relay(5, gateway)
    threading.Thread(target=site.far[5, 0].wait_idle, args=(10.0,)).start()
    site.near.show(slice(0, EACH), np.full(EACH, WAITS, np.int8))
    soon(lambda: site.policy.batches == [1])


def test_a_worker_does_not_wait_while_its_answer_is_on_its_way(site: Site) -> None:
    gateway, server = site.gateway(), ServerMailbox(site.home)
    line = Line(gateway.endpoint, site.of_relays, 1 << 20)
    layout, columns = Layout.of(server.arrays), {name: a[:1] for name, a in site.far[5, 0].requests.items()}
    one = layout.records(Kind.ASK, np.array([0]), np.array([1]), columns)
    one["task"] = 0
    state, rows = server.arrays["worker_state"][-EACH:], list[int]()

    def tell(records: np.ndarray, number: int) -> None:
        """That the worker waits. Returns when the gateway knows."""
        for kind, them in ((Kind.ASK, records), (Kind.INQUIRE, layout.records(Kind.INQUIRE, [], []))):
            line.socket.send_multipart(encode(Message(kind, 5, number, them, np.array([WAITS], np.int8))))
        assert line.socket.poll(10_000)
        line.socket.recv_multipart()

    tell(one, 0)
    assert (state == WAITS).all()
    soon(lambda: rows.extend(server.wait(0.1)) or rows)
    seen = Observation(**{f.name: server.arrays[f.name][rows] for f in fields(Observation)})
    answer = site.policy.act(seen, take_rows(server.draws, np.array(rows)), server.arrays["greedy"][rows])
    server.answer(rows, server.arrays["ticket"][rows], answer)
    assert line.socket.poll(10_000)
    line.socket.recv_multipart()
    tell(one[:0], 0)
    assert (state == BUSY).all()
    tell(one[:0], 1)
    assert (state == WAITS).all()
    line.close()


def test_the_network_is_measured_without_the_server(site: Site) -> None:
    gateway = site.gateway()
    relay = site.relay(1, gateway)
    ask(site.far[1, 0], {0: 1, 1: 2})
    soon(lambda: gateway.meter.snapshot().get("rows") == 2)
    time.sleep(0.3)
    site.server()
    assert answers(site.far[1, 0], 2) == {0: 1, 1: 2}
    stats = relay.meter.snapshot()
    assert stats["network_rows"] == 2
    assert 0 < stats["network_s"] / 2 < 0.15
    assert stats["network_repeated"] == 0
    assert stats["network_bytes"] > 2 * (SPEC.image_size**2 * 3)


def test_nobody_works_while_nothing_is_asked(site: Site) -> None:
    gateway = site.gateway()
    relay = site.relay(1, gateway)
    unconnected = Relay({0: ServerMailbox(site.away[5])}, EACH, 5, site.of_relays)
    site._start(unconnected, 60.0)
    ask(site.far[5, 0], {0: 1})
    soon(lambda: relay.heard(0))
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.1


# --- deaths ---------------------------------------------------------------------------------------------------------


def test_open_requests_outlive_relay_and_gateway(site: Site) -> None:
    gateway = site.gateway()
    relay = site.relay(1, gateway)
    ask(site.far[1, 0], {0: 1, 1: 2})
    soon(lambda: gateway.meter.snapshot().get("rows") == 2)
    site.end(gateway)
    ask(site.far[1, 1], {0: 3})
    gateway = site.gateway()
    relay.connect(0, gateway.endpoint)
    soon(lambda: gateway.meter.snapshot().get("rows") == 3)
    site.end(relay)
    ask(site.far[1, 1], {1: 4})
    relay = site.relay(1, gateway)
    soon(lambda: gateway.meter.snapshot().get("rows") == 4)
    time.sleep(0.1)
    assert gateway.meter.snapshot()["rows"] == 4, "a known request is not asked twice"
    site.server()
    assert answers(site.far[1, 0], 2) == {0: 1, 1: 2}
    assert answers(site.far[1, 1], 2) == {0: 3, 1: 4}
    assert sum(site.policy.batches) <= 4 + 3, "what the first gateway asked may be answered again, in vain"


def test_what_the_network_loses_is_sent_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request, then an answer: without a new connection, nobody is told."""
    monkeypatch.setattr(relays, "_INQUIRE_NS", 50_000_000)
    monkeypatch.setattr(relays, "_IDLE_WAIT_MS", 50)
    lost = {Kind.ASK: 1, Kind.ANSWER: 1}
    taken = Gateway._take, relays.Link._take

    def lose(self: Any, frames: list[bytes]) -> None:
        kind = Kind(int(np.frombuffer(frames[-3], "<u4")[1]))
        if lost.get(kind) and len(frames[-1]):
            lost[kind] -= 1
        else:
            taken[isinstance(self, relays.Link)](self, frames)

    monkeypatch.setattr(Gateway, "_take", lose)
    monkeypatch.setattr(relays.Link, "_take", lose)
    site.server()
    relay = site.relay(1, site.gateway())
    ask(site.far[1, 0], {0: 1, 1: 2})
    assert answers(site.far[1, 0], 2) == {0: 1, 1: 2}
    assert not any(lost.values())
    assert sum(site.policy.batches) == 2, "the lost answer was kept, not computed again"
    assert relay.meter.snapshot()["network_repeated"] >= 2


def test_waiting_for_a_server_floods_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "_INQUIRE_NS", 20_000_000)
    monkeypatch.setattr(relays, "_IDLE_WAIT_MS", 20)
    gateway = site.gateway()
    relay = site.relay(1, gateway)
    ask(site.far[1, 0], {0: 1, 1: 2})
    soon(lambda: gateway.meter.snapshot().get("rows") == 2)
    before = relay.meter.snapshot()["network_bytes"]
    time.sleep(0.5)
    stats = relay.meter.snapshot()
    assert 0 < stats["network_bytes"] - before < 40 * 200, "tickets, not images"
    assert stats["network_repeated"] == 0


def test_many_requests_are_several_messages(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "_MOST_BYTES", 1)
    messages, take = list[int](), Gateway._take
    monkeypatch.setattr(Gateway, "_take", lambda self, frames: messages.append(len(frames[-1])) or take(self, frames))
    site.server()
    for worker in (0, 1):
        ask(site.far[1, worker], {0: 1, 1: 2})
    site.relay(1, site.gateway())
    for worker in (0, 1):
        assert answers(site.far[1, worker], 2) == {0: 1, 1: 2}
    one = Layout.of(ServerMailbox(site.away[1]).arrays).dtypes[Kind.ASK].itemsize
    assert sorted(messages, reverse=True)[:5] == [one] * 4 + [0]


def test_an_answer_for_a_dead_worker_is_not_its_successors(site: Site) -> None:
    gateway = site.gateway()
    site.relay(1, gateway)
    ask(site.far[1, 0], {0: 1})
    soon(lambda: gateway.meter.snapshot().get("rows") == 1)
    successor = WorkerMailbox(site.away[1], 0)
    site.server(max_wait_s=0.0)
    soon(lambda: site.policy.batches == [1])
    assert successor.wait(0.2) == []
    ask(successor, {0: 5})
    assert answers(successor, 1) == {0: 5}


def test_a_gateway_that_is_silent_ends_the_relay(site: Site) -> None:
    with listener() as (endpoint, _):
        relay = Relay({0: ServerMailbox(site.away[1])}, EACH, 1, site.of_relays)
        relay.connect(0, endpoint)
        with pytest.raises(StallError, match=rf"nothing has come from the gateway at {endpoint} for 0 s"):
            relay.run(0.3)
        assert not relay.heard(0)


# --- strangers ------------------------------------------------------------------------------------------------------


@contextmanager
def listener() -> Iterator[tuple[str, zmq.Socket]]:
    """Somebody who listens, and has no key."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind("tcp://127.0.0.1:*")
        yield socket.last_endpoint.decode(), socket


@pytest.mark.parametrize("stranger", ["no keys", "keys of another run", "keys of its own"])
def test_who_has_no_key_gets_nothing(site: Site, stranger: str) -> None:
    gateway = site.gateway()
    site.server()
    line = _stranger(site, gateway.endpoint, stranger)
    arrays = WorkerMailbox(site.away[5], 0).requests
    layout = Layout.of(ServerMailbox(site.away[5]).arrays)
    records = layout.records(Kind.ASK, np.array([0]), np.array([1]), {n: a[:1] for n, a in arrays.items()})
    records["task"] = 0
    for _ in range(20):
        send(line, encode(Message(Kind.ASK, 5, 0, records)))  # it may be refused
        assert not line.poll(20), "an answer"
    assert site.policy.batches == []
    assert "rows" not in gateway.meter.snapshot()
    site.relay(1, gateway)
    ask(site.far[1, 0], {0: 1, 1: 2})
    assert answers(site.far[1, 0], 2) == {0: 1, 1: 2}, "the others are served"
    line.close(0)


def _stranger(site: Site, endpoint: str, kind: str) -> zmq.Socket:
    if kind == "no keys":
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(endpoint)
        return socket
    _, keys = Keys.pair()
    if kind == "keys of its own":  # it has seen the gateway's public key, which is no secret
        keys = Keys(keys.public, keys.secret, site.of_relays.peer)
    return Line(endpoint, keys, 1 << 20).socket


FORGERIES = {
    "cut off": lambda frames: [*frames[:2], bytes(frames[2])[:-1]],
    "half a header": lambda frames: [frames[0][:9], *frames[1:]],
    "other bytes": lambda frames: [b"x" * len(frames[0]), *frames[1:]],
    "a frame more": lambda frames: [*frames, b""],
    "a node without workers": lambda frames: _with(frames, 8, "<i8", 99),
    "an unknown kind": lambda frames: _with(frames, 4, "<u4", 9),
    "an answer": lambda frames: _with(frames, 4, "<u4", int(Kind.ANSWER)),
    "states of others": lambda frames: [frames[0], b"\1" * 7, frames[2]],
    "no state": lambda frames: [frames[0], b"\x77" * GUESTS[1], frames[2]],
    "a size too much": lambda frames: _with(frames, 24, "<i8", 1 << 40),
    "a size too little": lambda frames: _with(frames, 24, "<i8", 0),
    "not compressed": lambda frames: _with(frames, 24, "<i8", len(frames[2])),
    "a row of others": lambda frames: [*frames[:2], _first_row(frames[2], GUESTS[1] * EACH)],
    "a negative row": lambda frames: [*frames[:2], _first_row(frames[2], -1)],
    "a row twice": lambda frames: [*frames[:2], _first_row(frames[2], 1)],
}


def _with(frames: list, at: int, dtype: str, value: int) -> list:
    header = bytearray(frames[0])
    new = np.array(value, dtype).tobytes()
    header[at : at + len(new)] = new
    return [bytes(header), *frames[1:]]


def _first_row(records: Any, row: int) -> bytes:
    return np.array(row, "<i4").tobytes() + bytes(records)[4:]


def test_what_is_no_message_is_counted_and_dropped(site: Site) -> None:
    gateway = site.gateway()
    site.server()
    line = Line(gateway.endpoint, site.of_relays, 1 << 20)
    layout, arrays = Layout.of(ServerMailbox(site.away[1]).arrays), site.far[1, 0].requests
    records = layout.records(Kind.ASK, np.arange(2), np.arange(2), arrays)
    records["task"] = 0
    message = encode(Message(Kind.ASK, 1, 0, records, np.ones(GUESTS[1], np.int8)))
    for count, (name, forge) in enumerate(FORGERIES.items(), 1):
        line.socket.send_multipart(forge(message))
        soon(lambda count=count: gateway.meter.snapshot().get("dropped") == count)
        assert not site.policy.batches, name
    records["task"][1] = len(SPEC.instructions)
    line.socket.send_multipart(encode(Message(Kind.ASK, 1, 0, records)))
    soon(lambda: gateway.meter.snapshot()["dropped"] == len(FORGERIES) + 1)
    line.socket.send(b"y" * (1 << 20))  # more than a pool has: the connection is closed
    site.relay(1, gateway)
    ask(site.far[1, 0], {0: 1, 1: 2})
    assert answers(site.far[1, 0], 2) == {0: 1, 1: 2}
    line.close()


def test_the_largest_frame_comes_through_and_no_larger_one() -> None:
    of_gateways, of_relays = Keys.pair()
    door = Door("127.0.0.1", of_gateways, 5000)
    line = Line(door.endpoint, of_relays, 5000)
    line.socket.send(b"x" * 5000)
    assert door.socket.poll(10_000)
    peer, frame = door.socket.recv_multipart()
    assert len(frame) == 5000
    door.socket.send_multipart([peer, frame])
    assert line.socket.poll(10_000)
    line.socket.send(b"x" * 5100)
    assert not door.socket.poll(200)
    line.close()
    door.close()


def test_a_relay_drops_what_is_no_answer(site: Site) -> None:
    door = Door("127.0.0.1", site.of_gateways, 1 << 20)
    relay = Relay({0: ServerMailbox(site.away[1])}, EACH, 1, site.of_relays)
    relay.connect(0, door.endpoint)
    site._start(relay, 60.0)
    mailbox = site.far[1, 0]
    ask(mailbox, {0: 1})
    peer = door.socket.recv_multipart()[0]
    layout = Layout.of(ServerMailbox(site.away[1]).arrays)
    columns = {name: array[:1] for name, array in mailbox.answers.items()}
    held = np.zeros(1, np.int64)
    records = layout.records(Kind.ANSWER, np.array([0]), mailbox._arrays["ticket"][:1], columns, held_ns=held)
    frames = encode(Message(Kind.ANSWER, 1, 1, records))
    door.socket.send_multipart([peer, *frames[:2], bytes(frames[2])[:-1]])
    door.socket.send_multipart([peer, *_with(frames, 4, "<u4", int(Kind.ASK))])
    stale = records.copy()
    stale["ticket"] -= 1
    door.socket.send_multipart([peer, *encode(Message(Kind.ANSWER, 1, 1, stale))])
    soon(lambda: relay.meter.snapshot().get("dropped") == 2)
    assert mailbox.wait(0.2) == []
    door.socket.send_multipart([peer, *frames])
    soon(lambda: mailbox.wait(0.1) == [0])
    site.end(relay)
    door.close()
