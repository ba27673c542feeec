"""`vla-rl join`, with a program that behaves as a Ray node in place of one."""

import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests import ROOT
from vla_rl.commands import join
from vla_rl.core.errors import UserError
from vla_rl.placement.resources import ENV_HOST

# starts a "raylet", and prints what the end was
_NODE = (
    "import subprocess,sys,time;r=subprocess.Popen([sys.argv[1],sys.argv[2]]);r.wait();print('the end',flush=True);"
    "time.sleep(60)"
)


@pytest.fixture
def listening() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def raylet(tmp_path: Path) -> Path:
    return Path(shutil.copy(shutil.which("sleep") or "/bin/sleep", tmp_path / "raylet"))


def _args(address: str) -> SimpleNamespace:
    return SimpleNamespace(address=address, node_ip_address=None)


def test_a_host_offers_ray_nothing_but_that_it_simulates() -> None:
    command = join.start_command("head:6379", "10.0.0.7")
    assert {"--address=head:6379", "--node-ip-address=10.0.0.7", "--num-cpus=0", "--num-gpus=0"} <= set(command)
    assert f'--resources={{"{ENV_HOST}": 1}}' in command


@pytest.mark.parametrize("address", ["head", "head:0", "head:port", ":6379", "head:99999"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=r"is no address of a Ray cluster: write HOST:PORT"):
        join.join_command(_args(address))


def test_it_waits_for_a_cluster_and_leaves_on_ctrl_c() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"  # where nobody listens afterwards
    command = [sys.executable, "-m", "vla_rl.commands.cli", "join", address]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert f"waiting for a Ray cluster at {address}: " in running.stdout.readline()
        running.send_signal(signal.SIGINT)
        said, errors = running.communicate(timeout=30)
    assert (running.returncode, errors) == (0, "")
    assert f"left {address}" in said


def test_a_node_that_ends_joins_again(
    listening: str, raylet: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def command(*_: Any) -> list[str]:
        if len(started) == 2:
            raise KeyboardInterrupt
        started.append(time.monotonic())
        return [sys.executable, "-S", "-c", _NODE, str(raylet), "0.7"]

    for name, seconds in (("_LOOK_S", 0.1), ("_AGAIN_S", 0.0)):
        monkeypatch.setattr(join, name, seconds)
    monkeypatch.setattr(join, "start_command", command)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert join.join_command(_args(listening)) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    lines = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    joined = f"joined {listening}: waiting for a run that has a place (placement.env_hosts)"
    assert lines == [joined, "the node has ended: the end"] * 2 + [f"left {listening}"]


def test_what_ray_started_ends_with_it(raylet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what does not hear SIGTERM."""
    monkeypatch.setattr(join, "_LOOK_S", 0.1)
    deaf = "import signal,subprocess,sys;signal.signal(15,signal.SIG_IGN);subprocess.run([sys.argv[1],'60'])"
    node = subprocess.Popen([sys.executable, "-S", "-c", deaf, str(raylet)], start_new_session=True)
    monkeypatch.setattr(join, "_LEAVE_S", 0.3)
    deadline = time.monotonic() + 20
    while not (started := [process for process, name in join._processes_of(node.pid) if name == "raylet"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ending = threading.Thread(target=join._end, args=(node, started))
    ending.start()
    ending.join(20.0)
    assert not ending.is_alive()
    assert node.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while started[0].is_running() and started[0].status() != psutil.STATUS_ZOMBIE:  # nobody here asks for its status
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_ray_refuses_is_told(listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "start_command", lambda *_: [sys.executable, "-S", "-c", "print('no such token')"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(
            UserError, match=rf"Ray did not join {listening}: no such token; if the cluster has a token"
        ):
            join.join_command(_args(listening))
    finally:
        signal.signal(signal.SIGTERM, before)
