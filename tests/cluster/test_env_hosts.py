"""A run whose env workers are on a Ray node without an inference server. Here both nodes are on one machine, each with
its own shared folder, as they would be apart."""

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster as RayNodes

from envs import env_spec
from tests.metrics_page import undocumented
from vla_rl.cluster import ray_session
from vla_rl.cluster.launcher import Launcher
from vla_rl.commands.chaos.training_run import ledger
from vla_rl.commands.train import run_training
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.gpus import Gpu
from vla_rl.core.machine import GIB, Machine
from vla_rl.observability.callbacks import Callback
from vla_rl.placement.plan import make_plan
from vla_rl.placement.resources import Node, Resources


@pytest.fixture
def two_nodes() -> Iterator[RayNodes]:
    nodes = RayNodes(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 200 << 20})
    try:
        nodes.add_node(num_cpus=0, object_store_memory=200 << 20)
        yield nodes
    finally:
        nodes.shutdown()


def _ray_nodes(**gpus: int) -> list[dict[str, Any]]:
    return [
        {"NodeID": name, "Alive": True, "Resources": {"GPU": count} if count else {}, "NodeManagerHostname": name}
        for name, count in gpus.items()
    ]


def _names(wanted: int, env_hosts: int) -> list[str]:
    return [node["NodeID"] for node in ray_session._nodes(wanted, env_hosts)]


def test_nodes_with_the_fewest_gpus_only_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "head"))
    monkeypatch.setattr(Machine, "detect", lambda: Machine(8, GIB, (Gpu("H100", 80 * GIB),) * 2))
    monkeypatch.setattr(ray, "nodes", lambda: _ray_nodes(a=0, b=2, c=1, d=0, head=2))
    assert _names(2, 2) == ["head", "b", "a", "d"]
    assert _names(2, 3) == ["head", "b", "c", "a", "d"]
    assert _names(1, 0) == ["head"]
    with pytest.raises(UserError, match=r"placement\.nodes=3: c has 1 GPUs, this machine 2"):
        _names(3, 1)
    with pytest.raises(UserError, match=r"placement\.nodes=2 placement\.env_hosts=4: the Ray cluster has 5 alive"):
        _names(2, 4)


def test_rows_of_remote_workers_are_where_their_gateway_looks(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"placement": {"env_workers": 13, "mode": "collocated", "envs_per_worker": 2}})
    plan = make_plan(config, Resources.on((Node(8, 2), Node(4, 0), Node(4, 0)), "cuda"))
    session: Any = SimpleNamespace(folder=lambda node: tmp_path / str(node))
    launch = Launcher(config, env_spec(config.env), plan, session)
    pools = [
        pool for node, of_node in launch.pools().items() for pool in of_node if pool.folder == str(tmp_path / str(node))
    ]
    assert all(pool.folder == str(tmp_path / str(node)) for node, of_node in launch.pools().items() for pool in of_node)
    assert len(pools) == len({pool.memory for pool in pools}) == 2 + 2 * 2
    assert sum(pool.workers for pool in pools) == len(plan.workers) + len(plan.remote)
    seats = dict[Path, set[int]]()
    for worker in plan.workers:
        pool, position = launch.seat(worker)
        assert pool in pools
        assert pool.folder == str(tmp_path / str(worker.node))
        assert position not in pool.guests
        seats.setdefault(pool.memory, set()).add(position)
    assert sum(map(len, seats.values())) == len(plan.workers), "none has another's rows"
    for server in (0, 1):
        home, guests = launch.pool(server), plan.guests_of(server)
        assert list(home.guests) == list(range(home.workers))[-sum(map(len, guests.values())) :]
        rows = iter(home.guests)
        for node, workers in guests.items():  # as ``GatewayProcess.listen`` is told
            for position, worker in enumerate(workers):
                assert launch.seat(plan.workers[worker]) == (launch.guest_pools(node)[server], position)
                assert plan.workers_of(server)[next(rows)] == worker


class LinkKiller(Callback):
    """Kills the gateway and the relay after the first iteration."""

    def __init__(self) -> None:
        self.killed: list[str] = []

    def on_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if iteration != 1:
            return
        for process in psutil.Process().children(recursive=True):
            title = " ".join(process.cmdline())
            for name in ("GatewayProcess", "RequestRelayProcess"):
                if name in title and name not in self.killed:
                    os.kill(process.pid, signal.SIGKILL)
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
    assert 0 < metrics[1]["network/latency_ms"] < 1000
    assert last["network/dropped"] == 0
    for m in metrics[1:]:
        assert 1 < m["learner/ratio_max"] + 1e-3 < 1.002, "they acted with the weights of the learner"
    assert {path.stem for path in (tmp_path / "run/trace").iterdir()} >= {"gateway 0", "request relay 0"}
