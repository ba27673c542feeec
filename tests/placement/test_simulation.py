"""The simulation against arithmetic that can be done by hand, and against the bounds of the cost model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vla_rl.config.run_config import RunConfig
from vla_rl.placement.cost_model import bound
from vla_rl.placement.layouts import layouts
from vla_rl.placement.plan import Layout, Plan
from vla_rl.placement.processes import make_plan
from vla_rl.placement.profile import LinearCost, Memory, Profile, load_profile, save_profile
from vla_rl.placement.resources import Resources
from vla_rl.placement.simulation import SimulatedRun
from vla_rl.placement.workload import Workload

FREE = LinearCost(each=0.0)
MEMORY = Memory(device=80, weights=15, trained=10)


def profile(**costs: Any) -> Profile:
    free = {"simulate": FREE, "render": FREE, "infer": FREE, "train": FREE, "reset": 0.0, "weight_sync": 0.0}
    return Profile(name="test", simulator_on="cores", memory=MEMORY, **(free | costs))


def plan_of(
    devices: int, layout: Layout, world_model: dict[str, Any] | None = None, episodes: int = 16, **placement: Any
) -> tuple[Plan, Workload]:
    config = RunConfig.model_validate(
        {
            "policy": {"name": "openvla_oft", "chunk_size": 4},
            "algo": {"name": "ppo", "minibatches": 2},
            "train": {"batch_episodes": episodes, "max_staleness": 1},
            "learner": {"micro_batch": 8},
            "world_model": world_model,
            "placement": {"env_workers": 2, "envs_per_worker": 4, "max_batch": 4, "max_wait_ms": 1.0} | placement,
        }
    )
    plan = make_plan(config, Resources(4, devices, "virtual"), layout)
    return plan, Workload.of(config, horizon=16, spread=0.0)


ONE, TWO = list(layouts(1, False)), list(layouts(2, False))


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ({"simulate": LinearCost(each=0.1)}, 16 * 4 * 0.1 / 2),  # two workers, a core each
        ({"render": LinearCost(each=0.1)}, 16 * 4 * 0.1 / 2),
        ({"reset": 0.5}, 16 * 0.5 / 2),
        ({"train": LinearCost(each=0.1)}, 64 * 0.1),
        ({"train": LinearCost(fixed=0.3, each=0.0)}, 8 * 0.3),
        ({"step": 1.0}, 2.0),
    ],
)
def test_a_single_cost_is_paid_in_full(costs: dict[str, Any], expected: float) -> None:
    plan, workload = plan_of(2, next(layouts(2, False, "pipelined")))
    outcome = SimulatedRun(plan, profile(**costs), workload).run(warmup=3, batches=4)
    assert 1 / outcome.batches_per_s == pytest.approx(expected, rel=0.02)
    assert bound(plan, profile(**costs), workload).seconds == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ({"simulate": LinearCost(each=0.1)}, 4 * 4 * 0.1 / 2),  # a quarter of the super-batch is real
        ({"train": LinearCost(each=0.1)}, 64 * 0.1),  # all of it is trained
        ({"imagine": LinearCost(each=0.01)}, 48 * 0.01),
        ({"model_train": LinearCost(each=0.1)}, 16 * 0.1),
        ({"infer": LinearCost(each=0.01)}, 64 * 0.01),  # all of it is chosen by the policy, on one device
    ],
)
def test_a_world_model_replaces_simulation_by_its_own_costs(costs: dict[str, Any], expected: float) -> None:
    layout, rules = next(layouts(2, False, "pipelined")), {"branches": 3}
    plan, workload = plan_of(2, layout, world_model=rules, episodes=4, max_wait_ms=0.0)
    outcome = SimulatedRun(plan, profile(**costs), workload).run(warmup=3, batches=12)
    assert 1 / outcome.batches_per_s == pytest.approx(expected, rel=0.35 if "infer" in costs else 0.05)
    limit = bound(plan, profile(**costs), workload)
    assert limit.seconds == pytest.approx(expected, rel=0.3 if "infer" in costs else 1e-6)
    assert 1 / outcome.batches_per_s >= 0.98 * limit.seconds
    assert limit.limit == {"simulate": "cores", "train": "device 1", "infer": "device 0"}.get(*costs, "world model")


def test_full_batches_of_inference() -> None:
    """Two workers of 8 envs keep batches of 4 full: 64 chunks in 16 batches."""
    plan, workload = plan_of(2, next(layouts(2, False, "pipelined")), envs_per_worker=8)
    costs = profile(infer=LinearCost(fixed=0.2, each=0.05))
    outcome = SimulatedRun(plan, costs, workload).run(3, 4)
    assert 1 / outcome.batches_per_s == pytest.approx(16 * 0.4, rel=0.05)
    assert outcome.inference_batch == pytest.approx(4.0, abs=0.1)


def test_servers_with_unequal_numbers_of_workers() -> None:
    """Two of four workers ask the first server, which is always busy; the other servers wait for their one worker.

    In T seconds: T / 0.3 + 2 * T / 0.4 = 64 chunks.
    """
    plan, workload = plan_of(4, list(layouts(4, False, "pipelined"))[2], env_workers=4, envs_per_worker=8)
    assert [len(plan.workers_of(server)) for server in range(3)] == [2, 1, 1]
    costs = profile(simulate=LinearCost(each=0.4), infer=LinearCost(each=0.3))
    least = bound(plan, costs, workload)
    assert least.seconds == pytest.approx(64 / (1 / 0.3 + 2 / 0.4))
    assert least.use["device 1"] == pytest.approx(0.3 / 0.4 * least.seconds)
    assert 1 / SimulatedRun(plan, costs, workload).run(3, 8).batches_per_s == pytest.approx(least.seconds, rel=0.1)
    # If each worker played the same share, the first server would need 32 * 0.3 = 9.6 s.


def test_devices_are_shared_or_not() -> None:
    costs = profile(infer=LinearCost(each=0.1), train=LinearCost(each=0.1))
    shared, workload = plan_of(1, next(layouts(1, False)))
    together = SimulatedRun(shared, costs, workload).run(3, 4)
    assert 1 / together.batches_per_s == pytest.approx(64 * 0.2, rel=0.03)
    assert together.busy["device 0"] == pytest.approx(1.0, abs=0.02)
    split, workload = plan_of(2, next(layouts(2, False, "pipelined")))
    apart = SimulatedRun(split, costs, workload).run(3, 4)
    assert 1 / apart.batches_per_s == pytest.approx(64 * 0.1, rel=0.03)


def test_a_weight_sync_is_paid_as_often_as_it_happens() -> None:
    """In a collocated plan both sides' shares add up."""
    plan, workload = plan_of(1, next(layouts(1, False)))
    seldom = replace(workload, max_staleness=3, publish_every=2)
    costs = profile(train=LinearCost(each=0.05), weight_sync=1.0)
    for each, expected in [(workload, 64 * 0.05 + 2.0), (seldom, 64 * 0.05 + 1.0)]:
        assert 1 / SimulatedRun(plan, costs, each).run(4, 4).batches_per_s == pytest.approx(expected, rel=0.03)
        assert bound(plan, costs, each).seconds == pytest.approx(expected)


