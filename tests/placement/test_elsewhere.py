"""vla_rl.placement.elsewhere: plans for machines that are not here, and for nodes that are not alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envs import env_spec
from tests import ROOT
from tests.placement.test_memory import LIBERO
from vla_rl.cluster.cluster import Cluster
from vla_rl.commands.cli import main
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.gpus import Gpu
from vla_rl.core.machine import GIB, Machine
from vla_rl.placement.cost_model import bound
from vla_rl.placement.elsewhere import parse_machines
from vla_rl.placement.explanation import bottleneck, chunks_per_s, costs_text
from vla_rl.placement.plan import Plan
from vla_rl.placement.planner import search_by_profile, with_env_workers, workload_of
from vla_rl.placement.processes import make_plan
from vla_rl.placement.profile import LinearCost, Memory, Profile, load_profile, save_profile
from vla_rl.placement.resources import Link, Node, Resources, homes
from vla_rl.placement.search import candidate_of
from vla_rl.placement.simulation import SimulatedRun
from vla_rl.placement.workload import Workload
from vla_rl.replay.rules import StoreRules

RECIPE = str(ROOT / "configs/recipes/openvla_oft_lora_1gpu.yaml")
ON = "1x8xH100:64cpu+20x32cpu"
PLANNED_ONLY = "planned only: this version runs on nodes with equally many devices"
COSTS = Profile(
    name="made up",
    gpu="H100",
    simulator_on="cores",
    simulate=LinearCost(each=0.1),
    render=LinearCost(each=0.0),
    reset=0.0,
    infer=LinearCost(each=0.01),
    train=LinearCost(each=0.001),
    weight_sync=0.0,
    mean_length=1.0,
    memory=Memory(device=80, weights=1, trained=1),
)


def run_config(**placement: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "env": {"name": "workload", "max_episode_steps": 16},
            "policy": {"name": "openvla_oft", "size": "nano", "chunk_size": 4},
            "algo": {"name": "ppo", "minibatches": 2},
            "train": {"batch_episodes": 32, "max_staleness": 2},
            "learner": {"micro_batch": 8},
            "placement": {"mode": "pipelined", "envs_per_worker": 2, "max_wait_ms": 1} | placement,
        }
    )


# --- nodes ----------------------------------------------------------------------------------------------------------


def test_alike_nodes_are_a_list_of_equal_ones() -> None:
    assert Resources(16, 8, "cuda", nodes=2) == Resources.on((Node(8, 4),) * 2, "cuda")
    assert homes(Resources(16, 8, "cuda", nodes=2).machines) == tuple(d % 2 for d in range(8))


def test_unlike_nodes_take_turns_as_long_as_they_have_devices() -> None:
    machines = (Node(8, 3), Node(8, 1), Node(4, 0))
    plan = make_plan(run_config(mode="collocated", env_workers=3), Resources.on(machines, "cuda"))
    assert [plan.node_of(d) for d in range(4)] == [0, 1, 0, 0]
    assert [plan.local_device(d) for d in range(4)] == [0, 0, 1, 2]
    assert [server.node for server in plan.servers] == [0, 1, 0], "each of three env workers asks one"


def test_env_workers_are_remote_only_where_no_core_is_left() -> None:
    machines = (Node(8, 2), Node(4, 0), Node(4, 0))
    plan = make_plan(run_config(env_workers=12), Resources.on(machines, "cuda"))
    assert [worker.node for worker in plan.workers] == [0] * 6 + [1] * 4 + [2] * 2, "two cores are for the devices"
    assert plan.remote == plan.workers[6:]
    fair = make_plan(run_config(env_workers=16, mode="collocated"), Resources.on(machines, "cuda"))
    assert [len(fair.workers_of(server)) for server in (0, 1)] == [8, 8]
    unlike = Resources.on((Node(4, 1), Node(12, 1), Node(4, 0)), "cuda")
    spread = make_plan(run_config(env_workers=14, mode="collocated"), unlike)
    assert [sum(w.node == node for w in spread.workers) for node in range(3)] == [2, 10, 2]
    alone = make_plan(run_config(env_workers=12), Resources.on(machines[:1], "cuda"))
    assert {worker.node for worker in alone.workers} == {0}
    assert not alone.remote, "without such nodes they share the cores, as before"


def test_what_cannot_run_yet_is_refused() -> None:
    config = run_config(env_workers=12)
    spec = env_spec(config.env)
    plan = make_plan(config, Resources.on((Node(8, 2), Node(8, 1)), "cuda"))
    with pytest.raises(UserError, match=rf"^{PLANNED_ONLY}; use alike nodes with devices, and others for env workers"):
        Cluster(config, plan, spec, StoreRules.of(config, spec))
    for machines in (Resources(16, 4, "cuda", nodes=2), Resources.on((Node(8, 2), Node(8, 0)), "cuda")):
        assert make_plan(config, machines).planned_only is None


# --- what remote env workers cost -----------------------------------------------------------------------------------


def remote_plan(link: Link, **placement: Any) -> tuple[Plan, Workload]:
    """All env workers are remote: the first node's cores are for its devices."""
    config = run_config(**placement)
    machines = (Node(2, 2, link=link), Node(8, 0, link=link), Node(8, 0, link=link))
    plan = make_plan(config, Resources.on(machines, "cuda"))
    assert plan.remote == plan.workers
    return plan, replace(Workload.of(config, horizon=16, spread=0.0), row_bytes=10_000)


