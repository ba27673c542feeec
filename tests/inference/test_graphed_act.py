"""Recorded inference answers like plain inference.

Here a call is recorded, and replaying repeats it in place. scripts/check_gpu.py records CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.inference.test_policy_runner import POLICIES, requests
from tests.learner.learner_tools import SPEC, config
from vla_rl.core.errors import UserError
from vla_rl.core.records import ActionBatch
from vla_rl.inference.graphed_act import GraphedAct
from vla_rl.inference.policy_runner import PolicyRunner
from vla_rl.policies.base.policy import Decisions
from vla_rl.policies.build import build_policy


class Recorder:
    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, call: Callable[[], Decisions]) -> tuple[Decisions, Callable[[], None]]:
        self.recorded += 1
        fixed = call()

        def replay() -> None:
            again = call()
            for mine, new in zip(tensors(fixed), tensors(again), strict=True):
                mine.copy_(new)

        for tensor in tensors(fixed):
            tensor.zero_()  # what is recorded is not computed yet
        return fixed, replay


def tensors(decisions: Decisions) -> list[torch.Tensor]:
    return [*decisions.record.values(), decisions.logprobs, decisions.values]


def answer(runner: PolicyRunner, rows: int, row: int = 0) -> ActionBatch:
    """To fixed requests, whose first row is one of them."""
    seen, draws = requests(runner, 8)
    index = np.r_[row, 1:rows]
    seen = type(seen)(*(getattr(seen, name)[index] for name in ("images", "proprio", "task", "elapsed")))
    return runner.act(seen, {name: array[index] for name, array in draws.items()}, index % 2 == 0)


@pytest.mark.parametrize("kind", ["parallel", "pi0"])
def test_what_is_recorded_answers_alike(kind: str) -> None:
    """Other requests, other sizes of batch, other weights, and after the weights have moved."""
    plain = config(policy=POLICIES[kind])
    policy = build_policy(plain.policy, SPEC, seed=0)
    runners: list[Any] = [PolicyRunner(policy, plain, None, "cpu") for _ in range(2)]
    recorder = Recorder()
    runners[1]._graphs = GraphedAct(policy.act, recorder)

    def same(rows: int, row: int) -> None:
        expected, found = (answer(runner, rows, row) for runner in runners)
        assert np.array_equal(found.actions, expected.actions)
        assert np.array_equal(found.logprobs, expected.logprobs)
        assert np.array_equal(found.values, expected.values)

    for rows, row in ((1, 0), (3, 0), (1, 5), (3, 7)):
        same(rows, row)
    assert recorder.recorded == 2, "one for each size"
    with torch.no_grad():
        for weight in policy.trained_parameters().values():
            weight += 0.1 * torch.linspace(-1, 1, weight.numel()).view_as(weight)
    same(3, 7)
    assert recorder.recorded == 2
    runners[1].offload()
    runners[1].onload()
    same(3, 7)
    assert recorder.recorded == 3


def test_what_cannot_be_recorded_is_an_error_that_names_the_key() -> None:
    def fail(call: Callable[[], Decisions]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    cfg = config(policy=POLICIES["parallel"])
    runner: Any = PolicyRunner(build_policy(cfg.policy, SPEC, seed=0), cfg, None, "cpu")
    runner._graphs = GraphedAct(runner.policy.act, fail)
    with pytest.raises(
        UserError, match=r"placement.cuda_graphs=true: .*\(operation not permitted .*capturing\); set it"
    ):
        answer(runner, 2)
