"""What a large policy needs of the learner: checkpointed activations, offloading, and gradients summed in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.learner.learner_tools import config, make_learner, parameters, random_batch
from tests.policies.policy_helpers import rate
from vla_rl.policies.base.policy import PolicyInput

STAGES: dict[str, dict[str, Any]] = {
    "0": {"zero_stage": 0},
    "1": {"zero_stage": 1},
    "2": {"zero_stage": 2},
    "3": {"zero_stage": 3},
    "1, optimizer offloaded": {"zero_stage": 1, "offload_optimizer": "cpu"},
    "2, optimizer offloaded": {"zero_stage": 2, "offload_optimizer": "cpu"},
    "3, all offloaded": {"zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
}


def learner_of(**settings: Any) -> Any:
    return make_learner(config(policy={"size": "nano", "chunk_size": 4}, learner={"lr": 1e-3} | settings))


def updated(**settings: Any) -> dict[str, np.ndarray]:
    learner = learner_of(micro_batch=5, **settings)
    learner.update(random_batch())
    return parameters(learner)


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return float(np.sqrt(sum(float(np.square(a[key] - b[key]).sum()) for key in b)))


@pytest.fixture(scope="module")
def plain() -> dict[str, np.ndarray]:
    return updated()


@pytest.mark.parametrize("name", ["0", "1", "2, optimizer offloaded", "3", "3, all offloaded"])
def test_checkpointing_and_offloading_leave_the_update_as_it_is(name: str, plain: dict[str, np.ndarray]) -> None:
    settings = STAGES[name]
    apart = distance(updated(activation_checkpointing=True, **settings), plain)
    assert apart < 1e-3 * distance(parameters(learner_of()), plain)
    if not settings["zero_stage"]:
        assert apart == 0.0


@pytest.mark.exhaustive  # compiling takes a minute; tests/inference compiles the same blocks in every run
def test_compiled_blocks_leave_the_update_as_it_is(plain: dict[str, np.ndarray]) -> None:
    """Also where they are computed twice, and through ZeRO's hooks. Names stay those of the weights."""
    found = updated(compile_blocks=True, activation_checkpointing=True, zero_stage=1)
    assert 0 < distance(found, plain) < 1e-3 * distance(parameters(learner_of()), plain)


@pytest.mark.parametrize("settings", STAGES.values(), ids=STAGES)
def test_bf16_gradients_are_summed_in_float32(settings: dict) -> None:
    """12 micro-batches of 2^-9 of the first: bfloat16, which has 8 bits, would lose each of them."""
    engine = learner_of(precision="bf16", lr=0.0, **settings)._engine
    norms = []
    for small in (0, 12):
        for i in range(small + 1):
            images = torch.full((1, 1, 48, 48, 3), 100, dtype=torch.uint8)
            seen = PolicyInput(images, torch.zeros(1, 3), torch.zeros(1, dtype=torch.long), torch.zeros(1))
            output = rate(engine, seen)
            loss = output.logprobs.sum() + output.values.sum()
            engine.set_gradient_accumulation_boundary(i == small)
            engine.backward(loss * (1.0 if i == 0 else 2.0**-9))
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    assert norms[1] / norms[0] == pytest.approx(1 + 12 * 2.0**-9, rel=2e-3)


@pytest.mark.parametrize("name", ["0", "1", "2, optimizer offloaded"])
def test_a_saved_bf16_learner_goes_on_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    """Master weights are part of the state: those of stage 1 are in another of DeepSpeed's optimizers."""
    straight, resumed = (learner_of(precision="bf16", **STAGES[name]) for _ in range(2))
    straight.update(random_batch(0))
    straight.save(tmp_path)
    resumed.load(tmp_path)
    found = []
    for learner in (straight, resumed):
        learner.update(random_batch(1, policy_version=1))
        found.append(parameters(learner))
    assert all(np.array_equal(found[0][key], found[1][key]) for key in found[0])
