import threading
import time
from dataclasses import fields

import numpy as np
import pytest

from tests.runtime_fakes import POLICY, SPEC, A, EchoPolicy, K
from vla_rl.core.ipc.mailbox import PoolAddress, ServerMailbox, WorkerMailbox, WorkerState, create_pool
from vla_rl.core.records import Observation, take_rows
from vla_rl.inference.inference_server import BatchRule, InferenceServer

WORKERS, SLOTS = 3, 4


@pytest.fixture
def address(tmp_path):
    address = PoolAddress(str(tmp_path), "server0", WORKERS, SLOTS)
    create_pool(address, SPEC, POLICY)
    return address


@pytest.fixture
def start(address):
    """start(rule) -> running server; stopped at the end."""
    running = []

    def _start(max_batch=8, max_wait_s=0.005, policy=None):
        server = InferenceServer(policy or EchoPolicy(), ServerMailbox(address), BatchRule(max_batch, max_wait_s))
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread))
        return server

    yield _start
    for server, thread in running:
        server.stop()
        thread.join(5.0)
        assert not thread.is_alive()


def _ask(mailbox: WorkerMailbox, env_ids, marks, greedy=False) -> np.ndarray:
    for env_id, mark in zip(env_ids, marks, strict=True):
        mailbox.observation.images[env_id] = mark
        mailbox.observation.task[env_id] = mark % 2
    uniforms = np.random.default_rng(0).random((len(env_ids), K, A)).astype(np.float32)
    mailbox.request(env_ids, {"uniforms": uniforms}, np.full(len(env_ids), greedy))
    return uniforms


def _wait(mailbox: WorkerMailbox, count: int) -> set[int]:
    answered: set[int] = set()
    deadline = time.monotonic() + 10
    while len(answered) < count and time.monotonic() < deadline:
        answered.update(mailbox.wait(1.0))
    return answered


UNKNOWN, BUSY, WAITS, ABSENT = (int(state) for state in WorkerState)
NEVER = float("inf")


@pytest.mark.parametrize(
    ("states", "ages_s", "left"),
    [
        # nothing is known of the workers: from the oldest request on
        ([UNKNOWN] * 3, {0: 0.0}, 0.02),
        ([UNKNOWN] * 3, {0: 0.0, 4: 0.015}, 0.005),
        ([UNKNOWN] * 3, {0: 9.0}, 0.0),
        ([UNKNOWN] * 3, dict.fromkeys(range(7), 0.0), 0.02),
        ([UNKNOWN] * 3, dict.fromkeys(range(8), 0.0), 0.0),  # full
        # a busy worker is not held up by its open requests
        ([BUSY, BUSY, UNKNOWN], {0: 9.0, 4: 9.0}, NEVER),
        ([BUSY, BUSY, UNKNOWN], {0: 9.0, 8: 0.015}, 0.005),
        ([BUSY, WAITS, WAITS], {0: 9.0, 4: 0.015, 8: 0.0}, 0.005),
        ([BUSY, WAITS, WAITS], dict.fromkeys(range(6), 0.0), 0.0),  # half of the rows
        ([WAITS] * 3, {0: 0.0}, 0.0),  # nothing more can come
        # nothing is expected of a worker whose host is not there
        ([ABSENT, WAITS, ABSENT], {4: 0.0}, 0.0),
        ([ABSENT, BUSY, ABSENT], {4: 0.0, 5: 0.0}, 0.0),
        ([ABSENT, BUSY, WAITS], {4: 9.0, 5: 9.0, 6: 9.0}, NEVER),
    ],
)
def test_a_batch_waits_as_long_as_it_holds_up_nobody(states, ages_s, left):
    rule, now = BatchRule(max_batch=8, max_wait_s=0.02), 10**12
    requested = np.zeros(WORKERS * SLOTS, np.int64)
    for row, age in ages_s.items():
        requested[row] = now - int(age * 1e9)
    state = np.repeat(np.array(states, np.int8), SLOTS)
    assert rule.seconds_left(list(ages_s), requested, state, now) == pytest.approx(left, abs=1e-9)