def seconds(plan: Plan, workload: Workload, costs: Profile = COSTS) -> float:
    """Per super-batch of 128 chunks."""
    return 1 / SimulatedRun(plan, costs, workload).run(4, 4).batches_per_s


def test_a_request_waits_for_the_links_delay_twice() -> None:
    plan, workload = remote_plan(Link(delay=0.5), env_workers=1, envs_per_worker=1)
    assert seconds(plan, workload) == pytest.approx(128 * (0.1 + 0.5 + 0.01 + 0.5), rel=0.03)


def test_a_slow_link_is_the_bottleneck() -> None:
    """Each observation crosses the first node's link twice: to inference, and with its trajectory to the store."""
    plan, workload = remote_plan(Link(rate=1e6), env_workers=16)
    least = bound(plan, COSTS, workload)
    assert (least.limit, least.seconds) == ("link of node 0", pytest.approx(128 * 2 * 10_000 / 1e6))
    assert 0.95 * least.seconds < seconds(plan, workload) < 1.2 * least.seconds


def test_remote_env_workers_draw_on_their_cores() -> None:
    slow = COSTS.model_copy(update={"render_on_cores": LinearCost(each=0.3)})
    plan, workload = remote_plan(Link(), env_workers=2)
    assert bound(plan, slow, workload).use["remote cores"] == pytest.approx(128 * 0.4 / 2)
    assert seconds(plan, workload, slow) == pytest.approx(128 * 0.4 / 2, rel=0.05)
    mixed = make_plan(run_config(env_workers=2), Resources.on((Node(3, 2), Node(1, 0)), "cuda"))
    least = bound(mixed, slow, workload)  # in T seconds: T / 0.1 + T / 0.4 chunks
    assert least.use["cores"] == pytest.approx(128 / (1 / 0.1 + 1 / 0.4), rel=1e-6)
    assert least.use["remote cores"] == pytest.approx(least.use["cores"], rel=1e-6), "the faster one plays more"


def test_hosts_raise_the_rate_until_inference_is_the_bottleneck(tmp_path: Path) -> None:
    """The first node's cores play 40 chunks/s, each host 40 more, and inference answers 100."""
    save_profile(COSTS, tmp_path / "profile.yaml")
    config = run_config(profile=str(tmp_path / "profile.yaml"))
    spec, machine = env_spec(config.env), Machine(8, 64 * GIB, (Gpu("H100", 80 * GIB),) * 2)
    rates, limits, workers = [], [], []
    for hosts in range(6):
        resources = Resources.on((Node(8, 2), *(Node(4, 0),) * hosts), "cuda")
        sized = with_env_workers(config, spec, machine, resources)
        best = search_by_profile(sized, spec, machine, resources)[0]
        workload = workload_of(sized, spec, COSTS)
        rates.append(chunks_per_s(best, workload))
        limits.append(bottleneck(best, workload))
        workers.append(sized.placement.env_workers)
    assert workers == [4, 8, 12, 16, 16, 16], "cores are in use for 80 % of the time at most"
    assert rates[0] == pytest.approx(40, rel=0.06)
    assert 1.5 * rates[0] < rates[1] < 80, "on some cores, workers wait for batches of inference"
    assert 1.2 * rates[1] < rates[2] <= 1.01 * rates[3]
    assert rates[3] == pytest.approx(100, rel=0.02)
    assert rates[4:] == rates[3:4] * 2, "and not further"
    assert all(limit.startswith("bottleneck: simulation on the cores of nodes with inference") for limit in limits[:2])
    assert all(limit.startswith("bottleneck: inference on device 0, in use for 100 %") for limit in limits[2:])


