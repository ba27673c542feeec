"""PolicyRunner: batches are padded to few sizes, and the answers to the rows that were asked for do not change."""

from __future__ import annotations

from dataclasses import fields
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.learner.learner_tools import SPEC, config
from vla_rl.core.records import ActionBatch, Observation
from vla_rl.inference.policy_runner import PolicyRunner
from vla_rl.policies.build import build_policy

POLICIES: dict[str, dict[str, Any]] = {
    "parallel": {"name": "openvla_oft", "size": "nano", "chunk_size": 2},
    "autoregressive": {"name": "openvla_oft", "size": "nano", "chunk_size": 2, "decoding": "autoregressive"},
    "pi0": {"name": "pi0", "chunk_size": 2},
}


def answers(runner: PolicyRunner, rows: int) -> tuple[ActionBatch, list[int]]:
    """To the first rows of fixed requests; and the sizes of the batches that the policy got."""
    rng, sizes = np.random.default_rng(0), []
    size = SPEC.image_size
    images = rng.integers(0, 256, (8, len(SPEC.views), size, size, 3), np.uint8)
    proprio, task = rng.normal(size=(8, SPEC.proprio_dim)).astype(np.float32), np.arange(8, dtype=np.int32) % 2
    seen = Observation(images[:rows], proprio[:rows], task[:rows], np.zeros(rows, np.float32))
    layout = runner._config.policy.spec(SPEC).draws
    draws = {name: np.stack([numbers.draw(rng) for _ in range(8)])[:rows] for name, numbers in layout.items()}
    act = runner.policy.act

    def spy(seen: Any, *rest: Any) -> Any:
        sizes.append(len(seen.task))
        assert all(len(getattr(seen, f.name)) == sizes[-1] for f in fields(seen))
        return act(seen, *rest)

    with patch.object(runner.policy, "act", spy):
        return runner.act(seen, draws, np.arange(rows) % 2 == 0), sizes


@pytest.mark.parametrize("kind", POLICIES)
def test_padding_changes_no_answer(kind: str) -> None:
    plain = config(policy=POLICIES[kind])
    padded = plain.with_values({"placement.batch_sizes": (1, 4, 6)})
    policy = build_policy(plain.policy, SPEC, seed=0)
    runners = [PolicyRunner(policy, cfg, None, "cpu") for cfg in (plain, padded)]
    for rows, size in ((1, 1), (3, 4), (5, 6), (7, 7)):
        (expected, as_they_are), (found, sizes) = (answers(runner, rows) for runner in runners)
        assert (as_they_are, sizes) == ([rows], [size])
        assert found.actions.shape == expected.actions.shape
        assert np.abs(found.actions - expected.actions).max() < 1e-5
        assert np.abs(found.logprobs - expected.logprobs).max() < 1e-5
        assert np.abs(found.values - expected.values).max() < 1e-5
        for name, array in expected.record.items():
            assert np.allclose(found.record[name], array, atol=1e-5), name