def test_a_worker_is_busy_from_its_answer_on(address):
    """Also before it wakes: else the rest of its batch would seem to be all that can come."""
    server, mailboxes = ServerMailbox(address), [WorkerMailbox(address, w) for w in range(WORKERS)]
    state = server.arrays["worker_state"]
    assert (state == UNKNOWN).all()
    _ask(mailboxes[0], [0, 1], [3, 4])
    assert mailboxes[0].wait_idle(0.01) == []
    assert (state[:SLOTS] == BUSY).all()
    state[:] = WAITS
    answers = EchoPolicy().act(
        Observation(**{f.name: server.arrays[f.name][[0, 1]] for f in fields(Observation)}),
        take_rows(server.draws, np.array([0, 1])),
        server.arrays["greedy"][[0, 1]],
    )
    server.answer([0, 1], server.arrays["ticket"][[0, 1]], answers)
    assert (state[:SLOTS] == BUSY).all()
    assert (state[SLOTS:] == WAITS).all()
    assert mailboxes[0].wait_idle(5.0) == [0, 1]


def test_workers_that_all_wait_are_answered_at_once(address, start):
    policy = EchoPolicy()
    mailboxes = [WorkerMailbox(address, w) for w in range(WORKERS)]
    start(max_batch=8, max_wait_s=60.0, policy=policy)
    _ask(mailboxes[0], [1], [5])
    waiting = [threading.Thread(target=mailbox.wait_idle, args=(10.0,)) for mailbox in mailboxes]
    for thread in waiting:
        thread.start()
    waiting[0].join(10.0)
    assert policy.batches == [1]
    for mailbox in mailboxes:
        mailbox.wake()
    for thread in waiting:
        thread.join(5.0)


def test_every_slot_gets_its_own_answer(address, start):
    start()
    mailboxes = [WorkerMailbox(address, w) for w in range(WORKERS)]
    uniforms = {}
    for w, mailbox in enumerate(mailboxes):
        uniforms[w] = _ask(mailbox, [0, 2, 3], [10 * w + 1, 10 * w + 2, 10 * w + 3], greedy=w == 1)
    for w, mailbox in enumerate(mailboxes):
        assert _wait(mailbox, 3) == {0, 2, 3}
        batch, versions = mailbox.answer([0, 2, 3])
        assert batch.actions[:, 0, 0].tolist() == [10 * w + 1, 10 * w + 2, 10 * w + 3]
        assert batch.record["tokens"][:, 0, 0].tolist() == [(10 * w + m) % 2 for m in (1, 2, 3)]
        assert np.array_equal(batch.logprobs, uniforms[w])
        assert batch.values.tolist() == [float(w == 1)] * 3
        assert versions.tolist() == [0, 0, 0]


def test_batches_are_capped_and_a_full_one_does_not_wait(address, start):
    policy = EchoPolicy()
    mailboxes = [WorkerMailbox(address, w) for w in range(WORKERS)]
    for mailbox in mailboxes:
        _ask(mailbox, range(SLOTS), range(SLOTS))
    begin = time.monotonic()
    start(max_batch=6, max_wait_s=60.0, policy=policy)
    for mailbox in mailboxes:
        assert len(_wait(mailbox, SLOTS)) == SLOTS
    assert policy.batches == [6, 6]
    assert time.monotonic() - begin < 20.0


def test_a_lone_request_is_answered_at_its_deadline(address, start):
    start(max_batch=8, max_wait_s=0.2)
    mailbox = WorkerMailbox(address, 0)
    begin = time.monotonic()
    _ask(mailbox, [1], [5])
    assert _wait(mailbox, 1) == {1}
    assert 0.19 < time.monotonic() - begin < 10.0


def test_while_a_server_is_away_requests_wait(address, start):
    policy = EchoPolicy()
    server = start(max_batch=8, max_wait_s=60.0, policy=policy)
    mailbox = WorkerMailbox(address, 0)
    _ask(mailbox, [0, 1], [3, 4])  # of a batch that would fire in a minute
    for _ in range(3):
        server.offload(5.0)
        assert not policy.on_device
        assert mailbox.wait(0.1) == []
        server.onload()
    other = WorkerMailbox(address, 1)
    _ask(other, range(4), range(4))
    _ask(mailbox, [2, 3], [5, 6])
    assert _wait(mailbox, 4) == {0, 1, 2, 3}
    assert mailbox.answer([0, 1])[0].actions[:, 0, 0].tolist() == [3, 4]
    assert policy.batches == [8]
    server.offload(5.0)  # and stops there


