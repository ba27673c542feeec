"""Policy and value head are clipped apart, each by the norm of its own gradient, as plain torch would do it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from algos import make_algorithm
from algos.denominators import LossDenominators
from tests.learner.learner_tools import SPEC, config, make_learner, random_batch, run_ranks
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.build import build_policy

NANO = {"name": "openvla_oft", "chunk_size": 4, "size": "nano"}
ALGO = {"name": "ppo", "minibatches": 1}
STAGES = {
    "plain": {},
    "zero 1": {"zero_stage": 1},
    "zero 2, offloaded": {"zero_stage": 2, "offload_optimizer": "cpu"},
    "zero 3": {"zero_stage": 3},
}
LIMITS = {"neither": 1e6, "the larger one": 0.3, "both": 1e-3}


def settings(limit: float, **learner: Any) -> Any:
    return config(policy=NANO, algo=ALGO, learner={"max_grad_norm": limit, "lr": 1e-3} | learner)


def is_value(name: str) -> bool:
    return name.startswith("value_head.")


def gradients() -> dict[str, torch.Tensor]:
    """Of the loss of the whole batch: no engine, one backward pass."""
    cfg, batch = settings(1.0), random_batch()
    policy = build_policy(cfg.policy, SPEC, cfg.seed, cfg.algo.prompts(SPEC.instructions))
    algorithm = make_algorithm(cfg.algo)
    targets = algorithm.targets(batch)
    at, t = batch.obs_row, torch.from_numpy
    seen = PolicyInput(t(batch.images[at]), t(batch.proprio[at]), t(batch.task), t(batch.elapsed[at]))
    record = {name: t(array) for name, array in batch.record.items()}
    output = policy(seen, record, cfg.policy.temperature_at(0), cfg.policy.detach_value)
    denominators = LossDenominators.of(batch.num_steps, targets.trains_value)
    rows = targets.rows(np.arange(batch.num_chunks))
    loss, _ = algorithm.loss(output.logprobs, output.entropy, output.values, rows, denominators, 0)
    loss.backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def norms_of(found: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Of the policy's gradient, and of the value head's."""
    return tuple(
        math.sqrt(sum(float(g.double().square().sum()) for name, g in found.items() if is_value(name) == part))
        for part in (False, True)
    )


def stepped_on(folder: Path, beta: float) -> dict[str, torch.Tensor]:
    """The gradients that AdamW's first step was made on: its first moment is theirs, times 1 - beta."""
    files = [load_file(path) for path in sorted((folder / "state").glob("*.safetensors"))]
    suffix = ":exp_avg"
    return {n.removesuffix(suffix): x / (1 - beta) for file in files for n, x in file.items() if n.endswith(suffix)}


def updated(folder: Path, limit: float, learner: dict[str, Any], ranks: tuple = ()) -> dict[str, float]:
    made = make_learner(settings(limit, **learner), *ranks)
    metrics = made.update(random_batch())
    made.save(folder)
    return metrics


def assert_clipped_apart(folder: Path, metrics: dict[str, float], limit: float, expected: dict) -> None:
    found, norms = stepped_on(folder, beta=0.9), norms_of(expected)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        norm = norms[is_value(name)]
        clipped = gradient * min(1.0, limit / (norm + 1e-6))
        assert (found[name] - clipped).abs().max() < 1e-4 * min(norm, limit), name
    measured = [metrics[f"learner/{part}grad_norm"] for part in ("policy_", "value_", "")]
    assert measured == pytest.approx([*norms, math.hypot(*norms)], rel=1e-4)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    found = gradients()
    small, large = sorted(norms_of(found))
    assert LIMITS["both"] < small < LIMITS["the larger one"] < large < LIMITS["neither"]
    return found


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_each_part_is_clipped_by_its_own_norm(limit: float, tmp_path: Path, expected: dict) -> None:
    assert_clipped_apart(tmp_path, updated(tmp_path, limit, {}), limit, expected)


@pytest.mark.parametrize("stage", [name for name in STAGES if name != "plain"])
def test_zero_clips_likewise(stage: str, tmp_path: Path, expected: dict) -> None:
    limit = LIMITS["the larger one"]
    metrics = updated(tmp_path, limit, STAGES[stage] | {"micro_batch": 3})
    assert_clipped_apart(tmp_path, metrics, limit, expected)


def test_zero_3_knows_the_norm_of_a_part_that_it_steps_on_in_pieces(
    tmp_path: Path, expected: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of weights by the billion."""
    from vla_rl.learner import deepspeed_engine

    whole = deepspeed_engine._engine_config

    def in_pieces(*args: Any) -> dict[str, Any]:
        made = whole(*args)
        return made | {"zero_optimization": made["zero_optimization"] | {"sub_group_size": 1000}}

    monkeypatch.setattr(deepspeed_engine, "_engine_config", in_pieces)
    learner = make_learner(settings(1.0, zero_stage=3))
    assert len(learner._engine.optimizer.fp16_groups) > 4
    limit = LIMITS["the larger one"]
    assert_clipped_apart(tmp_path, updated(tmp_path, limit, {"zero_stage": 3}), limit, expected)


@pytest.mark.parametrize("stage", [0, 1])
def test_bf16_clips_likewise(stage: int, tmp_path: Path) -> None:
    limit = LIMITS["both"]
    metrics = updated(tmp_path, limit, {"precision": "bf16", "zero_stage": stage})
    assert norms_of(stepped_on(tmp_path, beta=0.9)) == pytest.approx((limit, limit), rel=1e-3)
    assert min(metrics["learner/policy_grad_norm"], metrics["learner/value_grad_norm"]) > 10 * limit


def _on_ranks(rank: int, world_size: int, port: int, folder: Path) -> list[dict[str, float]]:
    limit, made = LIMITS["the larger one"], []
    for name, stage in STAGES.items():
        ranks = (rank, world_size, port)
        made.append(updated(folder / name, limit, stage | {"ranks": world_size, "micro_batch": 3}, ranks))
    return made


@pytest.mark.slow
def test_two_ranks_clip_like_one(tmp_path: Path, expected: dict) -> None:
    first, second = run_ranks(_on_ranks, 2, tmp_path)
    assert first == second
    for name, metrics in zip(STAGES, first, strict=True):
        assert_clipped_apart(tmp_path / name, metrics, LIMITS["the larger one"], expected)
