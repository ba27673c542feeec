"""vla_rl.placement.plan: every device is used as the mode says, and what cannot be planned explains itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.config.run_config import RunConfig
from vla_rl.core.gpus import Gpu
from vla_rl.core.machine import GIB, Machine
from vla_rl.placement.layouts import choose_layout, layouts
from vla_rl.placement.plan import Layout, Plan, PlanError
from vla_rl.placement.processes import make_plan
from vla_rl.placement.resources import Resources


def config(run: str = "async", learner: dict[str, Any] | None = None, **placement: Any) -> RunConfig:
    return RunConfig.model_validate({"mode": run, "placement": placement, "learner": learner or {}})


def gpus(count: int) -> Resources:
    return Resources(cores=32, devices=count, kind="cuda")


def cores(count: int) -> Resources:
    return Resources(cores=count, devices=count, kind="cpu")


@given(devices=st.integers(1, 9), on_devices=st.booleans())
def test_layouts_are_what_the_modes_say(devices: int, on_devices: bool) -> None:
    found = list(layouts(devices, on_devices))
    assert len(set(found)) == len(found)
    everything = set(range(devices))
    for layout in found:
        roles = [set(layout.simulators), set(layout.inference), set(layout.learner)]
        assert set.union(*roles) == everything, "no device is left idle"
        assert roles[1], roles[2]
        assert bool(roles[0]) == on_devices
        match layout.mode:
            case "collocated":
                assert roles[1] == roles[2] == everything
            case "pipelined":
                assert layout.shared == frozenset()
            case "hybrid":
                assert roles[2] == everything
                assert not roles[0] & roles[1]
    splits = devices - 1
    pipelined = splits * (splits - 1) // 2 if on_devices else splits
    assert len(found) == 1 + pipelined + splits, "the split 1+1 and all others"
    for mode in ("collocated", "pipelined", "hybrid"):
        assert list(layouts(devices, on_devices, mode)) == [x for x in found if x.mode == mode]


@pytest.mark.parametrize(
    ("devices", "mode", "expected"),
    [
        (1, "auto", "collocated"),
        (2, "auto", "pipelined 1+1"),
        (8, "auto", "pipelined 4+4"),
        (8, "pipelined", "pipelined 4+4"),
        (8, "hybrid", "hybrid 4+8"),
        (8, "collocated", "collocated"),
    ],
)
def test_what_is_chosen_without_a_profile(devices: int, mode: str, expected: str) -> None:
    layout = choose_layout(config(mode=mode), gpus(devices))
    assert layout.describe() == expected


def test_a_process_on_every_gpu_that_a_role_uses() -> None:
    plan = make_plan(config(mode="hybrid", inference_devices=1), gpus(3))
    assert [p.devices for p in plan.servers] == [(0,)]
    assert [p.devices for p in plan.learners] == [(0,), (1,), (2,)]
    assert [p.lock for p in plan.learners] == ["device 0", None, None]
    assert [p.lock for p in plan.servers] == ["device 0"]
    assert plan.locks == ["device 0"]
    assert {p.torch_device for p in (*plan.servers, *plan.learners)} == {"cuda"}
    assert {p.torch_device for p in plan.workers} == {"cpu"}
    collocated = make_plan(config(mode="collocated"), gpus(2))
    assert collocated.locks == ["device 0", "device 1"]
    assert make_plan(config(mode="pipelined"), gpus(4)).locks == []


def test_on_cores_a_role_has_one_process_with_a_thread_for_each() -> None:
    plan = make_plan(config(mode="pipelined", env_workers=2), cores(8))
    assert [(p.threads, p.lock) for p in (*plan.servers, *plan.learners)] == [(3, None), (3, None)]
    plan = make_plan(config(mode="collocated", env_workers=2), cores(8))
    assert [(p.threads, p.lock) for p in (*plan.servers, *plan.learners)] == [(6, "cores of node 0")] * 2
    small = make_plan(config(), cores(2))
    assert small.layout.describe() == "pipelined 1+1"
    assert [p.threads for p in (*small.servers, *small.learners)] == [1, 1]
    assert make_plan(config(learner={"ranks": 2, "threads": 3}), cores(8)).learners[1].threads == 3
    assert make_plan(config(), cores(1)).layout.mode == "collocated"


def test_envs_splits_and_evaluation() -> None:
    plan = make_plan(config(env_workers=3, envs_per_worker=5), cores(4))
    assert (len(plan.workers), plan.envs_per_worker, plan.splits) == (3, 5, 5)
    assert make_plan(config("sync"), cores(4)).splits == 1
    assert make_plan(config(), cores(4), training=False).learners == ()
    plan = make_plan(config(env_workers=3), gpus(4))
    assert [plan.server_of(w) for w in range(3)] == [0, 1, 0]
    assert plan.workers_of(0) == [0, 2]


@pytest.mark.parametrize(
    ("placement", "resources", "text"),
    [
        ({"mode": "pipelined"}, gpus(1), "divides devices among inference and learner and needs 2, there is 1"),
        ({"mode": "hybrid"}, gpus(1), "needs 2, there is 1; use collocated"),
        ({"devices": 9}, gpus(8), "placement.devices: there are 8 (cuda)"),
        ({"mode": "pipelined", "inference_devices": 4}, gpus(4), "cannot divide 4 devices among inference and learner"),
        ({"mode": "pipelined", "simulator_devices": 1}, gpus(4), "simulator_devices=1"),
        ({"mode": "pipelined", "offload": "always"}, gpus(4), "this plan (pipelined 2+2) has none; use auto, or"),
    ],
)
def test_impossible_plans_explain_themselves(placement: dict[str, Any], resources: Resources, text: str) -> None:
    with pytest.raises(PlanError) as error:
        make_plan(config(**placement), resources)
    assert text in str(error.value)


def test_offloading_is_for_shared_devices() -> None:
    plan = make_plan(config(offload="always"), gpus(4))
    assert (plan.offload, plan.layout.mode) == (True, "collocated")
    assert make_plan(config(offload="always", mode="hybrid"), gpus(4)).offload
    assert make_plan(config(offload="always"), cores(4)).offload, "useless there, but it can be tested"
    assert not make_plan(config(mode="collocated"), gpus(4)).offload, "auto, without a profile"
    assert not make_plan(config(offload="always"), gpus(4), training=False).offload


def test_ranks_that_would_wait_for_each_other_are_refused() -> None:
    with pytest.raises(PlanError, match=r"learner\.ranks: 2 processes would wait for each other"):
        make_plan(config(learner={"ranks": 2}, mode="collocated"), cores(4))
    text = r"learner\.ranks: a plan \(collocated\) has one on each of the learner's 2 GPUs"
    with pytest.raises(PlanError, match=text):
        make_plan(config(learner={"ranks": 3}, mode="collocated"), gpus(2))


def test_a_layout_describes_its_sharing() -> None:
    layout = Layout("hybrid", (0, 1), (2,), (0, 1, 2))
    assert layout.shared == {0, 1, 2}
    assert layout.describe() == "hybrid 2+1+3"


def with_hosts(gpus: int, cpus: int, **placement: Any) -> Plan:
    """The plan of one such machine and of hosts that only simulate."""
    machine = Machine(cpus, 64 * GIB, (Gpu("H100", 80 * GIB),) * gpus)
    run = config(ray_address="auto", **placement)
    return make_plan(run, Resources.of(machine, run))


def test_hosts_without_a_server_take_the_env_workers_that_have_no_core() -> None:
    plan = with_hosts(2, 8, env_workers=12, env_hosts=2, env_host_cores=4, mode="collocated")
    assert [machine.devices for machine in plan.machines] == [2, 0, 0]
    assert [w.node for w in plan.workers] == [0] * 4 + [1] * 4 + [2] * 4
    assert [len(plan.workers_of(server)) for server in (0, 1)] == [6, 6]
    assert plan.guests_of(0) == {1: [4, 6], 2: [8, 10]}
    assert plan.workers_of(0) == [0, 2, 4, 6, 8, 10], "rows of guests follow each other"
    assert [(p.role, p.index, p.node) for p in plan.links] == [
        ("gateway", 0, 0),
        ("gateway", 1, 0),
        ("request relay", 0, 1),
        ("request relay", 1, 2),
    ]
    assert plan.env_hosts == (1, 2)
    assert plan.planned_only is None
    assert with_hosts(2, 8, env_workers=12, env_hosts={"max": 2}, env_host_cores=4, mode="collocated") == plan
    assert not with_hosts(2, 8, env_workers=4, env_hosts=2).links, "there is room beside the servers"


def test_where_cores_are_devices_hosts_leave_them_to_inference_and_learner() -> None:
    assert with_hosts(0, 4, env_workers=2).layout.describe() == "pipelined 1+1"
    plan = with_hosts(0, 4, env_workers=4, env_hosts=1)
    assert plan.layout.describe() == "pipelined 2+2"
    assert plan.remote == plan.workers
    more = with_hosts(0, 4, env_workers=5, env_hosts=1)
    assert (len(more.layout.inference) + len(more.layout.learner), len(more.remote)) == (3, 4)
