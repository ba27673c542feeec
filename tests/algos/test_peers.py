"""algos against what other packages publish, in float64: TorchRL and Stable-Baselines3 (SB3); verl has its own module.

A peer that is not installed is skipped; none is imported before its first test runs. Where conventions differ, the
tests translate:

* Episodes. TorchRL and SB3 take them as we do, one after the other, and a mark at each end (TorchRL's time axis is the
  second to last, and a discount given as a Python number is rounded to float32).
* Truncated ends. TorchRL bootstraps where an episode is done and not terminated, as we do. SB3 adds gamma * V(final) to
  the last reward and then treats the end as a terminated one: the same by other means.
* V-trace. TorchRL's advantages contain the weight w_t, which ours leave to the surrogate. It knows no lambda.
* Groups. TorchRL divides by the unbiased deviation or 1e-6, whichever is larger; we by the deviation plus 1e-6.
* Losses. Ours are sums that counts divide, the peers' are means. SB3's squared value loss lacks our factor 0.5.

Not compared, because it differs by design: SB3's normalization of advantages (by the unbiased deviation of a minibatch)
and its clipped value loss (without the maximum with the unclipped one).
"""

from __future__ import annotations

import math
import multiprocessing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor

from algos.advantages import chunk_rewards, group_advantages, vtrace
from algos.denominators import RatioLevel
from algos.grpo import GRPOConfig
from algos.ppo import PPOConfig
from tests.algos.peer_layouts import (
    Sequences,
    at_level,
    bootstrapped,
    column,
    compute_advantages,
    exact_case,
    float64,
    grouped,
    marks,
    metrics_of,
    tokens_of,
)
from tests.algos.ppo_case import LEVELS, SEED, Case, in_float64
from tests.algos.reference_algos import random_super_batch

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
DISCOUNT = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.01, 0.999))
some, few = settings(max_examples=25, deadline=None), settings(max_examples=8, deadline=None)


@pytest.fixture(scope="module")
def torchrl() -> Any:
    start_method = multiprocessing.get_start_method(allow_none=True)
    peer = pytest.importorskip("torchrl")
    multiprocessing.set_start_method(start_method, force=True)  # TorchRL sets one for the whole process
    pytest.importorskip("torchrl.objectives.llm")
    return peer


@pytest.fixture(scope="module")
def sb3() -> Any:
    return pytest.importorskip("stable_baselines3")


# --- TorchRL ----------------------------------------------------------------------------------------------------------


@some
@given(seed=SEED, gamma=DISCOUNT, lam=DISCOUNT)
def test_gae_is_torchrls(torchrl: Any, seed: int, gamma: float, lam: float) -> None:
    batch = random_super_batch(np.random.default_rng(seed), 6)
    following, done, terminated = marks(batch)
    inputs = batch.values, following, chunk_rewards(batch.rewards, batch.num_steps), done, terminated
    peer = torchrl.objectives.value.functional.generalized_advantage_estimate(
        float64(gamma), float64(lam), *map(column, inputs)
    )
    for ours, theirs in zip(compute_advantages(batch, gamma, lam), peer, strict=True):
        assert_allclose(ours, theirs[:, 0], **EXACT)


@pytest.mark.parametrize("capped", [False, True])
@some
@given(seed=SEED, gamma=DISCOUNT, lam=DISCOUNT, cap=st.floats(0.5, 2.0))
def test_vtrace_is_torchrls(torchrl: Any, capped: bool, seed: int, gamma: float, lam: float, cap: float) -> None:
    """Advantages at lambda 1, where it knows no other; returns also where all weights lie above the cap, with lambda in
    the cap on its traces."""
    rng = np.random.default_rng(seed)
    batch = random_super_batch(rng, 6)
    rewards, logs = chunk_rewards(batch.rewards, batch.num_steps), rng.normal(size=batch.num_chunks)
    lam, logs = (lam, math.log(cap) + abs(logs)) if capped else (1.0, logs)
    following, done, terminated = marks(batch)
    inputs = logs, np.zeros_like(logs), batch.values, following, rewards, done, terminated
    peer = torchrl.objectives.value.functional.vtrace_advantage_estimate(
        float64(gamma), *map(column, inputs), rho_thresh=float64(cap), c_thresh=float64(lam * min(cap, 1.0))
    )
    ends = batch.offsets, batch.bootstrap_value, batch.truncated
    advantages, returns = vtrace(rewards, batch.values, logs, *ends, gamma, lam, cap)
    assert_allclose(returns, peer[1][:, 0], **EXACT)
    if not capped:
        assert_allclose(np.minimum(np.exp(logs), cap) * advantages, peer[0][:, 0], **EXACT)


