"""The machines of a run, by Ray: this one alone, or those of a running Ray cluster with this one as the first."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._private.node import Node as RayNode
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vla_rl.cluster import fork_request
from vla_rl.cluster.calls import ProcessDied, cause_of, describe, user_error_of
from vla_rl.cluster.fork_server import modules_of, only_the_driver_is_told_to_stop, start_fork_servers
from vla_rl.cluster.gpu_claims import GpuClaim
from vla_rl.cluster.held_folder import HeldFolder, session_root
from vla_rl.cluster.node import Node, lock_server_path
from vla_rl.cluster.processes.common import CALL_TIMEOUT_S
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.gpus import Gpu
from vla_rl.core.machine import CODE, Machine, code_version
from vla_rl.placement.resources import ENV_HOST

_CONNECT_TIMEOUT_S = 10.0
_JOIN_TIMEOUT_S = 60.0  # a node imports Ray before it joins, which takes long from a shared disk
_LAST_CHANCE_S = 5.0  # for an answer that came while this process was frozen itself
_LOOPBACK = "127.0.0.1"
_NODE_PROCESS = "raylet"
_KEY = "placement.ray_address"
_NOT_JOINED = "{key}={address}: no Ray cluster was joined there ({reason}); {start}"
_START = (
    "start one with `ray start --head` on this machine and `ray start --address=HOST:PORT` on the others, or use null"
)


class RaySession:
    """Ray, started or joined, and a ``Node`` on every machine; ``close`` ends it all."""

    def __init__(self, config: RunConfig, object_store_bytes: int) -> None:
        """Raises UserError if the Ray cluster does not answer, or does not have ``placement.nodes`` nodes.

        Raises ProcessDied if a node is lost, which Ray may not have noticed yet.
        """
        address = config.placement.ray_address
        session = [HeldFolder(session_root())] if address is None else []
        self.is_shared = address is not None  # with other machines, or other runs
        self._here = Node(*session)
        self._others: dict[int, Any] = {}  # the ``Node`` of each other node; env hosts come and go
        self._asked: dict[tuple[int, str], tuple[ray.ObjectRef, float]] = {}  # open calls, and since when
        try:
            if address is None:
                start_fork_servers(modules_of(config))
                _start_ray(session[0].path, object_store_bytes)
            else:
                _join_ray(address)
                _wait_for_nodes(config.placement.nodes)
            nodes = _nodes(config.placement.nodes)
            self._count = len(nodes)
            self._ids = {number: node["NodeID"] for number, node in enumerate(nodes)}
            self._nodes = {number: name_of(node) for number, node in enumerate(nodes)}
            self._others = {number: self._new_node(number) for number in range(1, self._count)}
            folders = {number: other.get_folder.remote() for number, other in self._others.items()}
            self._roots = {0: self._here.folder} | {n: self._first_answer(n, ref) for n, ref in folders.items()}
            self._folders = dict(self._roots)
            self._gpus = self._claimed_gpus(config) if self.is_shared else [self._here.get_gpus()]
            codes = [other.get_code.remote() for other in self._others.values()]
            for code in ray.get(codes, timeout=CALL_TIMEOUT_S):
                require_same_code(*code)
        except (RayActorError, GetTimeoutError) as error:
            self.close()
            raise ProcessDied(f"a node is lost: {describe(error)}") from None
        except BaseException:
            self.close()
            raise

    def _new_node(self, node: int) -> Any:
        return ray.remote(Node).options(**self.placed(node)).remote()

    def join(self, node: int, ray_id: str, name: str) -> Any:
        """Take this Ray node as the number ``node``; returns its ``Node``, which may be starting still."""
        self._ids[node], self._nodes[node] = ray_id, name
        self._others[node] = self._new_node(node)
        return self._others[node]

    def use(self, node: int, folder: Path) -> None:
        """``folder``: as the node's ``Node.begin`` has returned it."""
        self._folders[node], self._roots[node] = folder, folder.parent

    def leave(self, node: int) -> None:
        """End the ``Node`` of one that has joined, and know it no longer; its reaper removes its files."""
        ray.kill(self._others.pop(node))
        self._asked = {key: asked for key, asked in self._asked.items() if key[0] != node}

    def others_alive(self) -> dict[str, dict[str, Any]]:
        """What Ray says of living nodes that may only simulate for this run, by their ids."""
        own = {self._ids[number] for number in range(self._count)}
        return {node["NodeID"]: node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in own}

    @property
    def address(self) -> str:
        """Where nodes join the Ray cluster."""
        return str(ray.get_runtime_context().gcs_address)

    def _first_answer(self, node: int, ref: ray.ObjectRef) -> Any:
        """Of a node's ``Node``. Raises UserError if none can be made there, and RayActorError if the node is lost."""
        try:
            return ray.get(ref, timeout=CALL_TIMEOUT_S)
        except (RayActorError, RayTaskError) as error:
            if isinstance(error, RayActorError) and not error.actor_init_failed:
                raise
            raise UserError(
                f"node {node} ({self._nodes[node]}) cannot run this code: {cause_of(error)}; install the same version "
                "of vla_rl on every node (`vla-rl doctor --cluster ADDRESS` examines them)"
            ) from None

    def _claimed_gpus(self, config: RunConfig) -> list[tuple[Gpu, ...]]:
        """Those of each node that are this run's alone, as long as it lives."""
        devices = config.placement.devices
        count = len(self._here.get_gpus()) if devices is None else devices // config.placement.nodes
        if not self._here.get_gpus():
            return [()] * self._count
        self._claims = [GpuClaim.make(self.placed(node), count) for node in range(config.placement.nodes)]
        return [claim.gpus() for claim in self._claims]

    def begin(self) -> None:
        """Give every node a new folder, for processes that start together. Raises ProcessDied if a node is lost."""
        self._folders = {node: self.call(node, "begin") for node in range(self._count)}

    def folder(self, node: int) -> Path:
        """The node's folder in shared memory, since ``begin``."""
        return self._folders[node]

    def lock_server(self, node: int) -> Path:
        """The socket of the node's lock server."""
        return lock_server_path(self._roots[node])

    def gpus(self, node: int) -> tuple[Gpu, ...]:
        """Those that the run may use there."""
        return self._gpus[node] if node < self._count else ()

    def placed(self, node: int) -> dict[str, Any]:
        """Options of an actor on ``node``. The plan counts cores and devices, so that Ray does not have to."""
        where = NodeAffinitySchedulingStrategy(self._ids[node], soft=False)
        return {"scheduling_strategy": where, "num_cpus": 0, "num_gpus": 0}

    def call(self, node: int, method: str, *args: Any) -> Any:
        """Call a method of a node's ``Node``. Raises ProcessDied if the node is lost, and what the method raises."""
        if node == 0:
            return getattr(self._here, method)(*args)
        try:
            return ray.get(getattr(self._others[node], method).remote(*args), timeout=CALL_TIMEOUT_S)
        except (RayActorError, GetTimeoutError) as error:
            raise self._lost(node, describe(error)) from None
        except RayTaskError as error:
            raise user_error_of(error) or error from None

    def ask(self, node: int, method: str) -> Any:
        """Call a method of a node's ``Node`` without waiting: its answer, or None as long as there is none.

        Raises ProcessDied if the node is lost, or does not answer for ``CALL_TIMEOUT_S`` seconds.
        """
        if node == 0:
            return getattr(self._here, method)()
        if (node, method) not in self._asked:
            self._asked[node, method] = getattr(self._others[node], method).remote(), time.monotonic()
        ref, since = self._asked[node, method]
        is_late = time.monotonic() - since > CALL_TIMEOUT_S
        if not ray.wait([ref], timeout=_LAST_CHANCE_S if is_late else 0.0)[0]:
            if is_late:
                raise self._lost(node, f"it has not answered for {CALL_TIMEOUT_S:.0f} s")
            return None
        del self._asked[node, method]
        try:
            return ray.get(ref)
        except RayActorError as error:
            raise self._lost(node, describe(error)) from None

    def _lost(self, node: int, why: str) -> ProcessDied:
        return ProcessDied(f"node {node} ({self._nodes[node]}) is lost: {why}")

    def require_ray(self) -> None:
        """Raise ProcessDied if Ray's own processes, which this run has started here, have ended.

        The run's processes may live on and answer, while new ones are waited for in vain. Ray itself notices late.
        """
        node = getattr(ray._private.worker, "_global_node", None)
        started = getattr(node, "all_processes", {})
        for name in (ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER):
            if any(one.process.poll() is not None for one in started.get(name, ())):
                raise ProcessDied(f"Ray's own process {name} has ended")

    def lock_use(self) -> dict[str, dict[str, float]]:
        """Totals of every device of every node that was leased."""
        use: dict[str, dict[str, float]] = {}
        for node in range(self._count):
            use |= self.call(node, "lock_use")
        return use

    def close(self) -> None:
        """Safe to call at any point of the start. A node that does not answer cleans up by itself, once Ray has ended
        the run's processes there."""
        if ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get([other.close.remote() for other in self._others.values()], timeout=CALL_TIMEOUT_S)
            _end_at_once()
            ray.shutdown()
        self._here.close()


