"""A run whose env workers are on a Ray node without an inference server. Here both nodes are on one machine, each with
its own shared folder, as they would be apart."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from envs import env_spec
from tests import ROOT
from tests.cluster.ray_nodes import NODE, RayNodes, two_ray_nodes
from tests.metrics_page import undocumented
from tests.processes import answers
from vla_rl.cluster import ray_session
from vla_rl.cluster.launcher import Launcher
from vla_rl.commands.chaos.training_run import ledger
from vla_rl.commands.train import run_training
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.gpus import Gpu
from vla_rl.core.machine import GIB, Machine
from vla_rl.observability import heartbeat
from vla_rl.observability.callbacks import Callback
from vla_rl.placement.processes import make_plan
from vla_rl.placement.resources import ENV_HOST, Node, Resources


@pytest.fixture
def two_nodes() -> Iterator[RayNodes]:
    with two_ray_nodes() as nodes:
        yield nodes


def _ray_nodes(**gpus: int) -> list[dict[str, Any]]:
    return [
        {"NodeID": name, "Alive": True, "Resources": {"GPU": count} if count else {}, "NodeManagerHostname": name}
        for name, count in gpus.items()
    ]


def test_learners_and_inference_get_the_nodes_with_most_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "head"))
    monkeypatch.setattr(Machine, "detect", lambda: Machine(8, GIB, (Gpu("H100", 80 * GIB),) * 2))
    monkeypatch.setattr(ray, "nodes", lambda: _ray_nodes(a=0, b=2, c=1, d=0, head=2))
    assert [node["NodeID"] for node in ray_session._nodes(2)] == ["head", "b"]
    assert [node["NodeID"] for node in ray_session._nodes(1)] == ["head"]
    with pytest.raises(UserError, match=r"placement\.nodes=3: c has 1 GPUs, this machine 2"):
        ray_session._nodes(3)
    with pytest.raises(UserError, match=r"placement\.nodes=6: the Ray cluster has 5 alive"):
        ray_session._nodes(6)
    hosts = _ray_nodes(a=0, head=0)
    hosts[0]["Resources"][ENV_HOST] = 1.0
    monkeypatch.setattr(Machine, "detect", lambda: Machine(8, GIB))
    monkeypatch.setattr(ray, "nodes", lambda: hosts)
    with pytest.raises(UserError, match=r"placement\.nodes=2: the Ray cluster has 1 alive"):
        ray_session._nodes(2)


@pytest.mark.parametrize(("most", "gateways"), [(1, 4), (4, 3), (64, 2)])
def test_rows_of_remote_workers_are_where_their_gateway_looks(
    most: int, gateways: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_rl.placement.plan.GATEWAY_WORKERS", most)
    config = RunConfig.model_validate({"placement": {"env_workers": 13, "mode": "collocated", "envs_per_worker": 2}})
    plan = make_plan(config, Resources.on((Node(8, 2), Node(4, 0), Node(4, 0)), "cuda"))
    session: Any = SimpleNamespace(folder=lambda node: tmp_path / str(node))
    launch = Launcher(config, env_spec(config.env), plan, session)
    of_nodes = launch.pools() | {node: list(launch.guest_pools(node).values()) for node in plan.env_hosts}
    pools = [pool for of_node in of_nodes.values() for pool in of_node]
    assert all(pool.folder == str(tmp_path / str(node)) for node, of_node in of_nodes.items() for pool in of_node)
    assert len(pools) == len({pool.memory for pool in pools}) == 2 + 2 * 2
    assert sum(pool.workers for pool in pools) == len(plan.workers) + len(plan.remote)
    seats = dict[Path, set[int]]()
    for worker in plan.workers:
        pool, position = launch.seat(worker)
        assert pool in pools
        assert pool.folder == str(tmp_path / str(worker.node))
        assert not any(position in guests for guests in pool.guests)
        seats.setdefault(pool.memory, set()).add(position)
    assert sum(map(len, seats.values())) == len(plan.workers), "none has another's rows"
    carried = set[tuple[int, int]]()
    for gateway in plan.gateways:
        server, guests = plan.guest_groups[gateway.index]
        assert gateway.node == plan.servers[server].node
        assert len(guests) == 1 or sum(map(len, guests.values())) <= most
        rows = iter(launch.guests(gateway.index))
        bells = {launch.pool(server).bell(row) for row in launch.guests(gateway.index)}
        for node, workers in guests.items():  # as ``GatewayProcess.listen`` is told
            for position, worker in enumerate(workers):
                assert launch.seat(plan.workers[worker]) == (launch.guest_pools(node)[server], position)
                assert plan.workers_of(server)[next(rows)] == worker
                carried.add((server, worker))
        assert next(rows, None) is None
        assert len(bells) == 1, "a gateway waits for one"
    assert len({launch.pool(server).bell(row) for server in (0, 1) for row in range(launch.pool(server).workers)}) == (
        len(plan.gateways) + len(plan.workers) - len(plan.remote)
    )
    assert carried == {(plan.server_of(worker.index), worker.index) for worker in plan.remote}
    assert len(plan.gateways) == gateways


class LinkKiller(Callback):
    """Kills the gateway and the relay after the first iteration."""

    def __init__(self) -> None:
        self.killed: list[str] = []

    def on_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if iteration != 1:
            return
        children = psutil.Process().children(recursive=True)
        for pid, title in answers(children, lambda process: (process.pid, " ".join(process.cmdline()))):
            for name in ("GatewayProcess", "RequestRelayProcess"):
                if name in title and name not in self.killed:
                    os.kill(pid, signal.SIGKILL)
                    self.killed.append(name)


@pytest.mark.slow
@pytest.mark.alone
def test_env_workers_on_a_host_without_a_server_ask_over_the_network(two_nodes: RayNodes, tmp_path: Path) -> None:
    """Gateway and relay die meanwhile, and are replaced: no episode is lost."""
    config = RunConfig.model_validate(
        {
            "env": {"name": "tabletop", "tasks": ["reach"]},
            "train": {"iterations": 2, "batch_episodes": 4, "eval_episodes": 4, "eval_every": 2, "eval_start": False},
            "algo": {"name": "ppo", "minibatches": 1},
            "policy": {"name": "openvla_oft", "size": "nano"},
            "placement": {"env_workers": 2, "envs_per_worker": 2, "env_hosts": 1, "mode": "collocated", "devices": 1}
            | {"ray_address": two_nodes.address},
            "log": {"dir": str(tmp_path), "name": "run", "video": False, "trace": True},
        }
    )
    killer = LinkKiller()
    metrics = run_training(config, callbacks=[killer]).metrics
    assert sorted(killer.killed) == ["GatewayProcess", "RequestRelayProcess"]
    last = metrics[-1]
    assert last["iteration"] == 2
    assert (last["restarts"], last["restarts_of_run"]) == (2, 0)
    assert (last["episodes/trained"], last["episodes/evaluated"], last["episodes/lost"]) == (8, 4, 0)
    assert all(ledger(m)["missing"] == 0 for m in metrics)
    assert not undocumented(set().union(*metrics)), "docs/metrics.md"
    latencies = [m["network/latency_ms"] for m in metrics if "network/latency_ms" in m]  # an update may need no answer
    assert 0 < min(latencies) < 1000
    assert last["network/dropped"] == 0
    for m in metrics[1:]:
        assert 1 < m["learner/ratio_max"] + 1e-3 < 1.002, "they acted with the weights of the learner"
    assert {path.stem for path in (tmp_path / "run/trace").iterdir()} >= {"gateway-0", "request-relay-0"}


class HostSwapper(Callback):
    """After the first two iterations one env host each is gone, as a machine that is taken away. Then another one
    joins."""

    def __init__(self, nodes: RayNodes) -> None:
        self.nodes = nodes
        self.joining: subprocess.Popen[str] | None = None

    def on_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if iteration <= 2:
            self.nodes.remove_node(next(iter(self.nodes.worker_nodes)), allow_graceful=False)
        if iteration == 2:
            threading.Timer(3.0, self._join).start()

    def _join(self) -> None:
        command = [sys.executable, "-m", "vla_rl.commands.cli", "join", self.nodes.address]
        self.joining = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.alone
def test_a_run_goes_on_while_env_hosts_are_taken_away_and_another_one_joins(
    two_nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "SILENCE_S", 2.0)
    monkeypatch.setattr("vla_rl.placement.plan.GATEWAY_WORKERS", 1)  # so that each host has a gateway of its own
    config = RunConfig.model_validate(
        {
            "env": {"name": "tabletop", "tasks": ["reach"]},
            "train": {"iterations": 5, "batch_episodes": 4, "eval_episodes": 4, "eval_every": 5, "eval_start": False},
            "algo": {"name": "ppo", "minibatches": 1},
            "policy": {"name": "openvla_oft", "size": "nano"},
            "placement": {"env_workers": 2, "envs_per_worker": 2, "env_hosts": {"min": 1, "max": 2}}
            | {"env_host_cores": 1, "mode": "collocated", "ray_address": two_nodes.address},
            "log": {"dir": str(tmp_path), "name": "run", "video": False},
        }
    )
    two_nodes.add_node(**NODE)
    swapper = HostSwapper(two_nodes)
    metrics = run_training(config, callbacks=[swapper]).metrics
    said = capsys.readouterr().out
    last = metrics[-1]
    assert (last["iteration"], last["restarts"], last["restarts_of_run"]) == (5, 0, 0)
    assert all(ledger(m)["missing"] == 0 for m in metrics)
    assert last["episodes/trained"] == 20
    assert last["episodes/evaluated"] == 4
    assert 1 <= last["episodes/lost"] <= 4, "those that the env workers of both played; they were played again"
    assert last["placement/env_hosts"] == 1
    assert not undocumented(set().union(*metrics)), "docs/metrics.md"
    assert said.count("has joined with 1 env workers") == 3
    assert said.count("has left, ") == 2
    assert "waiting for env hosts" in said
    assert swapper.joining is not None
    swapper.joining.send_signal(signal.SIGINT)
    told, _ = swapper.joining.communicate(timeout=60)
    assert swapper.joining.returncode == 0
    assert "1 env workers of runs are here" in told
    assert told.splitlines()[-1].endswith(f"left {two_nodes.address}")