@few
@given(seed=SEED, size=st.integers(2, 5))
def test_group_advantages_are_torchrls(torchrl: Any, seed: int, size: int) -> None:
    """Its episodes arrive one by one; a group comes out, with its advantages, when it is complete."""
    from tensordict import TensorDict

    batch, returns = grouped(seed, 3, size)
    rewards, (_, done, _), lengths = chunk_rewards(batch.rewards, batch.num_steps), marks(batch), np.diff(batch.offsets)
    inputs = {
        "row": torch.arange(batch.num_chunks),
        "group": torch.as_tensor(np.repeat(batch.group, lengths)),
        "next": {"reward": column(rewards), "done": column(done)},
    }
    transform = torchrl.objectives.llm.MCAdvantage(size, prompt_key="group", trajectory_return="sum")
    out = transform.inv(TensorDict(inputs, batch_size=[batch.num_chunks]))
    deviation = np.array([returns[batch.group == g].std(ddof=1) for g in batch.group])
    ours = group_advantages(returns, batch.group, baseline="mean", scale="group") * (deviation + 1e-6) / deviation
    assert sorted(out["row"].tolist()) == list(range(batch.num_chunks))
    assert_allclose(np.repeat(ours, lengths)[out["row"]], out["advantage"][:, 0], **EXACT)


@pytest.mark.parametrize("average", ["elements", "episodes"])
@few
@given(seed=SEED)
def test_grpo_loss_is_torchrls(torchrl: Any, average: Any, seed: int) -> None:
    """From rewards to gradients. The tokens of an episode are one of its sequences."""
    from tensordict import TensorDict

    case = exact_case(
        GRPOConfig(average=average, scale="none", ratio_level="token", clip_low=0.0625, clip_high=0.125), seed
    )
    x = Sequences.of(case)
    known = SimpleNamespace(mask=x.mask, log_prob=lambda action: x.new)
    loss = torchrl.objectives.llm.GRPOLoss(
        SimpleNamespace(get_dist=lambda inputs, logits_key: known),
        clip_epsilon=(0.0625, 0.125),
        aggregation={"elements": "token_mean", "episodes": "prompt_mean"}[average],
        entropy_bonus=False,
        masking_strategy="generic",
    ).double()
    actions, advantages = torch.zeros_like(x.mask, dtype=torch.long), x.advantages[..., None]
    inputs = {"tokens": {"full": actions}, "log_probs": {"full": x.behaviour}, "advantage": advantages}
    theirs = loss(TensorDict(inputs, batch_size=[len(x.mask)])).loss_objective.sum()
    ours, _ = case.whole()
    assert_allclose(ours.item(), theirs.item(), **EXACT)
    assert_allclose(*(torch.autograd.grad(loss, case.logprobs)[0] for loss in (ours, theirs)), **EXACT)


class Table(torch.nn.Module):
    """A network that has learnt its outputs by heart."""

    def __init__(self, entries: Tensor) -> None:
        super().__init__()
        self.entries = torch.nn.Parameter(entries.detach().clone())

    def forward(self, row: Tensor) -> Tensor:
        return self.entries[row]


def torchrl_ppo(torchrl: Any, case: Case, c: PPOConfig) -> tuple[Any, list[Tensor]]:
    """Outputs of TorchRL's loss; gradients of the log-probabilities and, at the level of chunks, of the values.

    The policy at the update's start is TorchRL's delayed actor (PPO-EWMA). It has one mask for objective and critic, so
    that the critic can take part only where each element is a chunk.
    """
    from tensordict import TensorDict
    from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule

    tokens, level, critic = tokens_of(case), c.ratio_level, c.ratio_level == "chunk"
    proximal = torch.as_tensor(case.targets.proximal_logprobs).double()
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(Table(proximal), in_keys=["row"], out_keys=["logprobs"]),
        ProbabilisticTensorDictModule(
            in_keys=["logprobs"],
            out_keys=["action"],
            distribution_class=lambda logprobs: SimpleNamespace(
                log_prob=lambda action: at_level(logprobs, tokens, level)
            ),
            return_log_prob=True,
        ),
    )
    loss = torchrl.objectives.ClipPPOLoss(
        actor,
        TensorDictModule(Table(case.predictions[:, None]), ["row"], ["state_value"]) if critic else None,
        clip_epsilon=(c.clip_low, c.clip_high),
        clip_value=c.value_clip if critic else None,
        critic_coeff=c.value_coef if critic else None,
        loss_critic_type="smooth_l1",  # huber_delta 1
        entropy_bonus=False,
        delay_actor=c.proximal == "recomputed",
    ).double()
    (table,) = loss.actor_network_params.values(include_nested=True, leaves_only=True)
    table.data.copy_(case.logprobs)
    inputs = {
        "row": torch.arange(len(tokens)),
        "action": torch.zeros(len(tokens)),
        "action_log_prob": at_level(torch.as_tensor(case.batch.logprobs).double(), tokens, level),
        "advantage": column(case.targets.advantages),
        "value_target": column(case.targets.returns),
        "state_value": column(case.targets.old_values),
        "collector": {"mask": at_level(tokens.double(), tokens, level) > 0},
    }
    out = loss(TensorDict(inputs, batch_size=[len(tokens)]))
    (out["loss_objective"] + out.get("loss_critic", 0.0)).backward()
    values = loss.critic_network_params.values(include_nested=True, leaves_only=True) if critic else ()
    return out, [table.grad, *(x.grad[:, 0] for x in values)]


