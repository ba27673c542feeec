"""The simulation against arithmetic that can be done by hand, and against the bounds of the cost model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vla_rl.config.run_config import RunConfig
from vla_rl.placement.cost_model import Job, bound
from vla_rl.placement.plan import Layout, Plan, Resources, layouts, make_plan
from vla_rl.placement.profile import Curve, Memory, Profile, load_profile, save_profile
from vla_rl.placement.simulation import SimulatedRun

FREE = Curve(each=0.0)
MEMORY = Memory(device=80, weights=15, trained=10)


def profile(**costs: Any) -> Profile:
    free = {"simulate": FREE, "render": FREE, "infer": FREE, "train": FREE, "reset": 0.0, "transfer": 0.0}
    return Profile(name="test", simulator_on="cores", memory=MEMORY, **(free | costs))


def plan_of(devices: int, layout: Layout, **placement: Any) -> tuple[Plan, Job]:
    config = RunConfig.model_validate(
        {
            "policy": {"chunk_size": 4},
            "algo": {"name": "ppo", "minibatches": 2},
            "train": {"batch_episodes": 16, "max_age": 1},
            "learner": {"micro_batch": 8},
            "placement": {"env_workers": 2, "slots_per_worker": 4, "max_batch": 4, "max_wait_ms": 1.0} | placement,
        }
    )
    plan = make_plan(config, Resources(4, devices, "virtual"), layout)
    return plan, Job.of(config, horizon=16, spread=0.0)


ONE, TWO = list(layouts(1, False)), list(layouts(2, False))


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ({"simulate": Curve(each=0.1)}, 16 * 4 * 0.1 / 2),  # two workers, a core each
        ({"render": Curve(each=0.1)}, 16 * 4 * 0.1 / 2),
        ({"reset": 0.5}, 16 * 0.5 / 2),
        ({"train": Curve(each=0.1)}, 64 * 0.1),
        ({"train": Curve(fixed=0.3, each=0.0)}, 8 * 0.3),
        ({"step": 1.0}, 2.0),
    ],
)
def test_a_single_cost_takes_the_time_it_takes(costs: dict[str, Any], expected: float) -> None:
    plan, job = plan_of(2, next(layouts(2, False, "pipelined")))
    outcome = SimulatedRun(plan, profile(**costs), job, cores=4).run(warmup=3, batches=4)
    assert 1 / outcome.batches_per_s == pytest.approx(expected, rel=0.02)
    assert bound(plan, profile(**costs), job, cores=4).seconds == pytest.approx(expected, rel=1e-6)


def test_full_batches_of_inference() -> None:
    """Two workers of 8 slots keep batches of 4 full: 64 chunks in 16 batches."""
    plan, job = plan_of(2, next(layouts(2, False, "pipelined")), slots_per_worker=8)
    costs = profile(infer=Curve(fixed=0.2, each=0.05))
    outcome = SimulatedRun(plan, costs, job, cores=4).run(3, 4)
    assert 1 / outcome.batches_per_s == pytest.approx(16 * 0.4, rel=0.05)
    assert outcome.inference_batch == pytest.approx(4.0, abs=0.1)


def test_servers_with_unequal_numbers_of_workers() -> None:
    """Of four workers two ask the first server, which is busy all the time; the others have one, for which they wait.

    In T seconds: T / 0.3 + 2 * T / 0.4 = 64 chunks.
    """
    plan, job = plan_of(4, list(layouts(4, False, "pipelined"))[2], env_workers=4, slots_per_worker=8)
    assert [len(plan.workers_of(server)) for server in range(3)] == [2, 1, 1]
    costs = profile(simulate=Curve(each=0.4), infer=Curve(each=0.3))
    least = bound(plan, costs, job, cores=4)
    assert least.seconds == pytest.approx(64 / (1 / 0.3 + 2 / 0.4))
    assert least.use["device 1"] == pytest.approx(0.3 / 0.4 * least.seconds)
    assert 1 / SimulatedRun(plan, costs, job, cores=4).run(3, 8).batches_per_s == pytest.approx(least.seconds, rel=0.1)
    # where each worker played as much, the first server would need 32 * 0.3 = 9.6 s


def test_devices_are_shared_or_not() -> None:
    costs = profile(infer=Curve(each=0.1), train=Curve(each=0.1))
    shared, job = plan_of(1, next(layouts(1, False)))
    together = SimulatedRun(shared, costs, job, cores=4).run(3, 4)
    assert 1 / together.batches_per_s == pytest.approx(64 * 0.2, rel=0.03)
    assert together.busy["device 0"] == pytest.approx(1.0, abs=0.02)
    split, job = plan_of(2, next(layouts(2, False, "pipelined")))
    apart = SimulatedRun(split, costs, job, cores=4).run(3, 4)
    assert 1 / apart.batches_per_s == pytest.approx(64 * 0.1, rel=0.03)


def test_a_hand_over_is_paid_as_often_as_it_happens() -> None:
    """In a collocated plan both sides' shares add up."""
    plan, job = plan_of(1, next(layouts(1, False)))
    seldom = replace(job, max_age=3, publish_every=2)
    costs = profile(train=Curve(each=0.05), transfer=1.0)
    for each, expected in [(job, 64 * 0.05 + 2.0), (seldom, 64 * 0.05 + 1.0)]:
        assert 1 / SimulatedRun(plan, costs, each, cores=4).run(4, 4).batches_per_s == pytest.approx(expected, rel=0.03)
        assert bound(plan, costs, each, cores=4).seconds == pytest.approx(expected)