def test_a_server_that_cannot_offload_says_so(address):
    server = InferenceServer(EchoPolicy(), ServerMailbox(address), BatchRule(8, 0.01))
    with pytest.raises(TimeoutError, match="to offload its policy"):
        server.offload(0.05)


def test_requests_outlive_a_server(address, start):
    """A server that starts later (or again) finds what was asked before."""
    mailbox = WorkerMailbox(address, 2)
    _ask(mailbox, [0, 1], [3, 4])
    ServerMailbox(address).wait(1.0)  # a server that read the doorbell and died
    start()
    assert _wait(mailbox, 2) == {0, 1}
    assert mailbox.answer([0, 1])[0].actions[:, 0, 0].tolist() == [3, 4]


def test_answers_to_a_dead_worker_are_not_taken_for_its_successors(address):
    server = ServerMailbox(address)
    dead = WorkerMailbox(address, 0)
    _ask(dead, [0], [1])
    rows = server.wait(1.0)
    tickets = server.arrays["ticket"][rows]
    successor = WorkerMailbox(address, 0)
    _ask(successor, [0], [2])
    batch = EchoPolicy().act(dead.observation, {"uniforms": np.zeros((SLOTS, K, A), np.float32)}, np.zeros(SLOTS, bool))
    one = type(batch)(batch.actions[:1], take_rows(batch.record, slice(1)), batch.logprobs[:1], batch.values[:1], 0)
    server.answer(rows, tickets, one)
    assert successor.wait(0.2) == [], "that was the answer to the dead worker's request"
    assert server.pending_rows() == [0]


def _echo(count: int):
    """Answers to that many rows."""
    draws = {"uniforms": np.zeros((count, K, A), np.float32)}
    seen = Observation(
        *(
            np.zeros((count, *shape), kind)
            for shape, kind in (((1, 2, 2, 3), "u1"), ((3,), "f4"), ((), "i4"), ((), "f4"))
        )
    )
    return EchoPolicy().act(seen, draws, np.zeros(count, bool))


def test_an_answer_that_nobody_rang_for_is_found(address):
    """A server was killed after writing it."""
    server, mailbox = ServerMailbox(address), WorkerMailbox(address, 0)
    _ask(mailbox, [1, 2], [5, 6])
    rows = server.wait(1.0)
    server._workers.clear()
    with pytest.raises(IndexError):
        server.answer(rows, server.arrays["ticket"][rows], _echo(2))
    assert mailbox.wait(0.01) == [1, 2]
    assert mailbox.wait(0.01) == [], "once"


def test_a_request_that_nobody_rang_for_is_found(address):
    server, mailbox = ServerMailbox(address), WorkerMailbox(address, 0)
    assert server.wait(0.01) == []
    _ask(mailbox, [3], [5])
    assert server._bell.wait(1.0) == [3]  # and then it is lost
    assert server.wait(0.01) == [3]


def test_a_successor_gets_no_answer_that_it_has_not_asked_for(address):
    """The dead worker's request is answered late, which makes its row look open once more."""
    server, dead = ServerMailbox(address), WorkerMailbox(address, 0)
    _ask(dead, [0], [1])
    rows = server.wait(1.0)
    tickets = server.arrays["ticket"][rows]
    successor = WorkerMailbox(address, 0)
    server.answer(rows, tickets, _echo(1))
    for row in server.pending_rows():
        server.answer([row], server.arrays["ticket"][[row]], _echo(1))
    assert successor.wait(0.05) == []
    _ask(successor, [0, 1], [2, 3])
    rows = server.wait(1.0)
    server.answer(rows, server.arrays["ticket"][rows], _echo(2))
    assert successor.wait(1.0) == [0, 1]


def test_version_of_each_answer(address, start):
    policy = EchoPolicy()
    start(policy=policy)
    mailbox = WorkerMailbox(address, 0)
    for version in (0, 3):
        policy.version = version
        _ask(mailbox, [0], [1])
        assert _wait(mailbox, 1) == {0}
        assert mailbox.answer([0])[1].tolist() == [version]


def test_idle_server_uses_no_processor_time(start):
    start()
    time.sleep(0.1)
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.1