def _start_ray(session: Path, object_store_bytes: int) -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 gives way to every other program
    os.environ.setdefault(
        "RAY_preallocate_plasma_memory", "1"
    )  # a sparse store would end processes when memory is full
    # Ray takes the limit from the cores that it may give to actors, which are none here
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(os.cpu_count()))
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")  # a history of all calls, which grows for days
    with _own_code_first(), only_the_driver_is_told_to_stop(), _on_the_loopback_interface(), _ray_as_it_is_needed():
        try:
            ray.init(
                address="local",  # whatever RAY_ADDRESS names
                num_cpus=0,  # actors reserve none; with more, Ray starts idle processes in advance
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=object_store_bytes,
                _node_ip_address=_LOOPBACK,
                _temp_dir=str(session),
            )
        except Exception as error:
            # a start that takes too long raises ``Exception`` itself; other kinds are mistakes in a program
            if type(error) is not Exception and not isinstance(error, RuntimeError | ConnectionError | RayError):
                raise
            reason = str(error).partition("\n")[0]
            raise ProcessDied(f"Ray did not start: {reason}") from error


def require_cluster(address: str | None, key: str = _KEY) -> None:
    """Raise UserError if nothing listens at ``address``, which ``key`` gives. Ray itself would try for minutes.

    Also if this process, such as a notebook's, uses Ray already.
    """
    if ray.is_initialized():
        raise UserError("Ray is running in this process, which a run starts by itself: call ray.shutdown() first")
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(_NOT_JOINED.format(key=key, address=address, reason=error, start=_START)) from None


