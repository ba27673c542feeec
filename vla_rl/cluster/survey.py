"""What the nodes of a running Ray cluster have, and how they reach its head: for `vla-rl doctor --cluster`.

Every node answers for itself, in a Ray task that is placed on it. All are asked at once what they have; the links are
measured one after the other, because all of them end at the head. Nobody is waited for without end.
"""

import importlib.metadata
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vla_rl.cluster.calls import cause_of
from vla_rl.cluster.ray_session import joined_ray
from vla_rl.core.gpus import GpuReport
from vla_rl.core.ipc.shared_memory import shared_root
from vla_rl.core.machine import Machine, code_version, interface_of

ANSWER_S = 30.0  # until all nodes have said what they have; a process has to start there
LINK_S = 60.0  # for the measurement of one link
_CONNECT_S = 10.0
_READ_S = 1.0  # for an answer that is there
_REPEATS = 5
_PARCELS = (1 << 20, 8 << 20, 32 << 20)  # bytes; a larger one follows where the one before was quick
_LONG_ENOUGH_S = 0.3
_ROUND_TRIPS = 50  # in fewer, a connection is still getting faster
_GONE = "Ray has lost it: it was shut down, or did not answer Ray's own checks"
_JOIN = "see /tmp/ray/session_latest/logs there; `ray stop`, then `ray start --address=HOST:PORT`, joins it again"
_INSTALL = "install the same version of vla_rl, with its dependencies, on every node"
_PORTS = "let the nodes reach each other at all ports: Ray and the learner's ranks choose some"
_FAILED = {  # by what was asked for: what is wrong if it raises an error, the remedy, and that for no answer
    "facts": ("it cannot run this code", _INSTALL, _JOIN),
    "link": ("its link cannot be measured", _PORTS, _PORTS),
}
_PACKAGES = ("ray", "torch", "vla_rl", "mujoco")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a node's own process has found there. Sizes in bytes."""

    versions: dict[str, str]  # by package, and "python"; those that are not installed are left out
    code: str  # ``code_version``
    cpus: int
    memory: int
    gpus: tuple[str, ...]
    gpu_problem: str
    shared: tuple[int, int]  # free, total
    disk: tuple[int, int]  # likewise, of the folder for temporary files
    folder: Path  # that folder
    interface: str | None  # which has the node's address


