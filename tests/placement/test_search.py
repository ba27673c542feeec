"""vla_rl.placement.search: the search against trying everything, memory, and `vla-rl plan` and `vla-rl profile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import ROOT
from vla_rl.commands.benchmark.scaling import as_reference, for_devices
from vla_rl.commands.cli import main
from vla_rl.config.loading import load_config
from vla_rl.config.run_config import RunConfig
from vla_rl.placement.memory import fit_memory, memory_use
from vla_rl.placement.plan import Plan, PlanError
from vla_rl.placement.processes import make_plan
from vla_rl.placement.profile import LinearCost, Memory, Profile, load_profile
from vla_rl.placement.resources import Resources
from vla_rl.placement.search import Candidate, candidates, search, simulate
from vla_rl.placement.workload import Workload
from vla_rl.policies.openvla_oft.config import LoraConfig

PROFILES = sorted((ROOT / "configs" / "profiles").glob("*.yaml"))


def run_config(on_devices: bool, **placement: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "env": {"name": "workload", "on_devices": on_devices},
            "policy": {"name": "openvla_oft", "chunk_size": 4},
            "algo": {"name": "ppo", "minibatches": 2},
            "train": {"batch_episodes": 32},
            "learner": {"micro_batch": 8},
            "placement": {"env_workers": 4, "envs_per_worker": 8, "max_batch": 8, "max_wait_ms": 5} | placement,
        }
    )


def profile_with(**memory: float) -> Profile:
    """A shipped profile, with round numbers of memory."""
    profile = load_profile(ROOT / "configs/profiles/libero_openvla_oft_h100.yaml")
    numbers = {"device": 80.0, "weights": 15.0, "trained": 1.5, "infer_each": 0.1, "train_each": 1.5} | memory
    return profile.model_copy(update={"memory": profile.memory.model_copy(update=numbers)})


def random_profile(seed: int, on_devices: bool) -> Profile:
    """Costs over two orders of magnitude, so that every role is the bottleneck in some."""
    rng = np.random.default_rng(seed)

    def seconds() -> float:
        return float(10 ** rng.uniform(-3, -1))

    curves = {n: LinearCost(fixed=seconds() / 4, each=seconds()) for n in ("simulate", "render", "infer", "train")}
    times = {n: seconds() for n in ("reset", "step", "weight_sync")}
    memory = Memory(device=80, weights=1, trained=1)
    return Profile(name="random", simulator_on="devices" if on_devices else "cores", memory=memory, **curves, **times)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_the_search_is_as_good_as_trying_everything(seed: int) -> None:
    on_devices = seed % 2 == 1
    config, profile = run_config(on_devices), random_profile(seed, on_devices)
    resources = Resources(cores=8, devices=2 + seed % 5, kind="virtual")
    workload = Workload.of(config, horizon=32, spread=0.8)
    everything = [simulate(c, profile, workload) for c in candidates(config, resources, profile, workload, None)]
    best = min(c.simulated or 0.0 for c in everything)
    found = search(config, resources, profile, workload)
    assert found[0].simulated is not None
    assert found[0].simulated <= 1.03 * best
    for mode in {c.layout.mode for c in everything}:
        assert search(config, resources, profile, workload, mode)[0].layout.mode == mode


def test_ties_go_to_the_plan_with_most_slack() -> None:
    """Cores limit most layouts, and differences among those are the simulation's noise."""
    config, profile = run_config(False), random_profile(0, False)
    profile = profile.model_copy(update={"simulate": LinearCost(each=1.0)})
    first, *others = search(config, Resources(8, 4, "virtual"), profile, Workload.of(config, horizon=32, spread=0.8))
    assert [c.simulated for c in others] == sorted(c.simulated or 0.0 for c in others)

    def load(candidate: Candidate) -> float:
        return max(seconds for name, seconds in candidate.bound.use.items() if name != "cores")

    fastest = min(c.simulated or 0.0 for c in (first, *others))
    alike = [c for c in others if (c.simulated or 0.0) <= 1.01 * fastest]
    assert len(alike) > 2
    assert first.simulated is not None
    assert first.simulated <= 1.01 * fastest
    assert load(first) == min(load(c) for c in (first, *alike))


@pytest.mark.parametrize("path", PROFILES, ids=lambda p: p.stem)
def test_the_shipped_profiles_say_where_every_number_comes_from(path: Path) -> None:
    profile = load_profile(path)
    costs = {"simulate", "render", "reset", "infer", "train", "step", "weight_sync", "onload", "memory"}
    assert set(profile.sources) == costs
    assert profile.train.each > profile.infer.each


