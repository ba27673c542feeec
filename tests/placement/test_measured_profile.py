"""vla_rl.placement.measured_profile: the costs that a run's own meters show, and that a real run writes them down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs import env_spec
from tests import ROOT
from vla_rl.commands.cli import main
from vla_rl.config.loading import dump_config
from vla_rl.config.run_config import RunConfig
from vla_rl.observability.meter import LineSums, Meter
from vla_rl.observability.usage import Throughput
from vla_rl.placement.measured_profile import MeasuredCosts, ProfileBuilder, fit_line
from vla_rl.placement.profile import LinearCost, Memory, Profile, load_profile

MEMORY = Memory(device=80, weights=15, trained=5, infer_each=0.1, train_each=0.4)


def sums_of(calls: list[tuple[float, float]]) -> LineSums:
    line = LineSums()
    for size, seconds in calls:
        line.add(size, seconds)
    return line


def built(costs: MeasuredCosts, configured: Path | None = None) -> Profile:
    """The profile of the run "name", of episodes of up to 100 steps."""
    placement = {} if configured is None else {"profile": str(configured)}
    env = {"name": "workload", "max_episode_steps": 100}
    config = RunConfig.model_validate({"env": env, "placement": placement})
    return ProfileBuilder(config, env_spec(config.env), "name", MEMORY).profile(costs)


def worked(meter: Meter, activity: str, calls: list[tuple[float, float]]) -> None:
    for size, seconds in calls:
        meter.add(activity, seconds, size)


def test_a_size_may_be_known_only_after_the_call() -> None:
    meter = Meter()
    for size in (1, 3):
        with meter.time("a") as call:
            call.size = size
    with meter.time("a", 5):
        pass
    with meter.time("b"):
        pass
    found = meter.snapshot()
    assert (found["a_calls"], found["a_n"], found["a_nn"]) == (2, 8, 34), "the first call does not count"
    assert 0 < found["a_t"] < found["a_s"]
    assert set(found) == {"a_s", "b_s", "a_calls", "a_n", "a_nn", "a_nt", "a_t", "cpu_s"}


def test_a_line_is_found_again_from_the_sums_of_several_processes_and_restarts() -> None:
    truth, rng = LinearCost(fixed=0.02, each=0.003), np.random.default_rng(0)
    throughput, costs = Throughput(), MeasuredCosts()
    meters = [Meter(), Meter()]
    for round_ in range(4):
        if round_ == 2:
            meters[1] = Meter()  # a server died; the new one counts from zero
        for meter in meters:
            sizes = rng.integers(1, 17, 20).tolist()
            worked(meter, "act", [(n, truth(n) * rng.uniform(0.98, 1.02)) for n in sizes])
        throughput.measure({"server": {i: m.snapshot() for i, m in enumerate(meters)}})
        costs.add(throughput.growth)
    line = costs.line("server/act")
    assert line is not None
    assert line.calls == 4 * 2 * 20 - 3, "three processes, without their first calls"
    found = fit_line(line)
    assert (found.fixed, found.each) == pytest.approx((truth.fixed, truth.each), rel=0.05)
    assert costs.sums == json.loads(json.dumps(costs.sums)), "a checkpoint holds it"


def test_nothing_is_counted_twice_if_a_process_is_gone() -> None:
    throughput, costs = Throughput(), MeasuredCosts()
    for answers in ((0, 1), (1,), (1,), (1,)):
        throughput.measure({"server": {index: {"rows": 10.0} for index in answers}})
        costs.add(throughput.growth)
    assert costs.sums == {"server/rows": 20.0}


def test_sizes_that_are_all_alike_give_a_cost_without_a_fixed_part() -> None:
    found = fit_line(sums_of([(4, 0.2), (4, 0.4)]))
    assert (found.fixed, found.each) == (0.0, pytest.approx(0.075))
    assert fit_line(sums_of([(4, 0.2)])) == LinearCost(each=0.05)
    nearly = fit_line(sums_of([(57, 0.63), (58, 0.62), (60, 0.61), (59, 0.63)]))
    assert (nearly.fixed, nearly.each) == (0.0, pytest.approx(2.49 / 234)), "noise is no slope"


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 10)), min_size=1, max_size=20))
def test_no_number_is_below_0_and_the_line_is_that_of_least_squares(calls: list[tuple[int, float]]) -> None:
    found = fit_line(sums_of([(float(n), t) for n, t in calls]))
    assert min(found.fixed, found.each) >= 0
    sizes, seconds = zip(*calls, strict=True)
    if np.var(sizes) > 0.02 * np.mean(np.square(sizes)):
        each, fixed = np.polyfit(sizes, seconds, 1)
        if each > 1e-6 and fixed > 1e-6:
            assert (found.fixed, found.each) == pytest.approx((fixed, each), rel=1e-3, abs=1e-6)


def test_a_profile_says_what_was_measured_and_what_was_not() -> None:
    costs, meter = MeasuredCosts(), Meter()
    worked(meter, "act", [(1, 9.0), (1, 0.03), (5, 0.07)])
    worked(meter, "refresh", [(1, 9.0), (1, 0.2)])
    learner = Meter()
    worked(learner, "publish", [(1, 9.0), (1, 0.1), (1, 0.3)])
    worker = Meter()
    worker.count("trajectories", 4)
    worker.count("trajectory_steps", 240)
    costs.add({"server": [meter.snapshot()], "learner": [learner.snapshot()], "worker": [worker.snapshot()]})
    assert not costs.complete, "no simulator and no learner was seen"
    found = built(costs)
    assert (found.infer.fixed, found.infer.each) == pytest.approx((0.02, 0.01))
    assert found.weight_sync == pytest.approx(0.4), "the learner's side and a server's"
    assert found.mean_length == pytest.approx(0.6)
    assert (found.train, found.step) == (LinearCost(each=0.0), 0.0)
    assert found.onload == pytest.approx((2 * 15 + 5) / 10)
    assert found.sources["infer"] == "the run name, 2 calls"
    assert found.sources["weight_sync"] == "the run name, 2 and 1 calls"
    assert found.sources["onload"] == "not seen in the run name; 10 GiB/s to the host assumed"
    assert found.sources["step"] == "not seen in the run name; 0.0 assumed"
    assert found.memory == MEMORY
    assert "the run name" in found.name


def test_what_the_run_never_did_is_as_configured() -> None:
    file = ROOT / "configs/profiles/libero_openvla_oft_h100.yaml"
    configured = load_profile(file)
    found = built(MeasuredCosts({"worker/trajectories": 2, "worker/trajectory_steps": 20}), file)
    assert (found.train, found.onload) == (configured.train, configured.onload)
    assert f"as in the profile {configured.name!r}" in found.sources["train"]
    assert found.mean_length == 0.5, "the least that a profile allows"
    drawing = {"draw_each": configured.memory.draw_each}
    assert found.memory == MEMORY.model_copy(update=drawing), "of the run's own policy"
    assert built(MeasuredCosts(), file).mean_length == configured.mean_length


@pytest.mark.slow
@pytest.mark.alone
def test_a_run_measures_what_its_parts_were_made_to_cost(tmp_path: Path) -> None:
    """Simulator and inference sleep for known times; `vla-rl plan` reads the file."""
    from vla_rl.commands.train import train

    env = {"name": "workload", "image_size": 32, "max_episode_steps": 32, "length_spread": 0.5}
    costs: dict[str, Any] = {"step_ms": 4.0, "render_ms": 6.0, "reset_ms": 20.0}
    config = RunConfig.model_validate(
        {
            "env": env | costs,
            "policy": {"name": "openvla_oft", "size": "nano", "chunk_size": 8, "latency_ms": 40.0},
            "train": {"iterations": 4, "batch_episodes": 8, "eval_episodes": 0, "checkpoint_every": 2},
            "placement": {"env_workers": 1, "envs_per_worker": 4, "max_batch": 4},
            "log": {"dir": str(tmp_path), "name": "run", "tensorboard": False},
        }
    )
    assert train(config) == 0
    file = tmp_path / "run" / "profile.yaml"
    found = load_profile(file)
    assert found.simulate(1) == pytest.approx(8 * 4e-3, rel=0.3)
    assert found.simulate(0.5) == pytest.approx(4 * 4e-3, rel=0.3), "an episode's last chunk is shorter"
    assert found.render(1) == pytest.approx(6e-3, rel=0.5)
    assert found.reset == pytest.approx(20e-3, rel=0.3)
    assert 40e-3 < found.infer(2) < 80e-3
    assert 0.6 < found.mean_length < 0.9
    assert min(found.train(8), found.step, found.weight_sync) > 0
    measured = {name for name, source in found.sources.items() if "calls" in source}
    assert {"simulate", "infer", "train", "step", "weight_sync"} <= measured
    assert 0 < found.memory.weights < 0.1
    before = found.sources["simulate"]
    longer = config.model_copy(update={"train": config.train.model_copy(update={"iterations": 5})})
    assert train(longer, resume=tmp_path / "run") == 0
    after = load_profile(file).sources["simulate"]
    assert int(after.split()[-2]) > int(before.split()[-2]), "a resumed run adds to its measurements"
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert main(["plan", str(tmp_path / "config.yaml"), f"placement.profile={file}"]) == 0
