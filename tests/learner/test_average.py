"""Averaged weights: their definition, under every way to hold them, published and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.learner.learner_tools import SPEC, config, make_learner, parameters, random_batch, run_ranks
from vla_rl.core.ipc.weights import WeightPublisher, WeightReader, create_weight_buffers
from vla_rl.core.records import Observation
from vla_rl.inference.policy_runner import PolicyRunner
from vla_rl.learner.weight_average import newest_share
from vla_rl.policies.build import build_policy

NANO = {"name": "openvla_oft", "chunk_size": 4, "size": "nano"}
SETTINGS = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "zero 1, bf16": {"zero_stage": 1, "precision": "bf16"},
    "zero 2, offloaded": {"zero_stage": 2, "offload_optimizer": "cpu"},
    "zero 3": {"zero_stage": 3},
}
Arrays = dict[str, np.ndarray]


def settings(**learner: Any) -> Any:
    return config(policy=NANO, learner={"lr": 1e-3, "ema": 0.5} | learner)


def averages(learner: Any) -> Arrays:
    return {name: p.float().cpu().numpy().copy() for name, p in learner.parameters(average=True)}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The saved weights, in float32 whatever the precision of training."""
    found = {name: x for path in sorted((folder / "state").glob("*")) for name, x in load_file(path).items()}
    return {name.removesuffix(":weight"): x for name, x in found.items() if name.endswith(":weight")}


def mean_of(weights: list[dict[str, torch.Tensor]], decay: float) -> Arrays:
    shares = torch.tensor([decay ** (len(weights) - 1 - i) for i in range(len(weights))], dtype=torch.float64)
    shares /= shares.sum()
    return {n: sum(s * w[n].double() for s, w in zip(shares, weights, strict=True)).numpy() for n in weights[0]}


def train(learner: Any, folder: Path, updates: int = 3) -> list[dict[str, torch.Tensor]]:
    """The weights after each update."""
    weights = []
    for version in range(updates):
        learner.update(random_batch(version, policy_version=version))
        learner.save(folder / str(version))
        weights.append(weights_of(folder / str(version)))
    return weights


def assert_equal(a: Arrays, b: Arrays) -> None:
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[name], b[name]) for name in a)


def largest_difference(a: Arrays, b: Arrays) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.99, 1 - 1e-6])
def test_the_recursion_is_the_weighted_mean(decay: float) -> None:
    weights = np.random.default_rng(0).normal(size=50)
    average = np.nan  # the first share is 1: whatever was there is gone
    for t, w in enumerate(weights, start=1):
        share = newest_share(decay, t)
        average = w if share == 1.0 else average + share * (w - average)
        powers = decay ** np.arange(t - 1, -1, -1.0)
        assert average == pytest.approx(np.dot(powers, weights[:t]) / powers.sum(), abs=1e-10)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_average_is_that_of_the_weights_and_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    learner, resumed = (make_learner(settings(**SETTINGS[name])) for _ in range(2))
    assert_equal(averages(learner), parameters(learner))  # there is none yet
    weights = train(learner, tmp_path)
    low = "bf16" in name
    assert largest_difference(averages(learner), mean_of(weights, 0.5)) < (4e-3 if low else 1e-6)
    assert largest_difference(averages(learner), parameters(learner)) > 1e-4
    resumed.load(tmp_path / "2")
    assert_equal(averages(resumed), averages(learner))
    for each in (learner, resumed):
        each.update(random_batch(3, policy_version=3))
    assert_equal(averages(resumed), averages(learner))
    assert_equal(parameters(resumed), parameters(learner))


def test_an_average_changes_nothing_in_training(tmp_path: Path) -> None:
    with_one, without = make_learner(settings()), make_learner(settings(ema=None))
    for learner in (with_one, without):
        train(learner, tmp_path / str(learner is without))
    assert_equal(parameters(with_one), parameters(without))


def test_a_run_may_begin_to_average_later_and_stop(tmp_path: Path) -> None:
    before, begun, ended = make_learner(settings(ema=None)), make_learner(settings()), make_learner(settings(ema=None))
    train(before, tmp_path / "before", 1)
    begun.load(tmp_path / "before/0")
    begun.update(random_batch(1, policy_version=1))
    assert_equal(averages(begun), parameters(begun))  # of one update
    begun.save(tmp_path / "begun")
    ended.load(tmp_path / "begun")
    assert_equal(parameters(ended), parameters(begun))
    with ended.whole_policy() as policy:
        assert all(np.array_equal(p.detach().numpy(), parameters(begun)[n]) for n, p in policy.named_parameters())


