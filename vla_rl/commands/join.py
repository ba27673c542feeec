"""`vla-rl join ADDRESS`: this machine simulates for the runs of a Ray cluster, until Ctrl-C.

wait for ADDRESS ──▶ Ray's own node here ──▶ runs take it (``placement.env_hosts``) ──▶ it ends: wait for ADDRESS
"""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil

from vla_rl.core.errors import UserError
from vla_rl.observability.heartbeat import SILENCE_S
from vla_rl.placement.resources import ENV_HOST

_CONNECT_S, _LOOK_S, _AGAIN_S = 5.0, 1.0, 5.0
_LEAVE_S = 20.0  # in which Ray ends its processes here; what is left then is killed
_NODE, _WORKER = "raylet", "ray::EnvWorkerProcess"  # what Ray calls a node's process, and an env worker's


def join_command(args: Any) -> int:
    """Join, and again after the node's end, until Ctrl-C or SIGTERM. Raises UserError if Ray refuses the first time."""
    host, _, port = args.address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"{args.address!r} is no address of a Ray cluster: write HOST:PORT, as `ray start` prints it")
    # SIGTERM is what a host gets before it is taken away; shells start background processes with SIGINT ignored
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        while True:
            _wait_for(host.strip("[]"), int(port))
            _stay(start_command(args.address, args.node_ip_address), args.address)
            time.sleep(_AGAIN_S)
    except KeyboardInterrupt:
        _say(f"left {args.address}")
        return 0


def start_command(address: str, ip: str | None) -> list[str]:
    """Of a node that offers Ray neither cores nor GPUs: the plan of a run counts them."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--block"]
    command += ["--num-cpus=0", "--num-gpus=0", f"--resources={json.dumps({ENV_HOST: 1})}", "--disable-usage-stats"]
    return command + ([f"--node-ip-address={ip}"] if ip else [])


# waits for: somebody who listens there. unblocked by: that, Ctrl-C.
def _wait_for(host: str, port: int) -> None:
    spoke = -SILENCE_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=_CONNECT_S).close()
        except OSError as error:
            if time.monotonic() - spoke >= SILENCE_S:
                spoke = time.monotonic()
                _say(f"waiting for a Ray cluster at {host}:{port}: {error.strerror or error}")
        time.sleep(_LOOK_S)


# waits for: the node's end. unblocked by: that, Ctrl-C.
def _stay(command: list[str], address: str) -> None:
    """Run a node, and say what happens. Raises UserError if it does not join."""
    with tempfile.TemporaryFile("w+") as said:
        # in a session of its own: Ctrl-C in the terminal is for this process, which ends the node in order
        node = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
        known, joined, workers = list[tuple[psutil.Process, str]](), False, 0
        try:
            while node.poll() is None:
                known = _processes_of(node.pid)
                names = [name for _, name in known]
                is_there, playing = _NODE in names, sum(name.startswith(_WORKER) for name in names)
                if joined and not is_there:
                    break
                if is_there and not joined:
                    _say(f"joined {address}: waiting for a run that has a place (placement.env_hosts)")
                if playing != workers:
                    _say(f"{playing} env workers of runs are here")
                joined, workers = joined or is_there, playing
                time.sleep(_LOOK_S)
        finally:
            _end(node, [process for process, _ in known])
        said.seek(0)
        last = [line for line in said.read().splitlines() if line.strip()][-1:]
    if not joined:
        token = "if the cluster has a token, set RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN here"
        raise UserError(f"Ray did not join {address}: {' '.join(last)}; {token}")
    _say(f"the node has ended: {' '.join(last)}")


def _end(node: subprocess.Popen[bytes], started: list[psutil.Process]) -> None:
    node.terminate()  # Ray then ends what it has started
    with contextlib.suppress(subprocess.TimeoutExpired):
        node.wait(_LEAVE_S)
    for process in psutil.wait_procs(started, timeout=_LOOK_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    node.kill()
    node.wait()


def _processes_of(pid: int) -> list[tuple[psutil.Process, str]]:
    """All descendants of a process, with their titles."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append((process, process.name() if process.name() == _NODE else " ".join(process.cmdline())))
    return found


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