@pytest.mark.filterwarnings("ignore:No target network updater")
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@few
@given(seed=SEED)
def test_ppo_loss_is_torchrls(torchrl: Any, level: RatioLevel, decoupled: bool, seed: int) -> None:
    """With unequal limits, a clipped value loss, and behaviour weights where decoupled."""
    limits: Any = {"clip_low": 0.125, "clip_high": 0.25, "value_clip": 0.25, "huber_delta": 1.0}
    config = PPOConfig(ratio_level=level, proximal="recomputed" if decoupled else "behaviour", **limits)
    case = exact_case(config, seed)
    out, gradients = torchrl_ppo(torchrl, case, config)
    loss, sums = case.whole()
    metrics = metrics_of(case, sums)
    assert_allclose(metrics["policy_loss"], out["loss_objective"].item(), **EXACT)
    assert len(gradients) == (2 if level == "chunk" else 1)
    for ours, theirs in zip(torch.autograd.grad(loss, [case.logprobs, case.predictions]), gradients, strict=False):
        assert_allclose(ours, theirs, **EXACT)
    if level == "chunk":
        assert_allclose(config.value_coef * metrics["value_loss"], out["loss_critic"].item(), **EXACT)
        for ours, theirs in {"clip_fraction": "clip_fraction", "approx_kl_k1": "kl_approx", "ess": "ESS"}.items():
            assert_allclose(metrics[ours], out[theirs].item(), **EXACT)


# --- Stable-Baselines3 ------------------------------------------------------------------------------------------------


@some
@given(seed=SEED, gamma=DISCOUNT, lam=DISCOUNT)
def test_gae_is_sb3s(sb3: Any, seed: int, gamma: float, lam: float) -> None:
    from gymnasium.spaces import Discrete

    batch = random_super_batch(np.random.default_rng(seed), 6)
    buffer = sb3.common.buffers.RolloutBuffer(batch.num_chunks, Discrete(2), Discrete(2), "cpu", lam, gamma)
    _, done, _ = marks(batch)
    # In place of its own float32 arrays.
    buffer.rewards, buffer.values = bootstrapped(batch, gamma)[:, None], batch.values[:, None].astype(np.float64)
    buffer.episode_starts, buffer.advantages = np.roll(done, 1)[:, None].astype(float), np.zeros((batch.num_chunks, 1))
    buffer.compute_returns_and_advantage(last_values=torch.tensor([1e3]), dones=np.array([True]))
    for ours, theirs in zip(compute_advantages(batch, gamma, lam), (buffer.advantages, buffer.returns), strict=True):
        assert_allclose(ours, theirs[:, 0], **EXACT)


@few
@given(seed=SEED)
def test_ppo_update_is_sb3s(sb3: Any, seed: int) -> None:
    """Its ``PPO.train`` over one minibatch of all chunks, with a fake for everything but the maths."""
    config = PPOConfig(ratio_level="chunk", entropy_coef=0.01, value_clip=None, huber_delta=1e6)
    case, found = exact_case(config, seed), dict[str, float]()
    tokens, rows = tokens_of(case), in_float64(case.targets.rows(slice(None)))
    leaves = [case.logprobs, case.entropy, case.predictions]
    logprobs, entropy, old = (at_level(x, tokens, "chunk") for x in (*leaves[:2], rows.proximal_logprobs))
    data = {"advantages": rows.advantages, "returns": rows.returns, "old_values": rows.old_values, "old_log_prob": old}
    stand_in = SimpleNamespace(
        policy=SimpleNamespace(
            set_training_mode=lambda training: None,
            evaluate_actions=lambda observations, actions: (case.predictions, logprobs, entropy),
            parameters=lambda: leaves,
            optimizer=torch.optim.SGD(leaves, lr=0.0),
        ),
        rollout_buffer=SimpleNamespace(
            get=lambda batch_size: [SimpleNamespace(observations=None, actions=None, **data)],
            values=case.targets.old_values,
            returns=case.targets.returns,
        ),
        logger=SimpleNamespace(record=lambda name, value, **options: found.update({name: value})),
        clip_range=lambda progress: config.clip_low,
        ent_coef=config.entropy_coef,
        vf_coef=0.5 * config.value_coef,
        max_grad_norm=math.inf,
        normalize_advantage=False,
        n_epochs=1,
        _n_updates=0,
        _update_learning_rate=lambda optimizer: None,
        **dict.fromkeys(("_current_progress_remaining", "action_space", "batch_size", "clip_range_vf", "target_kl")),
    )
    sb3.PPO.train(stand_in)
    loss, sums = case.whole()
    metrics = metrics_of(case, sums)
    assert_allclose(loss.item(), found["train/loss"], **EXACT)
    for ours, leaf in zip(case.gradients(loss), leaves, strict=True):
        assert_allclose(ours, leaf.grad, **EXACT)
    assert_allclose(metrics["policy_loss"], found["train/policy_gradient_loss"], **EXACT)
    for name in ("approx_kl", "clip_fraction", "explained_variance"):
        assert_allclose(metrics[name], found[f"train/{name}"], rtol=1e-6, atol=1e-9)  # SB3 counts in float32