def test_the_bottleneck_of_a_plan_in_which_nothing_is_always_in_use() -> None:
    config = run_config(env_workers=60)
    plan, workload = make_plan(config, Resources(64, 2, "virtual")), Workload.of(config, horizon=16, spread=0.0)
    slow = replace(candidate_of(plan, COSTS, workload), simulated=2 * 1.28)
    text = (
        "bottleneck: the bound on staleness, which lets 96 of 120 environments play at once; raise train.batch_episodes"
    )
    assert bottleneck(slow, workload).startswith(text)
    later = replace(workload, max_staleness=3)
    text = "bottleneck: none alone; inference on device 0, the busiest, is in use for 50 % of the time"
    assert bottleneck(slow, later) == text


def test_costs_that_nobody_has_measured_are_named() -> None:
    shipped = {
        gpu: load_profile(ROOT / f"configs/profiles/libero_openvla_oft_{gpu}.yaml") for gpu in ("lora_h200", "h100")
    }
    assert shipped["lora_h200"].assumed == (), "by its sources"
    assert shipped["h100"].assumed == ("render", "infer", "train", "step", "weight_sync", "onload", "offload")
    own = COSTS.model_copy(update={"sources": {"simulate": "the run x, 12 calls", "infer": "measured here"}})
    near, (remote, _) = make_plan(run_config(), Resources(8, 2, "virtual")), remote_plan(Link())
    assert costs_text(own, near) == "costs: made up; assumed, not measured: train"
    assert costs_text(own, remote).endswith("train, render_on_cores, as render")


# --- vla-rl plan --on -----------------------------------------------------------------------------------------------


def plan_on(machines: str, *arguments: str) -> int:
    return main(["plan", RECIPE, "--on", machines, *arguments])


@pytest.fixture(autouse=True)
def _without_libero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_rl.placement.elsewhere.env_spec", lambda env: LIBERO)


def test_a_term_is_a_kind_of_node() -> None:
    gpus, hosts = parse_machines("16x64cpu:100gbit:0.1ms + 2x8xh100:128cpu:2000gib")
    assert (gpus.count, gpus.gpu, gpus.node) == (2, "h100", Node(128, 8, 2000.0, Link()))
    assert (hosts.count, hosts.gpu, hosts.node) == (16, None, Node(64, 0, 512.0, Link(12.5e9, 1e-4)))
    assert (gpus.assumed, hosts.assumed) == ({"gbit", "ms"}, {"gib"})
    assert [kind.count for kind in parse_machines("8xH100")] == [1]
    assert parse_machines("1xH200")[0].node.cores == 16


@pytest.mark.parametrize(
    ("machines", "problem"),
    [
        ("", "'' is neither GPUS x KIND nor CORES cpu"),
        ("8x", "'8x' is neither"),
        ("H100", "'H100' is neither"),
        ("8xH100:many", "'8xH100:many' is neither"),
        ("8xH100+", "'' is neither"),
        ("0x8xH100", "'0x8xH100' has a 0"),
        ("8xH100+16x0cpu", "'16x0cpu' has a 0"),
        ("8xH100:8cpu:9cpu", "gives cpu twice"),
        ("16x64cpu", "none of these nodes has a GPU"),
        ("8xH100+1xH200", "these are H100 and H200"),
        ("5000x8xH100", "more than 1000 nodes or GPUs"),
    ],
)
def test_what_cannot_be_read_is_refused_with_an_example(machines: str, problem: str, capsys: Any) -> None:
    assert plan_on(machines) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert problem in shown
    assert f"--on {machines}: " in shown
    assert "write such as 2x8xH100:128cpu+16x64cpu" in shown


