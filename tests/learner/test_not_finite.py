"""Gradients that are not finite: such a step leaves no trace. Weights that are not finite: they are not loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.learner.learner_tools import config, make_learner, parameters, random_batch, run_ranks
from vla_rl.core.errors import UserError
from vla_rl.core.finite import all_finite, require_finite
from vla_rl.core.records import SuperBatch

NANO = {"name": "openvla_oft", "chunk_size": 4, "size": "nano"}


def poisoned(batch: SuperBatch, name: str) -> SuperBatch:
    """One number of one array is none."""
    array = getattr(batch, name).copy()
    array.flat[0] = np.nan
    return replace(batch, **{name: array})


@pytest.mark.parametrize(
    ("name", "stage", "precision"),
    [
        ("proprio", 0, "fp32"),
        ("proprio", 3, "fp32"),
        ("proprio", 0, "bf16"),
        ("rewards", 0, "fp32"),
    ],
)
def test_a_step_that_is_not_finite_leaves_no_trace(name: str, stage: int, precision: str) -> None:
    settings = {"zero_stage": stage, "precision": precision, "lr": 1e-3}
    cfg = config(
        learner=settings,
        algo={"name": "ppo", "minibatches": 1},
        policy=NANO,
    )
    straight, learner = make_learner(cfg), make_learner(cfg)
    for each in (straight, learner):
        assert each.update(random_batch())["learner/skipped_steps"] == 0
    before = parameters(learner)
    metrics = learner.update(poisoned(random_batch(1, policy_version=1), name))
    assert metrics["learner/skipped_steps"] == metrics["learner/optimizer_steps"] == 1
    assert all(np.array_equal(before[name], value) for name, value in parameters(learner).items())
    for each in (straight, learner):
        each.update(random_batch(2, policy_version=2))
    after = parameters(learner)
    assert all(np.array_equal(value, after[name]) for name, value in parameters(straight).items()), "moments, too"
    assert any(not np.array_equal(before[name], after[name]) for name in after)


def _one_rank_is_poisoned(rank: int, world_size: int, port: int) -> list[dict[str, np.ndarray]]:
    """Weights before and after an update in which only rank 1 sees numbers that are not finite, and after the next."""
    learner = make_learner(
        config(learner={"ranks": world_size, "zero_stage": 2, "lr": 1e-3}, policy=NANO), rank, world_size, port
    )
    learner.update(random_batch())
    seen = [parameters(learner)]
    batch = random_batch(1, policy_version=1)
    if rank == 1:
        batch = replace(batch, proprio=np.full_like(batch.proprio, np.nan))
    metrics = learner.update(batch)
    assert metrics["learner/skipped_steps"] == metrics["learner/optimizer_steps"]
    seen.append(parameters(learner))
    assert learner.update(random_batch(2, policy_version=2))["learner/skipped_steps"] == 0
    return [*seen, parameters(learner)]


@pytest.mark.slow
def test_what_one_rank_finds_all_skip() -> None:
    ranks = run_ranks(_one_rank_is_poisoned, 2)
    for before, after, _ in ranks:
        assert all(np.array_equal(before[name], value) for name, value in after.items())
    first, second = (seen[2] for seen in ranks)
    assert all(np.array_equal(value, second[name]) for name, value in first.items()), "ranks stay alike"
    assert any(not np.array_equal(value, ranks[0][1][name]) for name, value in first.items())


@pytest.mark.parametrize("part", ["trunk", "value"])
def test_a_state_with_weights_that_are_not_finite_is_refused(part: str, tmp_path: Path) -> None:
    """Not one whose weights are finite."""
    learner, resumed = (make_learner(config(policy=NANO)) for _ in range(2))
    learner.save(tmp_path / "good")
    weights = learner.policy.trunk_parameters() if part == "trunk" else learner.policy.value_parameters()
    next(weights).data.view(-1)[-1] = float("nan")
    learner.save(tmp_path / "bad")
    resumed.load(tmp_path / "good")
    with pytest.raises(UserError, match=rf"{tmp_path}/bad holds weights that are not finite .* choose another"):
        resumed.load(tmp_path / "bad")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_found(value: float) -> None:
    tensors = [torch.zeros(3), torch.arange(4), torch.ones(2, 2, dtype=torch.bfloat16), torch.zeros(0)]
    assert all_finite(tensors)
    assert all_finite([])
    tensors[2][1, 0] = value
    assert not all_finite(tensors)
    with pytest.raises(UserError, match=r"runs/x/policy holds weights that are not finite"):
        require_finite(tensors, "runs/x/policy")