def _join_ray(address: str, key: str = _KEY) -> None:
    require_cluster(address, key)
    names = (process.info["name"] for process in psutil.process_iter(["name"]))
    if _NODE_PROCESS not in names:  # Ray would wait for a minute
        reason = "this machine does not belong to one: no Ray node runs here"
        raise UserError(_NOT_JOINED.format(key=key, address=address, reason=reason, start=_START))
    try:
        with _own_code_first():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(_NOT_JOINED.format(key=key, address=address, reason=reason, start=_START)) from None


@contextlib.contextmanager
def joined_ray(address: str, key: str) -> Iterator[None]:
    """Within the block, this process uses the cluster at ``address``. Raises UserError, which names ``key``, if that is
    not possible."""
    _join_ray(address, key)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _own_code_first() -> Iterator[None]:
    """Ray's processes import what is in the driver's working directory first: within the block, that is this code."""
    with contextlib.chdir(CODE):
        yield


@contextlib.contextmanager
def _on_the_loopback_interface() -> Iterator[None]:
    """Within the block, Ray takes this machine's loopback address as it is given. It would replace it by one that other
    machines can reach, and listen there with all of its processes, unless it believes that there is one node only."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _ray_as_it_is_needed() -> Iterator[None]:
    """Within the block, Ray starts its workers by ``fork_request``, and itself without the server of its dashboard,
    autoscaler and log monitor. Nothing here asks them, and they take as long to start as the rest of Ray, which waits
    for the first of them."""

    def none(node: RayNode, **about: Any) -> None:
        node._webui_url = ""

    def start_raylet(node: RayNode, *args: Any, **options: Any) -> None:
        node._ray_params.setup_worker_path = fork_request.__file__
        before["start_raylet"](node, *args, **options)

    methods = dict.fromkeys(("start_api_server", "start_monitor", "start_log_monitor"), none)
    methods["start_raylet"] = start_raylet
    before = {name: getattr(RayNode, name) for name in methods}
    try:
        for name, method in methods.items():
            setattr(RayNode, name, method)
        yield
    finally:
        for name, method in before.items():
            setattr(RayNode, name, method)


def _end_at_once() -> None:
    """Ray would send SIGTERM to each of its own processes, which does not reach them, and wait a second for each."""
    node = getattr(ray._private.worker, "_global_node", None)
    for started in getattr(node, "all_processes", {}).values():
        for one in started:
            one.process.terminate = one.process.kill


def require_same_code(there: str, folder: Path) -> None:
    """Raise UserError if a node (``Node.get_code``) imports other source files than this one."""
    if there != code_version():
        raise UserError(
            f"the nodes run different code: {CODE} here is not as {folder} there; install the same version of "
            "vla_rl on every node"
        )


def name_of(node: dict[str, Any]) -> str:
    """Host and address of what Ray says of a node."""
    return f"{node['NodeManagerHostname']}, {node['NodeManagerAddress']}"


def gpus_of(node: dict[str, Any]) -> float:
    """What a node offers to learners and inference: -1 if it only simulates (``vla-rl join``)."""
    resources: dict[str, float] = node["Resources"]
    return -1.0 if ENV_HOST in resources else resources.get("GPU", 0.0)


def _wait_for_nodes(wanted: int) -> None:
    """Until so many that are like this one have joined, but no longer than ``_JOIN_TIMEOUT_S``: they may be starting,
    as this run is."""
    deadline, gpus = time.monotonic() + _JOIN_TIMEOUT_S, len(Machine.detect().gpus)
    while sum(node["Alive"] and gpus_of(node) >= gpus for node in ray.nodes()) < wanted:
        if time.monotonic() > deadline:
            return
        time.sleep(0.5)


def _nodes(wanted: int) -> list[dict[str, Any]]:
    """What Ray says of the nodes for learners and inference: this machine, then those with most GPUs.

    Raises UserError if there are too few, or unequal ones.
    """
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"] and (gpus_of(node) >= 0 or node["NodeID"] == here)]
    if len(alive) < wanted:
        raise UserError(f"placement.nodes={wanted}: the Ray cluster has {len(alive)} alive; use at most that many")
    alive.sort(key=lambda node: (node["NodeID"] != here, -gpus_of(node), node["NodeID"]))
    gpus = len(Machine.detect().gpus)
    for node in alive[1:wanted]:
        if (there := gpus_of(node)) < gpus:
            name = node["NodeManagerHostname"]
            raise UserError(
                f"placement.nodes={wanted}: {name} has {there:.0f} GPUs, this machine {gpus}; this version runs on "
                "alike nodes, and on others for env workers (placement.env_hosts; `vla-rl plan --on` plans for others)"
            )
    return alive[:wanted]