def test_with_offloading_inference_waits_for_the_update() -> None:
    costs = profile(infer=LinearCost(each=0.1), train=LinearCost(each=0.1), onload=0.5, offload=0.25)
    plan, workload = plan_of(1, next(layouts(1, False)))
    offloading = replace(plan, offload=True)
    run = SimulatedRun(offloading, costs, workload)
    assert 1 / run.run(3, 4).batches_per_s == pytest.approx(64 * 0.2 + 0.75, rel=0.03)
    assert bound(offloading, costs, workload).seconds == pytest.approx(64 * 0.2 + 0.75)
    learning = [a for a in run.spans if a.role == "learner"]
    updates = [a.start for a in learning if a.end - a.start == pytest.approx(0.5)]
    ends = [a.end for a in learning if a.end - a.start == pytest.approx(0.25)]
    assert len(updates) == len(ends) == 4
    inference = [a for a in run.spans if a.role == "inference server"]
    for begin, end in zip(updates, ends, strict=True):
        assert not [a for a in inference if begin < a.end - 1e-9 and a.start < end - 1e-9]


def test_sequential_phases_add_up() -> None:
    plan, workload = plan_of(2, next(layouts(2, False, "pipelined")))
    synchronous = replace(workload, max_staleness=0)
    costs = profile(simulate=LinearCost(each=0.1), train=LinearCost(each=0.05))
    expected = bound(plan, costs, synchronous).sequential_seconds
    outcome = SimulatedRun(plan, costs, synchronous).run(2, 3)
    assert 1 / outcome.batches_per_s == pytest.approx(expected, rel=0.02)


seconds = st.floats(0.001, 0.2)


@settings(max_examples=25, deadline=None)
@example(devices=2, on_devices=False, costs=(0.125, 0.09375, 0.126953125, 0.125, 0.03125, 0.125), choice=1)
@given(
    devices=st.integers(1, 4),
    on_devices=st.booleans(),
    costs=st.tuples(*[seconds] * 6),
    choice=st.integers(0, 1000),
)
def test_no_plan_beats_its_bound(devices: int, on_devices: bool, costs: tuple[float, ...], choice: int) -> None:
    simulate, render, infer, train, weight_sync, fixed = costs
    found = list(layouts(devices, on_devices))
    plan, workload = plan_of(devices, found[choice % len(found)])
    some = profile(
        simulate=LinearCost(fixed=fixed, each=simulate),
        render=LinearCost(each=render),
        infer=LinearCost(fixed=fixed, each=infer),
        train=LinearCost(fixed=fixed, each=train),
        weight_sync=weight_sync,
    )
    outcome = SimulatedRun(plan, some, workload).run(2, 3)
    # The bound is on the mean: what was played before the measurement can shorten 3 super-batches by a part of one.
    assert 1 / outcome.batches_per_s > 0.6 * bound(plan, some, workload).seconds
    assert all(share <= 1.0 + 1e-6 for share in outcome.busy.values())


def test_profiles_survive_the_disk_and_scale(tmp_path: Any) -> None:
    some = profile(simulate=LinearCost(fixed=0.5, each=0.25), step=0.125)
    save_profile(some, tmp_path / "p.yaml")
    assert load_profile(tmp_path / "p.yaml") == some
    slow = some.scaled(4)
    assert (slow.simulate(2), slow.step, slow.memory, slow.name) == (4.0, 0.5, some.memory, some.name)
