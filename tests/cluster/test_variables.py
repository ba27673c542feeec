"""The environment of a run's processes on GPUs: the caller's list of devices, and the device on which to draw."""

import pytest

from vla_rl.cluster.variables import variables
from vla_rl.config.run_config import RunConfig
from vla_rl.core.gpus import Gpu
from vla_rl.placement.plan import Plan
from vla_rl.placement.processes import make_plan
from vla_rl.placement.resources import Resources


def plan_of(count: int, env: str = "libero", nodes: int = 1, **placement) -> Plan:
    config = RunConfig.model_validate({"env": {"name": env}, "placement": {"env_workers": 6} | placement})
    return make_plan(config, Resources(16, count, "cuda", nodes))


def gpus(*entries: str, numbers: tuple[int, ...] = (4, 6)) -> list[Gpu]:
    return [Gpu("any", 80 << 30, entry, number) for entry, number in zip(entries, numbers, strict=True)]


@pytest.mark.parametrize("entries", [("4", "6"), ("GPU-aaaa", "GPU-bbbb"), ("MIG-aaaa", "MIG-bbbb")])
def test_processes_see_entries_of_the_callers_list(entries: tuple[str, str]) -> None:
    plan = plan_of(2, mode="pipelined")
    (server,), (learner,) = plan.servers, plan.learners
    seen = [variables(plan, p, gpus(*entries))["CUDA_VISIBLE_DEVICES"] for p in (server, learner)]
    assert seen == list(entries)


def test_env_workers_draw_on_all_devices_of_the_run_in_turn() -> None:
    plan = plan_of(2, mode="pipelined")
    found = [variables(plan, worker, gpus("GPU-aaaa", "GPU-bbbb")) for worker in plan.workers]
    assert [v["MUJOCO_EGL_DEVICE_ID"] for v in found] == ["4", "6"] * 3
    assert [v["CUDA_VISIBLE_DEVICES"] for v in found] == ["GPU-aaaa", "GPU-bbbb"] * 3


def test_on_several_nodes_the_numbers_are_each_nodes_own() -> None:
    plan = plan_of(4, nodes=2, mode="pipelined", env_workers=8)
    for worker in plan.workers:
        device = plan.drawing_device(worker)
        assert device is not None
        assert device % 2 == worker.node
        gpu = gpus("a", "b")[device // 2]
        assert variables(plan, worker, gpus("a", "b"))["MUJOCO_EGL_DEVICE_ID"] == str(gpu.number)
    for node in (0, 1):
        drawn = [plan.drawing_device(worker) for worker in plan.workers if worker.node == node]
        assert sorted(drawn) == [node, node, node + 2, node + 2]


def test_devices_that_the_run_does_not_use_are_not_drawn_on() -> None:
    plan = plan_of(2, devices=1)
    assert {plan.drawing_device(worker) for worker in plan.workers} == {0}


def test_without_gpus_nothing_is_said_about_devices() -> None:
    config = RunConfig()
    plan = make_plan(config, Resources(8, 8, "cpu"))
    for process in (*plan.processes, None):
        assert not {"CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID"} & variables(plan, process, []).keys()


def test_simulators_on_devices_see_theirs() -> None:
    plan = make_plan(
        RunConfig.model_validate({"env": {"name": "workload", "on_devices": True}}), Resources(8, 3, "cuda")
    )
    three = [Gpu("any", 1, entry, number) for number, entry in enumerate(("5", "6", "7"))]
    (worker,) = plan.workers
    found = variables(plan, worker, three)
    assert found["CUDA_VISIBLE_DEVICES"] == three[worker.devices[0]].entry
    assert plan.drawing_device(worker) is None