@dataclass(frozen=True, slots=True)
class Link:
    """How a node reaches the head."""

    round_trip_s: float
    clock_s: float  # by how much the node's clock is ahead of the head's
    clock_error_s: float  # at most, half of a call's round trip
    to_head: float  # bytes/s of a large Ray object
    from_head: float


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node. ``problem``, and its remedy: why ``facts``, or ``link``, is missing; the head has no link."""

    name: str
    address: str
    is_head: bool
    gpus: int  # that Ray was told of
    facts: Facts | None = None
    link: Link | None = None
    problem: str = ""
    remedy: str = ""


def survey(address: str, say: Callable[[str], None] = lambda text: None) -> list[NodeReport]:
    """Every node of the cluster at ``address`` (HOST:PORT, or auto), the head first, then by name.

    This machine has to be one of them. ``say`` is called with what is done. Raises UserError if the cluster cannot be
    joined from here.
    """
    with joined_ray(address, "--cluster"):
        nodes = sorted(ray.nodes(), key=lambda n: (not _is_head(n), n["NodeManagerHostname"], n["NodeID"]))
        alive = [node for node in nodes if node["Alive"]]
        say(f"{len(alive)} nodes; each is asked what it has, for {ANSWER_S:.0f} s at most")
        asked = {node["NodeID"]: _on(node, _facts).remote() for node in alive}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
        reports = [_with_answer(_report(node), asked[node["NodeID"]], "facts", ANSWER_S, _READ_S) for node in alive]
        measured = _with_links(alive, reports, say)
        living = {report.address for report in measured}
        gone = [_report(node) for node in nodes if not node["Alive"] and node["NodeManagerAddress"] not in living]
        return measured + [replace(report, problem=_GONE, remedy=_JOIN) for report in gone]


def _with_links(nodes: Sequence[dict], reports: Sequence[NodeReport], say: Callable[[str], None]) -> list[NodeReport]:
    """The reports of ``nodes``, with the links of those that have answered."""
    others = [report for report in reports if not report.is_head]
    if not reports[0].is_head or reports[0].facts is None:  # without a head that answers, there are no links to it
        return list(reports)
    say(f"links to the head: {len(others)}, one after the other, each for {LINK_S:.0f} s at most")
    head = ray.remote(_Head).options(**_placed(nodes[0])).remote(reports[0].address)
    measured = [reports[0]]
    for node, report in zip(nodes[1:], others, strict=True):
        if report.facts is not None:
            report = _with_answer(report, _on(node, _link).remote(head), "link", LINK_S, LINK_S)
        measured.append(report)
    return measured


def _with_answer(report: NodeReport, ref: ray.ObjectRef, name: str, limit: float, wait: float) -> NodeReport:
    """The report with the answer of a task of its node, or with why there is none."""
    failed, remedy, silent = _FAILED[name]
    try:
        answer: Any = ray.get(ref, timeout=wait)
    except GetTimeoutError:
        ray.cancel(ref, force=True)
        return replace(report, problem=f"it has not answered within {limit:.0f} s", remedy=silent)
    except RayTaskError as error:
        return replace(report, problem=f"{failed}: {cause_of(error)}", remedy=remedy)
    except RayError as error:
        return replace(report, problem=cause_of(error), remedy=silent)
    return (
        replace(report, problem=answer, remedy=remedy) if isinstance(answer, str) else replace(report, **{name: answer})
    )


def _report(node: dict[str, Any]) -> NodeReport:
    gpus = int(node["Resources"].get("GPU", 0))
    return NodeReport(node["NodeManagerHostname"], node["NodeManagerAddress"], _is_head(node), gpus)


def _is_head(node: dict[str, Any]) -> bool:
    return "node:__internal_head__" in node["Resources"]


def _placed(node: dict[str, Any]) -> dict[str, Any]:
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False), "num_cpus": 0}


def _on(node: dict[str, Any], function: Callable[..., Any]) -> Any:
    return ray.remote(function).options(**_placed(node), max_retries=0)


# --- on the nodes -----------------------------------------------------------------------------------------------------


def _facts() -> Facts:
    machine, folder = Machine.detect(), Path(tempfile.gettempdir())
    with patch.dict(os.environ):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides them from tasks that have asked for none
        report = GpuReport.detect()
    gpus = tuple(f"{gpu.name} ({gpu.memory / 2**30:.0f} GiB)" for gpu in report.gpus)
    shared, disk = shutil.disk_usage(shared_root()), shutil.disk_usage(folder)
    return Facts(
        versions={"python": platform.python_version(), **_versions()},
        code=code_version(),
        cpus=machine.cpus,
        memory=machine.memory,
        gpus=gpus,
        gpu_problem=report.problem,
        shared=(shared.free, shared.total),
        disk=(disk.free, disk.total),
        folder=folder,
        interface=interface_of(ray.util.get_node_ip_address()),
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class _Head:
    """The other end of all links."""

    def __init__(self, address: str) -> None:
        """Listens at a port that the system chooses, as the learner's first rank does. Nothing is read or sent."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=_REPEATS)
        self._address = self._listener.getsockname()[:2]

    def listens_at(self) -> tuple[str, int]:
        return self._address

    def hang_up(self) -> None:
        """Close the connections that have been made; the kernel has accepted them."""
        self._listener.setblocking(False)
        for _ in range(_REPEATS):
            try:
                self._listener.accept()[0].close()
            except BlockingIOError:
                return

    def clock(self) -> float:
        return time.time()

    def parcel(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def take(self, parcel: np.ndarray) -> int:
        return parcel.nbytes


def _link(head: Any) -> Link | str:
    """Of this node; or what prevents one."""
    address: Any = ray.get(head.listens_at.remote(), timeout=LINK_S)
    try:
        round_trip = min(_connecting_s(address) for _ in range(_REPEATS))
    except OSError as error:
        return f"it cannot connect to a port of the head ({address[0]}:{address[1]}: {error})"
    finally:
        head.hang_up.remote()
    error_s, ahead = min(_clock(head) for _ in range(_REPEATS))
    long_s = max(_LONG_ENOUGH_S, _ROUND_TRIPS * round_trip)
    to_head, from_head = _rate(partial(_send, head), long_s), _rate(partial(_fetch, head), long_s)
    return Link(round_trip, ahead, error_s, to_head, from_head)


def _connecting_s(address: tuple[str, int]) -> float:
    """Seconds until a connection is there: exactly one round trip."""
    start = time.perf_counter()
    with socket.create_connection(address, timeout=_CONNECT_S):
        return time.perf_counter() - start


def _clock(head: Any) -> tuple[float, float]:
    """(largest error, by how much this clock is ahead of the head's), in seconds: the head's clock is read at some
    moment between the two readings here."""
    before, start = time.time(), time.perf_counter()
    there: Any = ray.get(head.clock.remote(), timeout=LINK_S)
    half = (time.perf_counter() - start) / 2
    return half, before + half - there


def _rate(move: Callable[[int], float], long_s: float) -> float:
    """Bytes/s. ``move``: moves so many bytes, and returns the seconds that it took; ``long_s``: enough to measure."""
    for nbytes in _PARCELS:
        seconds = move(nbytes)
        if seconds >= long_s:
            break
    return nbytes / seconds


def _send(head: Any, nbytes: int) -> float:
    parcel = ray.put(np.zeros(nbytes, np.uint8))
    start = time.perf_counter()
    ray.get(head.take.remote(parcel), timeout=LINK_S)
    return time.perf_counter() - start


def _fetch(head: Any, nbytes: int) -> float:
    parcel = head.parcel.remote(nbytes)
    ray.wait([parcel], timeout=LINK_S, fetch_local=False)
    start = time.perf_counter()
    ray.get(parcel, timeout=LINK_S)
    return time.perf_counter() - start