def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic() -> None:
    small = profile_with(device=16.0)
    config = run_config(False)
    workload = Workload.of(config, 32, 0.0)
    with pytest.raises(PlanError) as error:
        search(config, Resources(8, 1, "virtual"), small, workload)
    assert "device 0 has 16 GiB and would hold inference 15.8 (weights 15.0, activations 0.8) + learner 28.5 " in (
        str(error.value)
    )
    assert "(weights 15.0, gradients 0.5, optimizer 1.0, activations 12.0) = 44.3 GiB; " in str(error.value)
    assert "learner.activation_checkpointing=true" in str(error.value)


def test_what_fits_only_one_at_a_time_is_offloaded() -> None:
    profile, tight = profile_with(), profile_with(device=32.0)
    config = run_config(False)
    plan = make_plan(config, Resources(8, 2, "virtual"))
    assert not fit_memory(plan, tight.memory, config).offload, "in a pipelined plan each has its own device"
    shared = make_plan(run_config(False, mode="collocated"), Resources(8, 2, "virtual"))
    assert fit_memory(shared, tight.memory, config).offload
    assert not fit_memory(shared, profile.memory, config).offload


def roles(plan: Plan, profile: Profile, config: RunConfig) -> dict[str, float]:
    return {name: sum(parts.values()) for name, parts in memory_use(plan, profile.memory, config, 0).items()}


def test_adapters_share_the_frozen_weights_of_a_device() -> None:
    """A learner of 1 GiB of gradients and moments in float32 trains weights of a third of that."""
    small = {"device": 18.0, "weights": 15.0, "trained": 1.0, "train_each": 0.0, "infer_each": 0.0}
    profile = profile_with(**small)
    config = run_config(False, mode="collocated")
    adapted = config.model_copy(
        update={"policy": config.policy.model_copy(update={"lora": LoraConfig(), "checkpoint": "base"})}
    )
    plan = make_plan(config, Resources(8, 1, "virtual"))
    assert roles(plan, profile, config) == {"inference": 15.0, "learner": 16.0}
    assert roles(plan, profile, adapted) == {"inference": pytest.approx(1 / 3), "learner": 16.0}
    assert fit_memory(plan, profile.memory, config).offload
    assert not fit_memory(plan, profile.memory, adapted).offload
    tight = profile_with(**small | {"device": 16.2})
    assert fit_memory(plan, tight.memory, adapted).offload, "which shares nothing, and holds one of them at a time"


def test_what_offloading_cannot_help_is_refused() -> None:
    tight = profile_with(device=32.0)
    never = run_config(False, offload="never")
    with pytest.raises(PlanError) as error:
        search(never, Resources(8, 1, "virtual"), tight, Workload.of(never, 32, 0.0))
    assert error.value.key == "placement.offload"
    assert "device 0 has 32 GiB and would hold inference 15.8" in str(error.value)
    assert "= 44.3 GiB; never forbids offloading" in str(error.value)
    simulators = tight.memory.model_copy(update={"simulate_fixed": 10.0})
    busy = tight.model_copy(update={"memory": simulators, "simulator_on": "devices"})
    plan = make_plan(run_config(True, mode="collocated"), Resources(8, 1, "virtual"))
    with pytest.raises(PlanError, match=r"would hold simulator 10\.0 \+ inference"):
        fit_memory(plan, busy.memory, run_config(True))
    cores = make_plan(run_config(False, mode="collocated"), Resources(4, 4, "cpu"))
    with pytest.raises(PlanError, match=r"placement\.mode"):
        fit_memory(cores, tight.memory, run_config(False))


def test_always_offloading_leaves_the_layouts_that_share_devices() -> None:
    config, profile = run_config(False, offload="always"), random_profile(0, False)
    found = candidates(config, Resources(8, 3, "virtual"), profile, Workload.of(config, 32, 0.0), None)
    assert {c.layout.mode for c in found} == {"collocated", "hybrid"}
    assert all(c.plan.offload for c in found)


def test_a_workload_grows_with_the_devices() -> None:
    config = load_config(ROOT / "configs/scaling/libero.yaml", [])
    profile = load_profile(ROOT / str(config.placement.virtual))
    four = for_devices(config, profile, 4)
    assert four.train.batch_episodes == 4 * config.train.batch_episodes
    assert four.placement.env_workers == 4 * config.placement.env_workers
    assert four.env.step_ms == pytest.approx(28.1 / 8 * config.placement.time_scale)  # type: ignore[union-attr]
    eight = for_devices(config, profile, 8)
    assert eight.placement.time_scale == 2 * config.placement.time_scale, "one machine does the runtime's work for all"
    assert eight.env.step_ms == pytest.approx(2 * four.env.step_ms)  # type: ignore[union-attr]