def test_gpus_without_a_profile_are_refused_with_those_that_have_one(capsys: Any) -> None:
    assert plan_on("8xA100") == 2
    assert "there is no profile of A100, only of H100, H200; measure one with" in capsys.readouterr().err
    assert plan_on("8xH200", "env.implementation=reference") == 2
    assert "libero_openvla_oft_lora_h200 is for env.name=libero env.implementation=fast" in capsys.readouterr().err
    other = str(ROOT / "configs/profiles/libero_openvla_oft_h100.yaml")
    assert plan_on("8xH200", f"placement.profile={other}") == 2
    assert "is of H100, not of H200; set it to null" in capsys.readouterr().err


def test_an_own_profile_names_its_gpu_or_is_said_to_be_assumed(tmp_path: Path, capsys: Any) -> None:
    ours = load_profile(ROOT / "configs/profiles/libero_openvla_oft_lora_h200.yaml")
    save_profile(ours.model_copy(update={"gpu": None}), tmp_path / "ours.yaml")
    small = ["train.batch_episodes=8", f"placement.profile={tmp_path / 'ours.yaml'}"]
    assert plan_on("1xA100", *small) == 0
    assert "does not name its GPU: A100 (assumed)" in " ".join(capsys.readouterr().out.split())


def test_a_plan_for_gpus_and_hosts_is_found_and_explained(tmp_path: Path, capsys: Any) -> None:
    """By the shipped profile, the cores beside the GPUs suffice, and the plan says so."""
    assert plan_on(ON, "train.batch_episodes=16", "--json", str(tmp_path / "plan.json")) == 0
    record, shown = json.loads((tmp_path / "plan.json").read_text()), " ".join(capsys.readouterr().out.split())
    assert {process["node"] for process in record["plan"]} == {0}
    assert "1 x 8 H100 of 80 GiB, 64 cores, 512 GiB of main memory (assumed)" in shown
    assert "assumed, not measured: render, infer, train" in shown
    assert "not used: nodes 1-20" in shown
    assert f"predicted: {record['chunks_per_s']:.3g} chunks/s" in shown
    assert record["bottleneck"] in shown
    assert PLANNED_ONLY not in shown


def test_hosts_that_make_a_run_slower_are_left_out(tmp_path: Path, capsys: Any) -> None:
    """Few environments may play at once, and those of hosts without a GPU are slower."""
    file, chunks = tmp_path / "plan.json", []
    for machines in ("1xH200:16cpu", "1xH200:16cpu+4x64cpu"):
        assert main(["plan", "libero_ppo", "--on", machines, "--json", str(file)]) == 0
        chunks.append(json.loads(file.read_text())["chunks_per_s"])
    assert chunks[0] == chunks[1]
    assert "not used: nodes 1-4" in " ".join(capsys.readouterr().out.split())


def test_a_plan_says_which_env_workers_are_remote(tmp_path: Path, capsys: Any) -> None:
    many = ["train.batch_episodes=16", "placement.mode=collocated", "placement.env_workers=200"]
    assert plan_on(ON, *many, "--json", str(tmp_path / "plan.json")) == 0
    record, shown = json.loads((tmp_path / "plan.json").read_text()), " ".join(capsys.readouterr().out.split())
    workers = [process for process in record["plan"] if process["role"] == "env worker"]
    assert [sum(w["node"] == node for w in workers) for node in range(7)] == [48, 32, 32, 32, 32, 24, 0]
    assert all(w["remote"] == (w["node"] > 0) for w in workers)
    assert "env worker, remote" in shown
    assert "cores of nodes 1-5" in shown
    assert "main memory of nodes 1-4: env workers 3.1" in shown
    assert shown.endswith("env workers of nodes 1-5 ask over the network (placement.nodes=1 placement.env_hosts=20)")
    assert PLANNED_ONLY not in shown
