"""The hosts themselves: what they share, how their cables behave, and that nothing is left of them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from tests import ROOT
from tests.hosts.network import Host, Network

_ANSWER = "import socket as s; l = s.create_server(('', 5000))\nwhile True: l.accept()[0].close()"
_ASK = """
import socket, sys, time
start = time.perf_counter()
socket.create_connection((sys.argv[1], 5000), timeout=1).close()
print(time.perf_counter() - start)
"""
_SEND = """
import socket, sys, time
l = socket.create_server(('', 5001))
c = l.accept()[0]
start = time.perf_counter()
n = 0
while data := c.recv(1 << 20): n += len(data)
print(8e-6 * n / (time.perf_counter() - start))
"""
_TAKE = "import socket, sys; socket.create_connection((sys.argv[1], 5001)).sendall(bytes(2 << 20))"


@pytest.fixture(scope="module")
def hosts(network: Network) -> tuple[Host, Host]:
    first, second = network.host("left"), network.host("right")
    listening = second.start(sys.executable, "-c", _ANSWER)
    deadline = time.monotonic() + 20
    while _round_trip_s(first, second) is None:
        assert listening.poll() is None
        assert time.monotonic() < deadline
    return first, second


def _round_trip_s(here: Host, there: Host) -> float | None:
    """The shortest of three; None if nobody answers within a second. A busy machine may lose one of them."""
    answers: list[float] = []
    for _ in range(3):
        with contextlib.suppress(CalledProcessError):
            answers.append(float(here.run(sys.executable, "-S", "-c", _ASK, there.address)))
    return min(answers, default=None)


def test_hosts_share_no_disk_no_memory_and_no_name(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    assert [host.run("hostname") for host in hosts] == ["left\n", "right\n"]
    uptimes = [float(host.run("cat", "/proc/uptime").split()[0]) for host in hosts]
    assert uptimes[1] - uptimes[0] > 99_000, "nor a clock of what has passed since they were started"
    for folder in ("/tmp", "/dev/shm"):
        first.run("touch", f"{folder}/mine")
        assert first.path(f"{folder}/mine").exists()
        assert not second.path(f"{folder}/mine").exists()
        assert not Path(folder, "mine").exists()
    for folder in ("/root", str(ROOT), "/var/tmp"):
        with pytest.raises(CalledProcessError, match="exit status 1") as caught:
            first.run("touch", f"{folder}/mine")
        assert "Read-only" in caught.value.output
    assert first.processes() == ["sleep"], "only its own"
    assert "left" in first.run("getent", "hosts", "127.0.1.1")


@pytest.mark.alone
def test_a_cable_is_slow_or_thin_or_cut(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    assert _round_trip_s(first, second) < 0.02
    second.shape(round_trip_ms=60)
    assert 0.06 <= _round_trip_s(first, second) < 0.09
    second.cut_off()
    assert _round_trip_s(first, second) is None
    second.join()
    assert 0.06 <= _round_trip_s(first, second) < 0.09
    second.shape(mbit=20, loss=0.01)
    before = second.sent_bytes()
    taking = first.start(sys.executable, "-S", "-c", _SEND, stdout=subprocess.PIPE)
    time.sleep(0.3)
    second.run(sys.executable, "-S", "-c", _TAKE, first.address)
    assert 10 < float(taking.communicate(timeout=20)[0]) < 20.5
    assert 2 << 20 < second.sent_bytes() - before < 4 << 20
    second.shape()
    assert _round_trip_s(first, second) < 0.02


def test_a_cable_that_loses_all_carries_nothing(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    first.shape(loss=1.0)
    assert _round_trip_s(first, second) is None
    first.shape()
    assert _round_trip_s(first, second) is not None


def test_a_killed_host_is_silent(network: Network, hosts: tuple[Host, Host]) -> None:
    third = network.host("third")
    sleeping = third.start("sleep", "1000")
    third.kill()
    assert sleeping.wait(timeout=5) != 0
    with pytest.raises(CalledProcessError):
        third.run("true")
    third.kill()


def test_nothing_is_left_of_hosts_whose_owner_is_killed(network: Network) -> None:
    code = (
        "from tests.hosts.network import Network; n = Network().__enter__(); h = n.host('x'); h.shape(loss=0.5);"
        "p = h.start('sleep', '1000'); print(n.switch.pid, h._space.pid, h._cable.pid, p.pid, flush=True); p.wait()"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) == 4
    assert all(map(_lives, pids))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 10
    while any(map(_lives, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
