"""vla_rl.core.devices.lock: leases never overlap, never get lost, and are granted in order, whichever process dies."""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vla_rl.core.devices.lock import DeviceLock, DeviceLockServer
from vla_rl.core.ipc.shared_memory import SharedArrays


@pytest.fixture
def server() -> Iterator[DeviceLockServer]:
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: a socket's path must be short
        server = DeviceLockServer(Path(folder) / "lock")
        yield server
        server.stop()


def test_turns_come_in_the_order_of_asking(server: DeviceLockServer) -> None:
    order: list[int] = []
    first = DeviceLock(server.path, "gpu0", "first")

    def contend(number: int) -> None:
        with DeviceLock(server.path, "gpu0", f"contender {number}").lease(5.0):
            order.append(number)

    with first.lease(1.0):
        threads = []
        for number in range(5):
            threads.append(threading.Thread(target=contend, args=(number,)))
            threads[-1].start()
            time.sleep(0.05)
        assert order == []
    for thread in threads:
        thread.join(5.0)
    assert order == [0, 1, 2, 3, 4]
    use = server.use()["gpu0"]
    assert use["leases"] == 6
    assert use["held"] >= 0.25
    assert use["longest_wait"] >= 0.2


def test_devices_do_not_wait_for_each_other(server: DeviceLockServer) -> None:
    one, other = DeviceLock(server.path, "gpu0", "a"), DeviceLock(server.path, "gpu1", "b")
    with one.lease(1.0), other.lease(1.0):
        assert set(server.use()) == {"gpu0", "gpu1"}


def test_whoever_waits_too_long_learns_who_holds_it(server: DeviceLockServer) -> None:
    holder, waiting = DeviceLock(server.path, "gpu0", "learner 0"), DeviceLock(server.path, "gpu0", "server 1")
    with holder.lease(1.0):
        expected = r"server 1 waited 0\.2 s for gpu0: learner 0 has held it for 0\.\d s"
        with pytest.raises(TimeoutError, match=expected), waiting.lease(0.2):
            pass
    with DeviceLock(server.path, "gpu0", "server 2").lease(1.0):
        pass  # who gave up has no place in the queue any more


def test_the_end_of_the_server_ends_the_waiting(server: DeviceLockServer) -> None:
    holder, waiting = DeviceLock(server.path, "gpu0", "a"), DeviceLock(server.path, "gpu0", "b")
    errors: list[Exception] = []

    def wait() -> None:
        try:
            with waiting.lease(30.0):
                pass
        except ConnectionError as error:
            errors.append(error)

    holder._acquire(1.0)
    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    server.stop()
    thread.join(5.0)
    assert "b waits for gpu0" in str(errors[0])


def _contend(path: Path, shared: Path, index: int) -> None:
    lock = DeviceLock(path, "gpu0", f"contender {index}")
    arrays = SharedArrays.attach(shared)
    while True:
        with lock.lease(60.0):
            arrays["owner"][0] = index
            for _ in range(50):  # a second holder would write its own number meanwhile
                if arrays["owner"][0] != index:
                    arrays["overlaps"][0] += 1
            arrays["turns"][index] += 1


@pytest.mark.slow
def test_eight_contenders_ten_thousand_turns_and_random_kills(server: DeviceLockServer, tmp_path: Path) -> None:
    """No double hold, no lost lock, no starvation."""
    contenders, wanted, wanted_kills = 8, 10_000, 20
    layout = {"owner": ((1,), "<i8"), "turns": ((contenders,), "<i8"), "overlaps": ((1,), "<i8")}
    shared = SharedArrays.create(tmp_path / "counts", layout)
    context, rng = multiprocessing.get_context("spawn"), random.Random(0)

    def start(index: int) -> multiprocessing.process.BaseProcess:
        process = context.Process(target=_contend, args=(server.path, shared.path, index), daemon=True)
        process.start()
        return process

    processes = [start(i) for i in range(contenders)]
    kills, deadline = 0, time.monotonic() + 120
    while kills < wanted_kills or server.use()["gpu0"]["leases"] < wanted:
        assert time.monotonic() < deadline, f"{server.use()} after {kills} kills"
        time.sleep(rng.uniform(0.02, 0.1))
        if shared["turns"].min() == 0 or kills == wanted_kills:
            continue  # until all take part
        victim = rng.randrange(contenders)
        processes[victim].kill()
        processes[victim].join(5.0)
        processes[victim] = start(victim)
        kills += 1
    before = shared["turns"].copy()
    while (shared["turns"] - before).min() < 50:  # a process that was killed late has to start first
        assert time.monotonic() < deadline, f"starved: {shared['turns'] - before} turns since the last kill"
        time.sleep(0.05)
    for process in processes:
        process.kill()
    use = server.use()["gpu0"]
    died = use["died"]
    print(
        f"{use['leases']} turns, longest wait {use['longest_wait'] * 1e3:.0f} ms, {died} of {kills} died in their turn"
    )
    assert shared["overlaps"][0] == 0
    assert use["longest_wait"] < 2.0
