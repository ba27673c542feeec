"""algos against verl, in float64, where it is installed: it asks for other transformers than the pinned set has.

What differs in conventions: verl pads episodes to the longest, with a mask, and knows terminated ends only (a truncated
one is given to it with ``gamma * V(final)`` in its last reward). It always normalizes the advantages of ``gae``, by the
unbiased deviation (ours is biased), and those of REINFORCE++ over tokens (ours over episodes): neither is compared. Its
losses are means, over what ``average`` names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from algos.advantages import chunk_rewards, group_advantages
from algos.grpo import GRPOConfig
from algos.losses import clipped_value_loss
from tests.algos.peer_layouts import Sequences, bootstrapped, compute_advantages, exact_case, grouped, padded
from tests.algos.ppo_case import SEED
from tests.algos.reference_algos import random_super_batch
from tests.algos.test_peers import DISCOUNT, EXACT, few, some

AVERAGES = {"elements": "token-mean", "episodes": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}


@pytest.fixture(scope="module")
def verl() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # verl sets it for the whole process
        pytest.importorskip("verl")
        yield pytest.importorskip("verl.trainer.ppo.core_algos")


@some
@given(seed=SEED, gamma=DISCOUNT, lam=DISCOUNT)
def test_gae_is_verls(verl: Any, seed: int, gamma: float, lam: float) -> None:
    batch = random_super_batch(np.random.default_rng(seed), 6)
    columns = bootstrapped(batch, gamma), batch.values.astype(np.float64), np.ones(batch.num_chunks)
    rewards, values, mask = (padded(x, batch) for x in columns)
    _, returns = verl.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    assert_allclose(compute_advantages(batch, gamma, lam)[1], returns[mask.bool()], **EXACT)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@some
@given(seed=SEED, size=st.integers(2, 5))
def test_group_advantages_are_verls(verl: Any, kind: str, seed: int, size: int) -> None:
    batch, returns = grouped(seed, 3, size)
    rewards = padded(chunk_rewards(batch.rewards, batch.num_steps), batch)
    mask = padded(np.ones(batch.num_chunks), batch)
    compute = verl.compute_rloo_outcome_advantage if kind == "rloo" else verl.compute_grpo_outcome_advantage
    options = {"norm_adv_by_std_in_grpo": False} if kind == "dr_grpo" else {}
    theirs, _ = compute(rewards, mask, batch.group, **options)
    names: Any = {"baseline": "leave_one_out" if kind == "rloo" else "mean", "scale": "none"}
    ours = group_advantages(returns, batch.group, **(names if kind != "grpo" else names | {"scale": "group"}))
    assert_allclose(np.repeat(ours, np.diff(batch.offsets)), theirs[mask.bool()], **EXACT)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize(("objective", "average"), [*(("clip", average) for average in AVERAGES), ("sapo", "episodes")])
@few
@given(seed=SEED)
def test_grpo_loss_is_verls(verl: Any, objective: Any, average: Any, decoupled: bool, seed: int) -> None:
    """From rewards to gradients: clip-higher with dual clip or SAPO (with verl's only average), behaviour weights."""
    limits: Any = {"clip_low": 0.05, "clip_high": 0.1, "dual_clip": 1.15, "tau_positive": 2.0, "tau_negative": 3.0}
    weights: Any = {"proximal": "recomputed", "importance_cap": 1.1} if decoupled else {}
    config = GRPOConfig(objective=objective, average=average, scale="none", ratio_level="token", **limits, **weights)
    case = exact_case(config, seed)
    x = Sequences.of(case)
    theirs, _ = verl.get_policy_loss_fn({"clip": "vanilla", "sapo": "sapo"}[objective])(
        old_log_prob=x.proximal,
        log_prob=x.new,
        advantages=x.advantages,
        response_mask=x.mask.double(),
        loss_agg_mode=AVERAGES[average],
        config=verl.ActorConfig(
            strategy="fsdp",
            rollout_n=2,
            use_dynamic_bsz=True,
            clip_ratio_low=config.clip_low,
            clip_ratio_high=config.clip_high,
            clip_ratio_c=config.dual_clip,
            tau_pos=config.tau_positive,
            tau_neg=config.tau_negative,
        ),
        rollout_is_weights=(x.proximal - x.behaviour).exp().clamp(max=1.1) if decoupled else None,
    )
    ours, _ = case.whole()
    assert_allclose(ours.item(), theirs.item(), rtol=1e-7, atol=1e-8)  # verl adds 1e-8 to counts
    assert_allclose(*(torch.autograd.grad(loss, case.logprobs)[0] for loss in (ours, theirs)), rtol=1e-7, atol=1e-9)


@few
@given(seed=SEED, clip=st.floats(0.05, 0.5))
def test_value_loss_is_verls(verl: Any, seed: int, clip: float) -> None:
    values, returns, old = torch.randn(3, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = torch.arange(50) % 3 > 0
    theirs, _ = verl.compute_value_loss(values[None], returns[None], old[None], mask[None], clip)
    ours = clipped_value_loss(values, returns, old, mask, clip, huber_delta=1e6) / mask.sum()
    assert_allclose(ours.item(), theirs.item(), **EXACT)
