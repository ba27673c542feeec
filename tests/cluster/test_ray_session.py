"""Runs over several nodes of a Ray cluster. Here all of them are on one machine, each with its own Ray node, shared
folder, locks and weights, as they would be apart."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import ray

from tests.cluster.ray_nodes import NODE, RayNodes, two_ray_nodes
from vla_rl.cluster import gpu_claims, ray_session
from vla_rl.cluster.gpu_claims import GpuClaim
from vla_rl.cluster.node import Node
from vla_rl.commands.chaos.training_run import ledger
from vla_rl.commands.checkpoints import Checkpoints, read_state
from vla_rl.commands.train import run_training, train
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.ipc.shared_memory import shared_root
from vla_rl.core.machine import Machine
from vla_rl.observability.callbacks import Callback
from vla_rl.placement.layouts import layouts
from vla_rl.placement.plan import PlanError
from vla_rl.placement.processes import make_plan
from vla_rl.placement.resources import ENV_HOST, Resources


def _config(**placement) -> RunConfig:
    return RunConfig.model_validate(
        {
            "env": {"name": "workload", "image_size": 48, "max_episode_steps": 16, "length_spread": 0.5},
            "policy": {"name": "openvla_oft", "size": "nano"},
            "train": {"iterations": 3, "batch_episodes": 8, "eval_episodes": 4, "eval_every": 0, "max_staleness": 0}
            | {"checkpoint_every": 1},
            "algo": {"name": "ppo", "minibatches": 1},
            "placement": {"env_workers": 2, "envs_per_worker": 2, "nodes": 2, "ray_address": "auto"} | placement,
        }
    )


# --- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["collocated", "pipelined", "hybrid"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_every_node_has_its_part_of_every_role(mode: str, kind: str) -> None:
    plan = make_plan(_config(mode=mode, env_workers=8), Resources(16, 8 if kind == "cuda" else 16, kind, nodes=2))
    for processes in (plan.workers, plan.servers, plan.learners):
        nodes = [p.node for p in processes]
        assert nodes.count(0) == nodes.count(1) > 0
    for process in (*plan.servers, *plan.learners):
        assert {d % 2 for d in process.devices} == {process.node}
        assert plan.local_devices(process) == tuple(d // 2 for d in process.devices)
    for server in plan.servers:
        asking = plan.workers_of(server.index)
        assert len(asking) == len(plan.workers) / len(plan.servers)
        assert {plan.workers[w].node for w in asking} == {server.node}, "they share memory"
    for lock in plan.locks:
        users = [p for p in (*plan.servers, *plan.learners) if p.lock == lock]
        assert len({p.node for p in users}) == 1, "a lock is known on one node"


def test_simulators_on_devices_ask_servers_of_their_node() -> None:
    config = _config()
    config = config.model_copy(update={"env": config.env.model_copy(update={"on_devices": True})})
    resources = Resources(16, 8, "cuda", nodes=2)
    refused = []
    for layout in layouts(8, True):
        try:
            plan = make_plan(config, resources, layout)
        except PlanError as error:
            refused.append((layout, error.text))
            continue
        for worker in plan.workers:
            assert plan.servers[plan.server_of(worker.index)].node == worker.node == worker.devices[0] % 2
    assert refused
    for layout, text in refused:
        assert "without an inference server" in text
        assert len(layout.inference) == 1


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[RayNodes]:
    """One of them does not outlive the last test."""
    notices = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}  # a lost node; sooner than usual
    with two_ray_nodes(_system_config=notices) as nodes:
        yield nodes


class NodeKiller(Callback):
    """Takes the second node away after an iteration. Another one has joined, but Ray believes in both for a while."""

    def __init__(self, nodes: RayNodes, iteration: int) -> None:
        self.nodes, self.iteration = nodes, iteration

    def on_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if iteration == self.iteration:
            (victim,) = self.nodes.worker_nodes
            self.nodes.add_node(**NODE)
            self.nodes.remove_node(victim, allow_graceful=False)
            self.iteration = -1  # once: the run goes back


class NodeWithADisk(Node):
    """Sees nothing of what other nodes write: its disk is its own."""

    def stamp(self, path: Path) -> tuple[int, int]:
        return os.getpid(), 0

    def read_part(self, path: Path, start: int, count: int) -> bytes:
        assert any(place in path.parents for place in self._places)
        return super().read_part(path, start, count)


@pytest.mark.slow
@pytest.mark.alone
def test_two_runs_do_not_take_the_same_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray counts what it is told to have; here these are no real GPUs."""
    monkeypatch.setattr(gpu_claims, "_TIMEOUT_S", 15.0)
    ray.init(address="local", num_cpus=0, num_gpus=3, include_dashboard=False, object_store_memory=80 << 20)
    try:
        placed = {"num_cpus": 0, "num_gpus": 0}
        first, second = GpuClaim.make(placed, 2), GpuClaim.make(placed, 1)
        assert sorted(first.entries + second.entries) == ["0", "1", "2"]
        monkeypatch.setattr(gpu_claims, "_TIMEOUT_S", 3.0)
        with pytest.raises(UserError, match="needs 1 GPUs of each node, and the whole cluster has 0"):
            GpuClaim.make(placed, 1)
    finally:
        ray.shutdown()