def test_while_the_value_head_learns_alone_the_policys_average_is_the_policy(tmp_path: Path) -> None:
    """Weights without a gradient have no moments before their first step."""
    settings_ = config(policy=NANO, algo={"name": "ppo", "value_warmup": 1}, learner={"lr": 1e-3, "ema": 0.5})
    learner, without = make_learner(settings_), make_learner(settings_.with_values({"learner.ema": None}))
    before = parameters(learner)
    weights = train(learner, tmp_path / "a", 1)
    trunk = [name for name in before if not name.startswith("value_head.")]
    assert all(np.array_equal(averages(learner)[name], before[name]) for name in trunk)
    train(without, tmp_path / "b", 1)
    for each in (learner, without):
        each.update(random_batch(1, policy_version=1))
    assert_equal(parameters(learner), parameters(without))
    learner.save(tmp_path / "c")
    assert largest_difference(averages(learner), mean_of([*weights, weights_of(tmp_path / "c")], 0.5)) < 1e-6


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoints_policy_is_the_average(stage: int, tmp_path: Path) -> None:
    learner = make_learner(settings(zero_stage=stage))
    train(learner, tmp_path, 2)
    before = parameters(learner)
    with learner.whole_policy() as policy:
        assert_equal({n: p.detach().numpy().copy() for n, p in policy.named_parameters()}, averages(learner))
    assert_equal(parameters(learner), before)


def test_servers_act_by_the_average_and_then_by_the_weights_of_one_version(tmp_path: Path) -> None:
    """What they record is always of the weights that they act by."""
    cfg = settings()
    learner = make_learner(cfg)
    train(learner, tmp_path, 2)
    create_weight_buffers(tmp_path / "weights", learner.published_nbytes())
    publisher = WeightPublisher(tmp_path / "weights")
    runner = PolicyRunner(build_policy(cfg.policy, SPEC, seed=9), cfg, WeightReader(tmp_path / "weights"), "cpu")
    rng, rows = np.random.default_rng(0), 6
    seen = Observation(
        rng.integers(0, 256, (rows, 1, 48, 48, 3)).astype(np.uint8),
        rng.normal(size=(rows, 3)).astype(np.float32),
        np.arange(rows, dtype=np.int32) % 2,
        rng.random(rows).astype(np.float32),
    )
    draws = {"uniforms": rng.random((rows, 4, 7)).astype(np.float32)}
    found = []
    for average in (True, False):
        learner.publish(2, publisher, average=average)
        assert runner.refresh() == 2
        acts = {name: p.detach().numpy().copy() for name, p in runner.policy.trained_parameters().items()}
        assert_equal(acts, averages(learner) if average else parameters(learner))
        chosen = runner.act(seen, draws, np.zeros(rows, bool))
        assert chosen.policy_version == 2
        found.append(chosen.logprobs)
    assert np.abs(found[0] - found[1]).max() > 1e-4
    learner.publish(3, publisher)
    assert runner.refresh() == 3


def _on_ranks(rank: int, world_size: int, port: int, folder: Path) -> list[tuple[Arrays, Arrays | None]]:
    found = []
    for name in ("zero 1, bf16", "zero 3"):
        cfg = settings(ranks=world_size, micro_batch=3, **SETTINGS[name])
        learner = make_learner(cfg, rank, world_size, port)
        train(learner, folder / f"{name} {rank}", 2)
        with learner.whole_policy() as policy:
            whole = {n: p.detach().float().numpy().copy() for n, p in policy.named_parameters()}
        found.append((averages(learner), whole if rank == 0 else None))
    return found


@pytest.mark.slow
def test_two_ranks_hold_one_average(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    first, second = run_ranks(_on_ranks, 2, tmp_path)
    for name, (average, whole), (same, _) in zip(("zero 1, bf16", "zero 3"), first, second, strict=True):
        assert_equal(average, same)
        assert_equal(average, whole)
        weights = []
        for version in "01":
            parts = [weights_of(tmp_path / f"{name} {rank}" / version) for rank in (0, 1)]
            weights.append(parts[0] | parts[1])
        assert largest_difference(average, mean_of(weights, 0.5)) < (4e-3 if "bf16" in name else 1e-6)
