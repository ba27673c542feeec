"""The commands between hosts: they share no memory, no disk and no name, and each has a second network."""

import json
from subprocess import PIPE, STDOUT

import pytest

from tests import ROOT
from tests.hosts.network import Host, Network
from tests.hosts.ray_hosts import start_ray, trust
from vla_rl.commands.chaos.training_run import ledger
from vla_rl.commands.checkpoints import Checkpoints
from vla_rl.observability.metrics_file import read_records

pytestmark = [pytest.mark.slow, pytest.mark.alone]
_SMALL = (
    *(f"policy.checkpoint={ROOT}/checkpoints/tabletop_reach", "log.name=run", "train.iterations=2"),
    *("train.batch_episodes=8", "train.eval_every=0", "train.eval_episodes=4", "algo.minibatches=1"),
    *("placement.nodes=2", "placement.env_workers=2", "placement.envs_per_worker=4"),
)


@pytest.fixture(scope="module")
def cluster(network: Network) -> tuple[Host, Host, str]:
    """Two hosts, and the address of their Ray cluster."""
    first, second = network.host("first"), network.host("second")
    return first, second, start_ray(first, [second])


def test_the_doctor_sees_a_slow_link_and_a_machine_that_has_not_joined(
    network: Network, cluster: tuple[Host, Host, str]
) -> None:
    first, second, address = cluster
    second.shape(round_trip_ms=50, mbit=100)
    said = first.run("vla-rl", "doctor", "--cluster", address, "--json", "report.json")
    second.shape()
    assert "a long way to the head" in said
    head, other = json.loads(first.path("/tmp/report.json").read_text())["nodes"]
    assert (head["name"], other["name"]) == ("first", "second")
    assert other["address"] == second.address
    assert other["facts"]["interface"] == "eth0"
    assert 0.05 <= other["link"]["round_trip_s"] < 0.08
    assert abs(other["link"]["clock_s"]) <= other["link"]["clock_error_s"], "it is the same clock"
    for rate in (other["link"]["to_head"], other["link"]["from_head"]):
        assert 20e6 / 8 < rate < 100e6 / 8

    outside = network.host("outside")
    trust(first, outside)
    refused = outside.start("vla-rl", "doctor", "--cluster", address, stdout=PIPE, stderr=STDOUT)
    said, _ = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert "no Ray node runs here" in said
    outside.kill()


def test_a_run_over_two_hosts(cluster: tuple[Host, Host, str]) -> None:
    first, second, address = cluster
    said = first.run(
        *("vla-rl", "train", str(ROOT / "configs/tabletop.yaml"), *_SMALL, f"placement.ray_address={address}"),
        timeout=200,
    )
    run = first.path("/tmp/runs/run")
    metrics = read_records(run / "metrics.jsonl")
    assert [record["iteration"] for record in metrics] == [0, 1, 2], said
    assert metrics[-1]["episodes/trained"] == 16
    assert metrics[-1]["restarts_of_run"] == 0, said
    for record in metrics:
        assert ledger(record)["missing"] == 0
    newest = Checkpoints(run / "checkpoints", 9).newest()
    ranks = [path.name[:6] for path in sorted((newest / "learner/state").iterdir())]
    assert ranks == ["0-of-2", "1-of-2"], "also that of the other host"
    assert not second.path("/tmp/runs").exists()