def test_a_node_that_is_still_starting_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    here, gone, joined, host = ({"Alive": alive, "Resources": {}} for alive in (True, False, True, True))
    host["Resources"] = {ENV_HOST: 1.0}  # it will only simulate
    answers = iter([[here], [here, gone], [here, host], [here, gone, joined]])
    monkeypatch.setattr(ray, "nodes", lambda: next(answers))
    ray_session._wait_for_nodes(2)
    assert next(answers, None) is None


@pytest.mark.slow
@pytest.mark.alone
def test_a_cluster_that_is_not_as_configured_is_refused(
    two_nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_session, "_JOIN_TIMEOUT_S", 1.0)
    before = set(shared_root().iterdir())
    placed = {"ray_address": two_nodes.address, "nodes": 3, "env_workers": 3}
    config = _config(**placed).with_values({"log.dir": str(tmp_path), "log.name": "run"})
    with pytest.raises(UserError, match=r"placement\.nodes=3: the Ray cluster has 2 alive; use at most that many"):
        train(config)
    _nothing_is_left(before)


@pytest.mark.slow
@pytest.mark.alone
def test_a_run_over_two_nodes_one_of_which_is_lost(
    two_nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes share no disk: checkpoints are brought together on the driver's, and carried to the node that joins."""
    monkeypatch.setattr(ray_session, "Node", NodeWithADisk)
    before = set(shared_root().iterdir())
    config = _config(ray_address=two_nodes.address).with_values({"log.dir": str(tmp_path), "log.name": "run"})
    assert len(make_plan(config, Resources.of(Machine.detect(), config)).learners) == 2
    result = run_training(config, callbacks=[NodeKiller(two_nodes, 2)])
    metrics = result.metrics
    assert [m["iteration"] for m in metrics] == [0, 1, 2, 3]
    assert (metrics[1]["restarts_of_run"], metrics[-1]["restarts_of_run"]) == (0, 1)
    for m in metrics:
        assert ledger(m)["missing"] == 0
    assert metrics[-1]["episodes/trained"] == 24
    for m in metrics[1:]:
        assert 1 < m["learner/ratio_max"] + 1e-3 < 1.002, "both nodes acted with the weights of the learner"
    evaluation = json.loads((tmp_path / "run/evaluations/000003-greedy.json").read_text())
    assert evaluation["policy_versions"] == [3], "on both nodes"
    newest = Checkpoints(tmp_path / "run/checkpoints", 9).newest()
    assert newest.name == "000003"
    assert [path.name[:6] for path in sorted((newest / "learner/state").iterdir())] == ["0-of-2", "1-of-2"]
    assert read_state(newest)["policy_version"] == 3, "all parts are as they were written"
    _nothing_is_left(before)


def _nothing_is_left(before: set[Path]) -> None:
    """In shared memory; the other node's processes end a moment after the driver has left."""
    deadline = time.monotonic() + 20
    while left := set(shared_root().glob("vla_rl-*")) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
