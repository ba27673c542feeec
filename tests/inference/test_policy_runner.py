"""PolicyRunner: batches are padded to few sizes, and the answers to the rows that were asked for do not change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.learner.learner_tools import SPEC, config
from vla_rl.core.ipc.publication import publication
from vla_rl.core.records import ActionBatch, Observation
from vla_rl.inference.policy_runner import PolicyRunner
from vla_rl.policies.base.blocks import blocks_of
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.build import build_policy

POLICIES: dict[str, dict[str, Any]] = {
    "parallel": {"name": "openvla_oft", "size": "nano", "chunk_size": 2},
    "autoregressive": {"name": "openvla_oft", "size": "nano", "chunk_size": 2, "decoding": "autoregressive"},
    "pi0": {"name": "pi0", "chunk_size": 2},
}


def requests(runner: PolicyRunner, rows: int) -> tuple[Observation, dict[str, np.ndarray]]:
    """The first rows of fixed ones."""
    rng = np.random.default_rng(0)
    size = SPEC.image_size
    images = rng.integers(0, 256, (8, len(SPEC.views), size, size, 3), np.uint8)
    proprio, task = rng.normal(size=(8, SPEC.proprio_dim)).astype(np.float32), np.arange(8, dtype=np.int32) % 2
    seen = Observation(images[:rows], proprio[:rows], task[:rows], np.zeros(rows, np.float32))
    layout = runner._config.policy.spec(SPEC).draws
    return seen, {name: np.stack([numbers.draw(rng) for _ in range(8)])[:rows] for name, numbers in layout.items()}


def answers(runner: PolicyRunner, rows: int) -> tuple[ActionBatch, list[int]]:
    """To these requests; and the sizes of the batches that the policy got."""
    act, sizes = runner.policy.act, list[int]()

    def spy(seen: Any, *rest: Any) -> Any:
        sizes.append(len(seen.task))
        assert all(len(getattr(seen, f.name)) == sizes[-1] for f in fields(seen))
        return act(seen, *rest)

    with patch.object(runner.policy, "act", spy):
        return runner.act(*requests(runner, rows), np.arange(rows) % 2 == 0), sizes


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch_sizes", [(4,), pytest.param((), marks=pytest.mark.exhaustive)], ids=["one size", "any size"]
)
def test_compiled_blocks_answer_alike_also_after_a_weight_sync(batch_sizes: tuple[int, ...]) -> None:
    """With adapters, whose weights change in place. The compiler makes one version for each kind of block, and another
    one where batches have more sizes than one."""
    plain = config(policy={"name": "openvla_oft", "size": "nano", "chunk_size": 4, "lora": {"rank": 2}})
    chosen = {"placement.compile_blocks": True, "placement.batch_sizes": batch_sizes}
    eager, compiled = (build_policy(plain.policy, SPEC, seed=0) for _ in range(2))
    servers = [PolicyRunner(eager, plain, None, "cpu")]
    servers.append(PolicyRunner(compiled, plain.with_values(chosen), None, "cpu"))
    assert eager.state_dict().keys() == compiled.state_dict().keys(), "weight syncs find all weights"
    assert all(block._compiled_call_impl is not None for block in blocks_of(compiled))
    before = answers(servers[0], 4)[0]
    for change in (0.0, 0.3):
        for policy in (eager, compiled):
            with torch.no_grad():
                for weight in policy.trained_parameters().values():
                    weight += change * torch.linspace(-1, 1, weight.numel()).view_as(weight)
        for rows in (1, 4, 3):
            expected, found = (answers(server, rows)[0] for server in servers)
            assert np.abs(found.logprobs - expected.logprobs).max() < 1e-4
            assert np.abs(found.values - expected.values).max() < 1e-4
    assert np.abs(answers(servers[1], 4)[0].logprobs - before.logprobs).max() > 0.01


class Published:
    """Weights of one version, which are those that the policy has."""

    def __init__(self, version: int) -> None:
        self.published_version, self.version = publication(version), -1

    def refresh(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        self.version = self.published_version
        return True


@pytest.mark.parametrize("kind", POLICIES)
def test_a_version_is_sampled_at_the_temperature_at_which_it_is_trained(kind: str) -> None:
    schedule = {"temperature": 2.0, "temperature_end": 0.5, "temperature_iterations": 4}
    cfg = config(policy=POLICIES[kind] | schedule)
    policy = build_policy(cfg.policy, SPEC, seed=0)
    runner: Any = PolicyRunner(policy, cfg, Published(3), "cpu")  # type: ignore[arg-type]
    assert runner.refresh() == 3
    seen, draws = requests(runner, 4)
    chosen = runner.act(seen, draws, np.arange(4) % 2 == 0)
    inputs = PolicyInput(**{f.name: torch.from_numpy(getattr(seen, f.name)) for f in fields(seen)})
    record = {name: torch.from_numpy(array) for name, array in chosen.record.items()}
    temperatures = cfg.policy.temperature_at(3), 2.0, 0.5
    assert temperatures[0] == 0.875
    with torch.no_grad():
        rated = [policy(inputs, record, temperature).logprobs.numpy() for temperature in temperatures]
    apart = [np.abs(logprobs - chosen.logprobs).max() for logprobs in rated]
    assert apart[0] < 1e-4
    assert min(apart[1:]) > 0.01, "another temperature gives other numbers"