def test_with_room_for_one_at_a_time_inference_waits_for_the_update() -> None:
    costs = profile(infer=Curve(each=0.1), train=Curve(each=0.1), onload=0.5, offload=0.25)
    plan, job = plan_of(1, next(layouts(1, False)))
    offloading = replace(plan, offload=True)
    run = SimulatedRun(offloading, costs, job, cores=4)
    assert 1 / run.run(3, 4).batches_per_s == pytest.approx(64 * 0.2 + 0.75, rel=0.03)
    assert bound(offloading, costs, job, cores=4).seconds == pytest.approx(64 * 0.2 + 0.75)
    learning = [a for a in run.activities if a.role == "learner"]
    updates = [a.start for a in learning if a.end - a.start == pytest.approx(0.5)]
    ends = [a.end for a in learning if a.end - a.start == pytest.approx(0.25)]
    assert len(updates) == len(ends) == 4
    inference = [a for a in run.activities if a.role == "inference server"]
    for begin, end in zip(updates, ends, strict=True):
        assert not [a for a in inference if begin < a.end - 1e-9 and a.start < end - 1e-9]


def test_in_turns_the_phases_add_up() -> None:
    plan, job = plan_of(2, next(layouts(2, False, "pipelined")))
    synchronous = replace(job, max_age=0, sync=True)
    costs = profile(simulate=Curve(each=0.1), train=Curve(each=0.05))
    expected = bound(plan, costs, synchronous, cores=4).in_turns
    outcome = SimulatedRun(plan, costs, synchronous, cores=4).run(2, 3)
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
    simulate, render, infer, train, transfer, fixed = costs
    found = list(layouts(devices, on_devices))
    plan, job = plan_of(devices, found[choice % len(found)])
    some = profile(
        simulate=Curve(fixed=fixed, each=simulate),
        render=Curve(each=render),
        infer=Curve(fixed=fixed, each=infer),
        train=Curve(fixed=fixed, each=train),
        transfer=transfer,
    )
    outcome = SimulatedRun(plan, some, job, cores=4).run(2, 3)
    # a bound on the mean: what was played ahead before the measurement began can shorten a run of 3 by a part of one
    assert 1 / outcome.batches_per_s > 0.6 * bound(plan, some, job, cores=4).seconds
    assert all(share <= 1.0 + 1e-6 for share in outcome.busy.values())


def test_profiles_survive_the_disk_and_stretch(tmp_path: Any) -> None:
    some = profile(simulate=Curve(fixed=0.5, each=0.25), step=0.125)
    save_profile(some, tmp_path / "p.yaml")
    assert load_profile(tmp_path / "p.yaml") == some
    slow = some.dilated(4)
    assert (slow.simulate(2), slow.step, slow.memory, slow.name) == (4.0, 0.5, some.memory, some.name)
