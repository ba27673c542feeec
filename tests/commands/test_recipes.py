"""The published recipes: their numbers, as their authors published them, and that each of them runs."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests import ROOT
from vla_rl.commands.cli import main
from vla_rl.commands.train import train
from vla_rl.config.loading import dump_config, load_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.actions import end_effector
from vla_rl.core.machine import Gpu, Machine
from vla_rl.core.records import EnvSpec
from vla_rl.placement.checks import machine_checks
from vla_rl.placement.planner import plan_run
from vla_rl.placement.processes import make_plan
from vla_rl.placement.resources import Resources

FOLDER = ROOT / "configs" / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
SMALL_MACHINE = Machine(cpus=2, memory=1 << 40, gpus=())
GPUS = Machine(cpus=128, memory=1 << 40, gpus=(Gpu("any", 80 << 30),) * 8)

# Read in the publications, not in our files: examples/run_openvla_oft_rl_libero.sh and verl/workers (SimpleVLA-RL),
# train_ms3_ppo.py and openvla_train.py (RL4VLA), libero_10_grpo_openvlaoft.yaml and maniskill_ppo_openvla.yaml (RLinf),
# libero_spatial_ppo_openpi.yaml (RLinf), stage_3_ript/libero_spatial.sh and openvla_oft_rl.yaml (RIPT-VLA).
# "per_step": what one optimizer step trains on.
# "gpus": README.md (SimpleVLA-RL, with 80 GB each; RIPT-VLA), documentation and maniskill_ppo_openvla.yaml (RLinf).
PUBLISHED: dict[str, dict[str, Any]] = {
    "simplevla_rl_libero": {
        "algo": {"group_size": 8, "clip_low": 0.2, "clip_high": 0.28, "average": "episodes", "ratio_level": "token"},
        "policy": {"temperature": 1.6, "chunk_size": 8, "lora": None, "jpeg": True, "resize": "lanczos"},
        "env": {"suite": "libero_10", "max_episode_steps": 512, "wrist_camera": False, "proprio": False},
        "learner": {"lr": 5e-6, "max_grad_norm": 1.0, "weight_decay": 0.01, "betas": (0.9, 0.999)},
        "groups": 64,
        "per_step": ("episodes", 128),
        "envs": 64,
        "gpus": 8,
    },
    "rl4vla_maniskill": {
        "algo": {
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "bootstrap": "never",
            "value_coef": 0.142857,
            "ratio_level": "action",
        },
        "policy": {"temperature": 1.0, "chunk_size": 1, "detach_value": False, "decoding": "autoregressive"},
        "lora": {"rank": 32, "alpha": 16},
        "env": {"max_episode_steps": 80, "shaping": 0.2, "shader": "default"},
        "learner": {"lr": 1e-4, "value_lr": 3e-3, "max_grad_norm": 1.43, "micro_batch": 8},
        "per_step": ("chunks", 8 * 20),
        "envs": 64,
        "gpus": 1,
    },
    "rlinf_libero10_grpo": {
        "algo": {"group_size": 8, "clip_high": 0.28, "dual_clip": None, "max_filtered": 0},
        "policy": {
            "temperature": 1.6,
            "chunk_size": 8,
            "lora": None,
            "stop_token": False,
            "jpeg": False,
            "resize": "bilinear",
            "center_crop": False,
        },
        "env": {"suite": "libero_10", "max_episode_steps": 512, "settle_steps": 15},
        "train": {"eval_sampled": True},
        "learner": {"lr": 2e-5, "max_grad_norm": 1.0, "micro_batch": 32},
        "groups": 8 * 16,
        "per_step": ("chunks", 16384),
        "envs": 64,
        "gpus": 8,
    },
    "rlinf_maniskill_ppo": {
        "algo": {"gamma": 0.99, "bootstrap": "always", "huber_delta": 10.0, "value_clip": 0.2, "value_coef": 1.0},
        "policy": {"temperature": 1.0, "chunk_size": 1, "detach_value": False, "decoding": "autoregressive"},
        "lora": {"rank": 32, "alpha": 32},
        "env": {"max_episode_steps": 80, "shaping": 0.2, "shader": "default"},
        "train": {"eval_sampled": True},
        "learner": {"lr": 1e-4, "value_lr": 3e-3, "max_grad_norm": 10.0, "micro_batch": 80},
        "per_step": ("chunks", 640),
        "envs": 128,
        "gpus": 8,
    },
    "rlinf_pi0_libero": {
        "algo": {"gamma": 0.99, "bootstrap": "never", "huber_delta": 10.0, "value_clip": 0.2, "epochs": 4},
        "policy": {
            "size": "base",
            "chunk_size": 5,
            "denoise_steps": 4,
            "noise": "sde",
            "noise_level": 0.5,
            "random_steps": "one",
            "train_expert_only": True,
        },
        "env": {"suite": "libero_spatial", "max_episode_steps": 240, "wrist_camera": True, "proprio": True},
        "learner": {"lr": 5e-6, "value_lr": 1e-4, "max_grad_norm": 1.0, "micro_batch": 128, "betas": (0.9, 0.95)},
        "per_step": ("chunks", 2048),
        "envs": 64,
        "gpus": 8,
    },
    "ript_libero": {
        "algo": {"group_size": 8, "baseline": "leave_one_out", "scale": "none", "clip_low": 0.1, "clip_high": 0.1},
        "policy": {"chunk_size": 8, "head": "l1"},
        "lora": {"rank": 32, "alpha": 16, "targets": ("language_model",)},
        "env": {"suite": "libero_spatial", "max_episode_steps": None, "wrist_camera": True, "proprio": True},
        "learner": {"lr": 5e-5, "weight_decay": 1e-4, "max_grad_norm": 1.0},
        "groups": 24,
        "per_step": ("episodes", 4 * 4),
        "envs": 4,
        "gpus": 4,
    },
}


def _recipe(name: str, *overrides: str, machine: Machine | None = None) -> RunConfig:
    return load_config(FOLDER / f"{name}.yaml", overrides, machine_checks(machine) if machine else ())


def _values(group: Any, expected: dict[str, Any]) -> dict[str, Any]:
    return {key: getattr(group, key) for key in expected}


def test_every_recipe_is_in_the_table() -> None:
    assert {path.stem for path in RECIPES} == {*PUBLISHED, "openvla_oft_lora_1gpu"}, "the last is our own"


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("machine", [SMALL_MACHINE, GPUS], ids=["two cores", "eight GPUs"])
def test_it_loads_and_takes_a_checkpoint(name: str, machine: Machine, tmp_path: Path) -> None:
    config = _recipe(name, f"policy.checkpoint={tmp_path}", machine=machine)
    size = PUBLISHED[name]["policy"].get("size", "7b")
    assert (config.policy.size, config.policy.checkpoint) == (size, str(tmp_path))
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config
    assert _recipe(name).policy.checkpoint is None
    plan = make_plan(config, Resources.of(machine, config))
    assert len(plan.learners) == len(machine.gpus or [0])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_stand_in_it(name: str) -> None:
    config, published = _recipe(name), PUBLISHED[name]
    for group in published.keys() & {"algo", "policy", "env", "learner", "train"}:
        assert _values(getattr(config, group), published[group]) == published[group]
    if "lora" in published:
        assert _values(config.policy.lora, published["lora"]) == published["lora"]
    assert config.mode == "sync"
    assert config.placement.env_workers * config.placement.envs_per_worker == published["envs"]
    episodes, steps = config.train.batch_episodes, config.algo.minibatches
    if "groups" in published:
        assert episodes == published["groups"] * config.algo.groups.size
    unit, per_step = published["per_step"]
    chunks = 1 if unit == "episodes" else config.env.max_episode_steps // config.policy.chunk_size
    assert episodes * chunks / steps == per_step


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_fits_on_the_published_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inference and learner at the same time, in what a card of 80 GB offers to a process."""
    config, count = _recipe(name), PUBLISHED[name]["gpus"]
    env, views = config.env, ("main", "wrist") if getattr(config.env, "wrist_camera", False) else ("main",)
    spec = EnvSpec(
        env.name, views, env.image_size, 8 * env.proprio, end_effector(), env.max_episode_steps or 220, ("do it",)
    )
    monkeypatch.setattr(Machine, "detect", lambda: Machine(128, 1 << 40, (Gpu("any", 79 << 30),) * count))
    plan = plan_run(config, spec)
    assert len(plan.learners) == count
    assert not plan.offload


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_value_names_its_source(name: str) -> None:
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    values = [line for line in lines if line.partition(":")[2]]
    assert [line for line in values if "#" not in line] in (["  name: libero"], ["  name: maniskill"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides", "shown"),
    [
        pytest.param("simplevla_rl_libero", [], "plan: collocated", marks=pytest.mark.libero),
        pytest.param("rlinf_maniskill_ppo", ["env.tasks=[PushCube-v1]"], "plan: hybrid", marks=pytest.mark.maniskill),
    ],
)
def test_its_plan_is_shown(
    name: str, overrides: list[str], shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "detect", lambda: SMALL_MACHINE)
    assert main(["plan", str(FOLDER / f"{name}.yaml"), *overrides]) == 0
    assert shown in capsys.readouterr().out


# --- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Small:
    """The least that leaves a recipe its structure: whole groups, all epochs, several optimizer steps in each of them,
    its placement and precision."""

    episodes: int  # of one super-batch
    overrides: tuple[str, ...]
    filtered: int = 0  # episodes that dynamic sampling replaces: no random policy succeeds


LIBERO = ("env.tasks=[0]", "env.max_episode_steps=16", "env.settle_steps=0", "env.antialiasing=false")
MANISKILL = ("env.max_episode_steps=4",)
REPLACED_ONCE = (*LIBERO, "algo.max_filtered=1")
LORA = ("policy.lora.rank=4",)
SMALL = {
    "simplevla_rl_libero": Small(8, REPLACED_ONCE, filtered=8),
    "rl4vla_maniskill": Small(8, MANISKILL + LORA),
    "rlinf_libero10_grpo": Small(16, LIBERO),
    "rlinf_maniskill_ppo": Small(8, MANISKILL + LORA),
    "rlinf_pi0_libero": Small(8, LIBERO),
    "ript_libero": Small(8, REPLACED_ONCE + LORA, filtered=8),
}
SHARED = (
    *("policy.size=nano", "env.image_size=64", "train.iterations=2", "train.eval_episodes=0"),
    *("train.checkpoint_every=10", "placement.env_workers=1", "placement.envs_per_worker=2", "placement.devices=2"),
    "algo.minibatches=4",
)


def _assets(config: RunConfig) -> list[str]:
    """A task of the package where those of the recipe have not been downloaded."""
    there = Path(os.environ.get("MS_ASSET_DIR", "~/.maniskill")).expanduser() / "data/tasks/bridge_v2_real2sim_dataset"
    return [] if config.env.name != "maniskill" or there.exists() else ["env.tasks=[PushCube-v1]"]


def _optimizer_steps(run: Path) -> int:
    """As AdamW has counted them."""
    (file,) = (run / "checkpoints/000002").rglob("*-of-*.safetensors")
    return max(int(value) for name, value in load_file(file).items() if name.endswith(":step"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.maniskill if "maniskill" in n else pytest.mark.libero) for n in SMALL],
)
def test_two_iterations(name: str, tmp_path: Path) -> None:
    small = SMALL[name]
    overrides = [*SHARED, *small.overrides, f"train.batch_episodes={small.episodes}", f"log.dir={tmp_path}"]
    config = _recipe(name, *overrides, "log.name=run", *_assets(_recipe(name)))
    assert train(config) == 0
    run = tmp_path / "run"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["iteration"] for m in metrics] == [1, 2]
    for m in metrics:
        ended = sum(m[f"episodes/{name}"] for name in ("trained", "stale", "filtered", "evaluated", "lost"))
        under_way = m["episodes/running"] + m["episodes/buffered"] + m["episodes/in_training"]
        assert m["episodes/started"] == ended + under_way
        assert all(math.isfinite(m[f"learner/{loss}"]) for loss in ("policy_loss", "value_loss", "grad_norm"))
        assert m["rollout/staleness_max"] == 0
        assert "busy/shared_devices" in m, "all recipes are collocated or hybrid: inference and learner take turns"
    last = metrics[-1]
    assert (last["episodes/trained"], last["episodes/filtered"]) == (2 * small.episodes, small.filtered)
    assert _optimizer_steps(run) == 2 * config.algo.epochs * config.algo.minibatches