def test_the_reference_waits_for_no_row_that_nobody_will_play() -> None:
    config = load_config(ROOT / "configs/scaling/libero.yaml", ["train.batch_episodes=16"])
    profile = load_profile(ROOT / str(config.placement.virtual))
    lockstep, _ = as_reference(for_devices(config, profile, 2), profile)
    assert lockstep.placement.max_batch == 16 < config.placement.env_workers * config.placement.envs_per_worker


def test_plan_shows_what_it_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(ROOT)
    files = ["--json", str(tmp_path / "plan.json"), "--output", str(tmp_path / "plan.png")]
    profile = "placement.profile=configs/profiles/libero_openvla_oft_h100.yaml"
    assert main(["plan", "configs/scaling/libero.yaml", profile, "placement.devices=2", *files]) == 0
    record = json.loads((tmp_path / "plan.json").read_text())
    layouts = [c["layout"] for c in record["candidates"]]
    assert sorted(layouts) == ["collocated", "hybrid 1+2", "pipelined 1+1"]
    times = [c["simulated_s"] for c in record["candidates"]]
    assert times == sorted(times)
    assert {p["role"] for p in record["plan"]} == {"env worker", "inference server", "learner"}
    assert (tmp_path / "plan.png").stat().st_size > 5_000
    assert layouts[0] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["placement.devices=1", "placement.mode=pipelined"], "needs 2, there is 1"),
        (
            ["placement.devices=4", "placement.mode=pipelined", "placement.inference_devices=4"],
            "leave one to every role",
        ),
        (["placement.devices=1", "learner.micro_batch=512"], "device 0 has 80 GiB and would hold"),
    ],
)
def test_impossible_requests_end_with_status_2(
    overrides: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(ROOT)
    profile = "placement.profile=configs/profiles/libero_openvla_oft_h100.yaml"
    assert main(["plan", "configs/scaling/libero.yaml", profile, *overrides]) == 2
    assert text in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.slow
def test_profile_measures_a_run_and_plan_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    file = tmp_path / "profile.yaml"
    slow = ["env=workload", "env.step_ms=2", "env.render_ms=5", "env.reset_ms=3", "env.image_size=32"]
    small = ["policy.chunk_size=4", "placement.max_batch=4", "placement.envs_per_worker=4", "learner.micro_batch=8"]
    short = ["train.batch_episodes=8", "train.max_staleness=1", "train.eval_episodes=5", "placement.replan_every=1"]
    shared = ["configs/tabletop.yaml", "policy.checkpoint=null", *slow, *small, *short]
    assert main(["profile", *shared, "--output", str(file)]) == 0
    profile = load_profile(file)
    slept = {"simulate": 4 * 4 * 2e-3, "render": 4 * 5e-3, "reset": 3e-3}
    found = {"simulate": profile.simulate(4), "render": profile.render(4), "reset": profile.reset}
    for name, seconds in slept.items():
        assert 0.7 < found[name] / seconds < 4, f"{name}: a busy machine sleeps longer, never shorter"
    assert profile.infer(4) > 0
    assert profile.train(8) > 0
    assert profile.weight_sync > 0
    assert min(profile.onload, profile.offload) > 0
    assert 0 < profile.memory.weights < 0.1
    measured = {"simulate", "render", "infer", "train", "reset", "step", "weight_sync"}
    assert {name for name, source in profile.sources.items() if source.endswith("calls")} == measured
    assert profile.sources["onload"].endswith("10 GiB/s to the host assumed")
    shown = capsys.readouterr().out
    assert all(name in shown for name in measured)
    assert main(["plan", *shared, f"placement.profile={file}"]) == 0


def test_env_workers_that_draw_take_memory_of_the_devices() -> None:
    profile = load_profile(ROOT / "configs/profiles/libero_openvla_oft_h100.yaml")
    config = run_config(False, env_workers=12, mode="collocated")
    libero = RunConfig.model_validate({"placement": config.placement.model_dump()})
    plan = make_plan(libero, Resources(16, 2, "cuda"))
    use = [memory_use(plan, profile.memory, libero, device)["drawing"] for device in (0, 1)]
    assert use == [{"contexts": pytest.approx(6 * 0.3)}] * 2
    assert "drawing" not in memory_use(plan, profile.memory, config, 0), "this simulator draws nothing"
    cores = make_plan(libero, Resources(16, 16, "cpu"))
    assert "drawing" not in memory_use(cores, profile.memory, libero, 0)
    crowded = libero.with_values({"placement.env_workers": 600, "placement.max_batch": 1, "learner.micro_batch": 1})
    with pytest.raises(PlanError, match=r"drawing 90\.0 .*; lower placement\.env_workers"):
        fit_memory(make_plan(crowded, Resources(600, 2, "cuda")), profile.memory, crowded)
