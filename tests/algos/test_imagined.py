"""Imagined episodes in a super-batch: what they change, and what they must not."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from algos import make_algorithm
from algos.advantages import LEAST_SPREAD, imagined_advantages
from algos.denominators import LossDenominators
from algos.grpo import GRPOConfig
from algos.ppo import PPOConfig
from tests.algos.reference_algos import random_super_batch
from vla_rl.core.records import SuperBatch


def mixed(seed: int = 0, real: int = 6, imagined: int = 6) -> SuperBatch:
    """Real episodes, then imagined ones in groups of three."""
    batch = random_super_batch(np.random.default_rng(seed), real + imagined)
    version = np.where(np.arange(real + imagined) < real, -1, 4).astype(np.int32)
    group = np.where(version < 0, batch.group, -2 - (np.arange(real + imagined) // 3)).astype(np.int32)
    truncated = np.where(version < 0, batch.truncated, False)
    return replace(
        batch, model_version=version, group=group, new_episodes=real, truncated=truncated, terminated=~truncated
    )


def test_the_real_part_has_its_own_rows_only():
    batch = mixed()
    part = batch.real()
    assert (part.num_episodes, part.imagined_episodes, batch.imagined_episodes) == (6, 0, 6)
    assert part.num_chunks == batch.real_chunks == batch.offsets[6]
    assert np.array_equal(part.logprobs, batch.logprobs[: part.num_chunks])
    assert np.array_equal(part.record["tokens"], batch.record["tokens"][: part.num_chunks])
    assert np.array_equal(part.group, batch.group[:6])
    whole = random_super_batch(np.random.default_rng(0), 4)
    assert whole.real().num_chunks == whole.num_chunks


@pytest.mark.parametrize("config", [PPOConfig(), GRPOConfig(group_size=2)], ids=["ppo", "grpo"])
def test_real_chunks_are_trained_as_without_imagination(config):
    batch, algorithm = mixed(), make_algorithm(config)
    alone, together = algorithm.targets(batch.real()), algorithm.targets(batch)
    m = batch.real_chunks
    assert np.array_equal(together.advantages[:m], alone.advantages)
    assert np.array_equal(together.returns[:m], alone.returns)
    assert together.trains_value.sum() == m


def test_imagined_advantages_are_those_of_leave_one_out_in_units_of_real_returns():
    returns = np.array([1.0, 0.0, 1.0, 1.0, 0.9, 0.3, 0.6, 0.2, 0.2, 0.2])
    group = np.array([0, 1, 2, 3, -2, -2, -2, -3, -3, -3])
    spread = np.std([1.0, 0.0, 1.0, 1.0])
    expected = np.array([0.9 - 0.45, 0.3 - 0.75, 0.6 - 0.6, 0.0, 0.0, 0.0]) / spread
    assert np.allclose(imagined_advantages(returns, group, 4), expected, atol=1e-12)
    returns[:4] = 1.0
    assert np.allclose(imagined_advantages(returns, group, 4), expected * spread / LEAST_SPREAD, atol=1e-12)


def test_values_learn_nothing_from_imagined_returns():
    batch, algorithm = mixed(), make_algorithm(PPOConfig(value_clip=None))
    targets = algorithm.targets(batch)
    rows = targets.rows(slice(None))
    logprobs = torch.from_numpy(np.where(batch.step_mask[:, :, None], batch.logprobs, -1.0)).requires_grad_()
    values = torch.zeros(batch.num_chunks, requires_grad=True)
    counts = LossDenominators.of(batch.num_steps, targets.trains_value)
    loss, sums = algorithm.loss(logprobs, torch.zeros_like(logprobs), values, rows, counts, 5)
    loss.backward()
    m = batch.real_chunks
    assert values.grad[:m].abs().min() > 0
    assert values.grad[m:].abs().max() == 0
    assert logprobs.grad[m:].abs().max() > 0, "the policy does"
    explained = algorithm.finish_metrics({name: float(x) for name, x in sums.items()}, targets)["explained_variance"]
    real = batch.real()
    assert explained == pytest.approx(1 - np.var(targets.returns[:m] - real.values) / np.var(targets.returns[:m]))
