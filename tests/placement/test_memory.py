"""vla_rl.placement.memory: a 7B policy on devices of 24 and 80 GiB, and the arithmetic against what DeepSpeed holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ROOT
from tests.learner.learner_tools import SPEC, config, make_learner
from tests.policies.policy_helpers import rate
from vla_rl.cluster.variables import variables
from vla_rl.commands.cli import main
from vla_rl.config.loading import load_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.actions import end_effector
from vla_rl.core.machine import GIB, Gpu, Machine
from vla_rl.core.records import EnvSpec
from vla_rl.learner.deepspeed_engine import tensors_held
from vla_rl.placement.host_memory import host_use
from vla_rl.placement.memory import expected_memory, fit_memory, memory_use
from vla_rl.placement.plan import PlanError
from vla_rl.placement.planner import plan_run
from vla_rl.placement.processes import make_plan
from vla_rl.placement.profile import load_profile
from vla_rl.placement.resources import Resources
from vla_rl.policies.base.policy import PolicyInput

RECIPE = ROOT / "configs/recipes/openvla_oft_lora_1gpu.yaml"
LIBERO = EnvSpec("libero", ("main",), 256, 0, end_effector(), 220, ("put the bowl on the plate",))
TWO_VIEWS = EnvSpec("libero", ("main", "wrist"), 256, 8, end_effector(), 220, LIBERO.instructions)
SEVEN_B = {"name": "openvla_oft", "size": "7b", "lora": {}}


def machine(gib: float, gpus: int = 1) -> Machine:
    return Machine(cpus=32, memory=512 * GIB, gpus=(Gpu("any", int(gib * GIB)),) * gpus)


def large(**learner: Any) -> RunConfig:
    policy = {"name": "openvla_oft", "size": "7b"}
    settings = {"precision": "bf16", "micro_batch": 4, "activation_checkpointing": True} | learner
    return RunConfig.model_validate({"policy": policy, "learner": settings})


def held(cfg: RunConfig, where: Machine, spec: EnvSpec = LIBERO) -> dict[str, dict[str, float]]:
    return memory_use(make_plan(cfg, Resources.of(where, cfg)), expected_memory(cfg, spec, where), cfg, 0)


def fitted(cfg: RunConfig, where: Machine) -> Any:
    return fit_memory(make_plan(cfg, Resources.of(where, cfg)), expected_memory(cfg, LIBERO, where), cfg)


@pytest.mark.parametrize(
    ("profile", "chunk_size", "spec", "recomputed"),
    [
        ("libero_openvla_oft_h100", 8, TWO_VIEWS, True),
        ("libero_hf_openvla_oft_h100", 8, TWO_VIEWS, True),
        ("maniskill_openvla_h100", 1, LIBERO, True),
        ("libero_openvla_oft_lora_h200", 8, LIBERO, False),
    ],
)
def test_the_shipped_profiles_have_the_memory_of_their_policies(
    profile: str, chunk_size: int, spec: EnvSpec, recomputed: bool
) -> None:
    found = load_profile(ROOT / f"configs/profiles/{profile}.yaml").memory
    cfg = large(activation_checkpointing=recomputed).with_values({"policy.chunk_size": chunk_size})
    adapted = RunConfig.model_validate(cfg.model_dump() | {"policy": cfg.policy.model_dump() | {"lora": {}}})
    expected = expected_memory(adapted, spec, machine(80))
    for name in ("weights", "trained", "infer_each", "train_each"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=0.02), name


def test_full_fine_tuning_of_7b_does_not_fit_on_one_device() -> None:
    """112 GiB of gradients, moments and master weights."""
    with pytest.raises(PlanError) as error:
        fitted(large(), machine(80))
    text = str(error.value)
    assert "device 0 has 80 GiB and would hold inference 15.1 (weights 14.0" in text
    assert "gradients 27.9, optimizer 83.8" in text
    assert "learner.offload_optimizer=cpu" in text
    assert "policy.lora" in text
    offloading = large(zero_stage=2, offload_optimizer="cpu")
    on_device = held(offloading, machine(80))["learner"]
    assert "optimizer" not in on_device
    assert on_device["gradients"] == pytest.approx(27.9 + 0.9, abs=0.1), "DeepSpeed sums them up on the device"
    assert held(offloading.with_values({"learner.zero_stage": 3}), machine(80))["learner"]["gradients"] < 1
    assert not fitted(offloading, machine(80)).offload
    with pytest.raises(PlanError, match="would hold"):
        fitted(large(zero_stage=1, offload_optimizer="cpu", micro_batch=64), machine(40))
    assert not fitted(large(zero_stage=3), machine(80, gpus=8)).offload


def test_the_world_model_holds_a_copy_of_the_policy_on_the_first_inference_device() -> None:
    cfg = RunConfig.model_validate(large().model_dump() | {"world_model": {"branches": 3}})
    without, found = held(large(), machine(80)), held(cfg, machine(80))
    extra = found.pop("world model")
    assert found == without
    assert extra["weights"] == found["inference"]["weights"] == pytest.approx(14.1, abs=0.3)
    with pytest.raises(PlanError, match="world model 1"):
        fitted(cfg.with_values({"policy.chunk_size": 8}), machine(24))


def test_a_rank_of_zero_3_holds_its_part() -> None:
    cfg = large(zero_stage=3).with_values({"placement.mode": "collocated"})
    whole, part = (held(cfg, machine(80, gpus=gpus))["learner"] for gpus in (1, 4))
    assert part["optimizer"] == pytest.approx(whole["optimizer"] / 4)
    assert part["weights"] < whole["weights"] / 2
    offloaded = large(zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu")
    assert sum(held(offloaded, machine(24))["learner"].values()) < 6


def test_without_checkpointing_a_micro_batch_of_64_needs_all_of_it() -> None:
    cfg = RunConfig.model_validate(
        {"policy": {"name": "openvla_oft", "size": "7b", "lora": {}}, "learner": {"precision": "bf16"}}
    )
    activations = held(cfg, machine(80))["learner"]["activations"]
    assert activations == pytest.approx(140, rel=0.05)
    with pytest.raises(PlanError, match=r"set learner\.activation_checkpointing=true"):
        fitted(cfg, machine(80))
    assert held(cfg.with_values({"learner.activation_checkpointing": True}), machine(80))["learner"]["activations"] < 14


def test_the_expert_of_pi0_is_trained_on_a_small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of π0, the error says so, and does not propose what π0 cannot do."""
    policy = {"name": "pi0", "size": "base", "horizon": 50, "padded_dim": 32}
    settings = {"precision": "bf16", "micro_batch": 32}
    whole = RunConfig.model_validate({"policy": policy, "learner": settings, "placement": {"max_batch": 8}})
    monkeypatch.setattr(Machine, "detect", lambda: machine(23.5))
    with pytest.raises(PlanError, match=r"policy\.train_expert_only=true") as error:
        plan_run(whole, TWO_VIEWS)
    assert "activation_checkpointing" not in str(error.value)
    assert plan_run(whole.with_values({"policy.train_expert_only": True}), TWO_VIEWS).learners


def test_float32_is_refused_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any process starts, on GPUs and on cores."""
    cfg = RunConfig.model_validate(
        {"policy": {"name": "openvla_oft", "size": "7b", "lora": {}}, "learner": {"micro_batch": 1}}
    )
    for where in (machine(24), Machine(cpus=8, memory=24 * GIB, gpus=())):
        monkeypatch.setattr(Machine, "detect", lambda found=where: found)
        with pytest.raises(PlanError, match=r"has 24 GiB and would hold .*set learner\.precision=bf16"):
            plan_run(cfg, LIBERO)
        with pytest.raises(PlanError, match="would hold inference"):
            plan_run(cfg, LIBERO, training=False)


def test_float32_is_refused_for_7b_where_it_fits() -> None:
    cfg = RunConfig.model_validate({"policy": SEVEN_B, "learner": {"micro_batch": 1, "activation_checkpointing": True}})
    with pytest.raises(PlanError, match=r"fp32 for 7\.\d billion weights: .*set learner\.precision=bf16"):
        fitted(cfg, machine(141))
    assert fitted(cfg.with_values({"learner.precision": "bf16"}), machine(141))
    small = RunConfig.model_validate({"policy": {"name": "openvla_oft", "size": "tiny"}})
    assert fitted(small, machine(141))
    on_cores = Machine(cpus=32, memory=512 * GIB, gpus=())
    assert fitted(cfg, on_cores), "as on a machine on which somebody looks for a mistake"


@pytest.mark.parametrize(
    ("stage", "precision", "offload", "ema"),
    [
        (0, "fp32", "none", None),
        (1, "fp32", "none", 0.9),
        (0, "bf16", "none", 0.9),
        (1, "bf16", "none", None),
        (2, "bf16", "none", None),
        (2, "bf16", "cpu", 0.9),
        (2, "fp32", "cpu", None),
    ],
)
def test_the_arithmetic_is_what_the_learner_holds(stage: int, precision: str, offload: str, ema: float | None) -> None:
    """All tensors that engine and optimizer hold between two micro-batches, after the first optimizer step."""
    learner_keys = {"zero_stage": stage, "precision": precision, "offload_optimizer": offload, "ema": ema}
    cfg = config(policy={"size": "tiny", "chunk_size": 4}, learner=learner_keys)
    learner = make_learner(cfg)
    engine = learner._engine
    for last in (True, False):
        images = torch.zeros(1, 1, 48, 48, 3, dtype=torch.uint8)
        seen = PolicyInput(images, torch.zeros(1, 3), torch.zeros(1, dtype=torch.long), torch.zeros(1))
        output = rate(engine, seen)
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(output.logprobs.sum() + output.values.sum())
        engine.step()
    learner._end_update()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(engine)}
    found = sum(storages.values()) / GIB
    memory, gpu = expected_memory(cfg, SPEC, machine(8)), machine(8)
    plan = make_plan(cfg, Resources.of(gpu, cfg))
    parts = memory_use(plan, memory, cfg, 0)["learner"] | {"activations": 0.0, "context": 0.0}
    host = sum(host_use(plan, memory, cfg, SPEC).get("learner", {}).values())
    bucket = (2 if precision == "bf16" else 4) * expected_memory(cfg, SPEC, machine(8)).trained / 16 * (stage == 2)
    expected = sum(parts.values()) + host - bucket  # between two backward passes
    assert found == pytest.approx(expected, rel=0.06)


def _tensors(engine: Any) -> Any:
    return tensors_held(list(engine.module.parameters()), engine.optimizer)


def test_what_is_offloaded_needs_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """7B in full: for each weight 12 bytes of optimizer and 4 of gradients; 12 and 2 more for a checkpoint."""
    cfg, gpu = large(zero_stage=2, offload_optimizer="cpu"), (Gpu("any", 80 * GIB),)
    plan = fitted(cfg, machine(80))
    host = host_use(plan, expected_memory(cfg, LIBERO, machine(80)), cfg, LIBERO)
    assert host["learner"] == pytest.approx({"optimizer": 83.8, "gradients": 27.9, "buffers": 14.0}, abs=0.1)
    assert host["checkpoint"] == pytest.approx({"policy": 14.0, "state": 83.8}, abs=0.1)
    assert host["shared memory"]["all"] > 2 * 13.9, "two buffers of the weight sync"
    without = large(zero_stage=2)
    host = host_use(plan, expected_memory(without, LIBERO, machine(80)), without, LIBERO)
    assert "learner" not in host

    monkeypatch.setattr(Machine, "detect", lambda: Machine(32, 200 * GIB, gpu))
    with pytest.raises(PlanError) as error:
        plan_run(cfg, LIBERO)
    assert str(error.value).startswith(
        "learner.offload_optimizer: this machine has 200 GiB of main memory and would hold"
    )
    assert "optimizer 83.8" in str(error.value)
    assert "train adapters with policy.lora" in str(error.value)
    monkeypatch.setattr(Machine, "detect", lambda: Machine(32, 400 * GIB, gpu))
    assert plan_run(cfg, LIBERO).learners
    assert not plan_run(cfg, LIBERO, training=False).learners

    adapted = RunConfig.model_validate({"policy": SEVEN_B, "learner": {"precision": "bf16", "micro_batch": 1}})
    adapted = adapted.with_values({"placement.offload": "always", "placement.mode": "collocated"})
    monkeypatch.setattr(Machine, "detect", lambda: Machine(32, 40 * GIB, gpu))
    with pytest.raises(
        PlanError,
        match=r"^placement.offload: .* 40 GiB .*parked 29.6 \(learner 15.5, inference 14.2\).*; set it to never",
    ):
        plan_run(adapted, LIBERO)


def test_servers_that_merge_adapters_keep_the_original_weights_in_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = RunConfig.model_validate({"policy": SEVEN_B, "learner": {"precision": "bf16", "micro_batch": 1}})
    merging, where = cfg.with_values({"policy.lora.merge_to_act": True}), machine(80, gpus=2)
    memory = expected_memory(cfg, LIBERO, where)
    before, after = (host_use(fitted(c, where), memory, c, LIBERO) for c in (cfg, merging))
    assert "inference" not in before
    assert after == before | {"inference": {"original weights": pytest.approx(14.2, abs=0.1)}}
    monkeypatch.setattr(Machine, "detect", lambda: Machine(32, 24 * GIB, where.gpus))
    assert plan_run(cfg, LIBERO).learners
    with pytest.raises(PlanError, match=r"^policy.lora.merge_to_act: .*inference 14.2 .*; set it to false"):
        plan_run(merging, LIBERO)


def test_each_node_holds_its_part_in_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = large(zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu").with_values({"placement.nodes": 2})
    cfg, where = cfg.with_values({"placement.mode": "collocated"}), machine(80)
    plan, memory = fitted(cfg, where), expected_memory(cfg, LIBERO, where)
    assert len(plan.learners) == 2
    first, second = (host_use(plan, memory, cfg, LIBERO, node) for node in (0, 1))
    assert first["learner"] == pytest.approx({"optimizer": 41.9, "gradients": 27.9, "weights": 7.0}, abs=0.1)
    assert second["learner"] == first["learner"]
    assert second["checkpoint"].keys() == {"state"}, "the first rank alone writes the policy"
    monkeypatch.setattr(Machine, "detect", lambda: Machine(32, 64 * GIB, where.gpus))
    with pytest.raises(PlanError, match=r"node 0 has 64 GiB of main memory and would hold"):
        plan_run(cfg, LIBERO)


@pytest.mark.parametrize(("gib", "fits"), [(80, True), (24, True), (16, False)])
def test_the_recipe_for_one_gpu(
    gib: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Machine, "detect", lambda: machine(gib))
    monkeypatch.setattr("vla_rl.commands.plan.env_spec", lambda env: LIBERO)
    status = main(["plan", str(RECIPE), "--json", str(tmp_path / "plan.json")])
    shown = capsys.readouterr()
    if not fits:
        assert status == 2
        assert "has 16 GiB and would hold" in shown.err.replace("\n", " ")
        return
    assert status == 0
    record = json.loads((tmp_path / "plan.json").read_text())
    assert not record["offload"], "frozen weights are held once"
    roles = record["memory_gib"]["devices"]["0"]
    assert roles["learner"].keys() == {"weights", "gradients", "optimizer", "activations", "context"}
    workers = load_config(RECIPE).placement.env_workers
    assert roles["drawing"] == {"contexts": pytest.approx(0.3 * workers)}, "they draw on the only device"
    assert sum(sum(parts.values()) for parts in roles.values()) < gib
    assert "memory of a device" in shown.out
    assert "activations" in shown.out
    assert "main memory: env workers" in shown.out
    assert record["memory_gib"]["host"]["checkpoint"]["policy"] == pytest.approx(14.1, abs=0.3)


def test_the_recipe_for_one_gpu_is_what_it_says() -> None:
    cfg = load_config(RECIPE)
    assert (cfg.policy.size, cfg.learner.precision, cfg.learner.activation_checkpointing) == ("7b", "bf16", True)
    assert cfg.policy.lora is not None
    assert cfg.env.name == "libero"


def test_only_learners_on_cores_keep_their_memory() -> None:
    cfg = large()
    for where, kept in ((machine(80), False), (Machine(cpus=4, memory=GIB, gpus=()), True)):
        plan = make_plan(cfg, Resources.of(where, cfg))
        assert ("MALLOC_MMAP_MAX_" in variables(plan, plan.learners[0], where.gpus)) is kept
        assert "MALLOC_MMAP_MAX_" not in variables(plan, plan.servers[0], where.gpus)
