"""Slow references for the maths of ``algos``: plain Python numbers, one element at a time, straight from definitions.

They share no code and, where the literature offers two, no formula with what they check.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from algos.ppo import PPOConfig
from algos.targets import RowTargets
from vla_rl.core.records import SuperBatch

Numbers = Sequence[float]


def gae_reference(rewards: Numbers, values: Numbers, bootstrap: float, gamma: float, lam: float) -> list[float]:
    """One episode's advantages as the lambda-weighted mean of its n-step returns, less the value."""
    horizon = len(rewards)
    following = [*values[1:], bootstrap]
    advantages = []
    for t in range(horizon):
        n_step_returns, discounted = [], 0.0
        for i in range(t, horizon):
            discounted += gamma ** (i - t) * rewards[i]
            n_step_returns.append(discounted + gamma ** (i - t + 1) * following[i])
        mixed = lam ** (len(n_step_returns) - 1) * n_step_returns[-1]
        for n, value in enumerate(n_step_returns[:-1]):
            mixed += (1 - lam) * lam**n * value
        advantages.append(mixed - values[t])
    return advantages


def returns_reference(rewards: Numbers, bootstrap: float, gamma: float) -> list[float]:
    horizon = len(rewards)
    return [
        sum(gamma ** (i - t) * rewards[i] for i in range(t, horizon)) + gamma ** (horizon - t) * bootstrap
        for t in range(horizon)
    ]


def batch_gae_reference(batch: SuperBatch, gamma: float, lam: float) -> list[float]:
    """Advantages of all chunks of a super-batch, from its step rewards."""
    advantages: list[float] = []
    for b in range(len(batch.offsets) - 1):
        rows = range(batch.offsets[b], batch.offsets[b + 1])
        rewards = [sum(float(batch.rewards[m, k]) for k in range(batch.num_steps[m])) for m in rows]
        bootstrap = float(batch.bootstrap_value[b]) if batch.truncated[b] else 0.0
        advantages += gae_reference(rewards, [float(batch.values[m]) for m in rows], bootstrap, gamma, lam)
    return advantages


def vtrace_reference(
    rewards: list[float],
    values: list[float],
    weights: list[float],
    bootstrap: float,
    gamma: float,
    lam: float,
    cap: float,
) -> tuple[list[float], list[float]]:
    """(advantages, targets) of one episode, from the sum that defines V-trace, term by term."""
    n, ahead = len(rewards), [*values[1:], bootstrap]
    deltas = [rewards[t] + gamma * ahead[t] - values[t] for t in range(n)]
    targets = []
    for s in range(n):
        total = values[s]
        for t in range(s, n):
            traces = math.prod(lam * min(cap, 1.0, weights[i]) for i in range(s, t))
            total += gamma ** (t - s) * traces * min(cap, weights[t]) * deltas[t]
        targets.append(total)
    following = [lam * targets[t] + (1 - lam) * values[t] for t in range(1, n)] + [bootstrap]
    return [rewards[t] + gamma * following[t] - values[t] for t in range(n)], targets


def elements_of(num_steps: int, action_dim: int, level: str) -> list[list[tuple[int, int]]]:
    """The (step, dimension) pairs that each element of one chunk covers."""
    tokens = [[(k, a) for a in range(action_dim)] for k in range(num_steps)]
    if level == "token":
        return [[token] for action in tokens for token in action]
    if level == "action":
        return tokens
    return [[token for action in tokens for token in action]] if tokens else []


def huber_reference(error: float, delta: float) -> float:
    return 0.5 * error**2 if abs(error) <= delta else delta * (abs(error) - 0.5 * delta)


def value_loss_reference(value: float, target: float, old: float, clip: float | None, delta: float) -> float:
    loss = huber_reference(value - target, delta)
    if clip is None:
        return loss
    near = min(max(value, old - clip), old + clip)
    return max(loss, huber_reference(near - target, delta))


@dataclass
class PPOSums:
    """What ``ppo_reference`` adds up, over elements, chunks and tokens."""

    policy: float = 0.0
    value: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    k1: float = 0.0
    k3: float = 0.0
    clipped: int = 0
    ratio: float = 0.0
    largest: float = 0.0
    importance: float = 0.0
    importance_sq: float = 0.0
    elements: int = 0
    chunks: int = 0
    tokens: int = 0

    def loss(self, c: PPOConfig) -> float:
        policy = self.policy - c.entropy_coef * self.entropy + c.kl_coef * self.kl
        return policy / self.elements + c.value_coef * self.value / self.chunks


def ppo_reference(
    c: PPOConfig,
    rows: RowTargets,
    logprobs: np.ndarray,
    entropy: np.ndarray,
    values: np.ndarray,
    offsets: Sequence[int],
) -> PPOSums:
    """Of all chunks of a super-batch, whose episodes lie between ``offsets``."""
    s = PPOSums()
    num_steps, behaviour = rows.num_steps.tolist(), rows.behaviour_logprobs.numpy()
    advantages = rows.advantages.numpy()
    proximal = rows.proximal_logprobs.numpy()
    if c.proximal == "interpolated":
        staleness = rows.staleness.numpy()[:, None, None]
        proximal = (behaviour + staleness * logprobs) / (1 + staleness)
    for i, steps in enumerate(num_steps):
        s.chunks += 1
        value_target, old_value = float(rows.returns[i]), float(rows.old_values[i])
        s.value += value_loss_reference(values[i], value_target, old_value, c.value_clip, c.huber_delta)
        for element in elements_of(steps, logprobs.shape[2], c.ratio_level):
            ratio = math.prod(math.exp(logprobs[i, k, a]) / math.exp(proximal[i, k, a]) for k, a in element)
            covered = covered_by_weight(c, i, element, num_steps, logprobs.shape[2], offsets)
            weight = math.prod(math.exp(proximal[at]) / math.exp(behaviour[at]) for at in covered)
            if c.ratio_mean:
                ratio = ratio ** (1 / len(element))
            s.importance += ratio * weight
            s.importance_sq += (ratio * weight) ** 2
            cap = c.importance_cap if c.importance_cap or c.estimator == "gae" else c.vtrace_cap
            used = weight if cap is None else min(weight, cap)
            clipped = min(max(ratio, 1 - c.clip_low), 1 + c.clip_high)
            surrogate = min(ratio * advantages[i], clipped * advantages[i])
            if c.dual_clip is not None and advantages[i] < 0:
                surrogate = max(surrogate, c.dual_clip * advantages[i])
            if weight < (c.importance_low or 0.0) or weight > (c.importance_high or math.inf):
                used = 0.0
            if c.objective == "cispo":
                surrogate = clipped * advantages[i] * math.log(ratio)
            if c.objective == "sapo":
                tau = c.tau_positive if advantages[i] > 0 else c.tau_negative
                surrogate = 4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantages[i]
            if c.objective == "gipo":
                surrogate = ratio * advantages[i] / math.sqrt(math.exp((math.log(ratio) / c.gipo_sigma) ** 2))
            s.policy -= used * surrogate
            s.k1 += math.log(1 / ratio)
            s.k3 += ratio - 1 - math.log(ratio)
            s.clipped += clipped != ratio
            s.ratio += ratio
            s.largest = max(s.largest, ratio)
            s.elements += 1
            s.tokens += len(element)
            s.entropy += sum(entropy[i, k, a] for k, a in element)
            if rows.reference_logprobs is not None:
                for k, a in element:
                    odds = math.exp(float(rows.reference_logprobs[i, k, a])) / math.exp(logprobs[i, k, a])
                    acted = math.exp(logprobs[i, k, a]) / math.exp(behaviour[i, k, a])
                    s.kl += (odds - 1 - math.log(odds)) * (acted if c.kl_estimate == "weighted_k3" else 1.0)
    return s


def covered_by_weight(
    c: PPOConfig,
    chunk: int,
    element: list[tuple[int, int]],
    num_steps: Sequence[int],
    action_dim: int,
    offsets: Sequence[int],
) -> list[tuple[int, int, int]]:
    """The (chunk, step, dimension) triples over which an element's importance weight is taken."""
    level = c.importance_level or ("chunk" if c.estimator == "vtrace" else c.ratio_level)
    if level == c.ratio_level:
        return [(chunk, k, a) for k, a in element]
    if level == "action":
        return [(chunk, element[0][0], a) for a in range(action_dim)]
    chunks = [chunk]
    if level == "episode":
        (chunks,) = (list(range(p, q)) for p, q in itertools.pairwise(offsets) if p <= chunk < q)
    return [(m, k, a) for m in chunks for k in range(num_steps[m]) for a in range(action_dim)]


def random_super_batch(
    rng: np.random.Generator, episodes: int, *, longest: int = 9, chunk_size: int = 3, action_dim: int = 2
) -> SuperBatch:
    """Ragged episodes with garbage wherever nothing was executed, and in ``bootstrap_value`` of terminated episodes."""
    lengths = rng.integers(1, longest + 1, episodes)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    chunks = int(offsets[-1])
    num_steps = np.full(chunks, chunk_size, np.int32)
    num_steps[offsets[1:] - 1] = rng.integers(1, chunk_size + 1, episodes)
    executed = np.arange(chunk_size)[None, :] < num_steps[:, None]
    truncated = rng.random(episodes) < 0.5
    obs_rows = np.arange(chunks + int(truncated.sum()), dtype=np.int32)
    logprobs = -rng.exponential(1.0, (chunks, chunk_size, action_dim)).astype(np.float32)
    return SuperBatch(
        policy_version=7,
        max_episode_steps=longest * chunk_size,
        new_episodes=episodes,
        images=np.zeros((len(obs_rows), 1, 2, 2, 3), np.uint8),
        proprio=np.zeros((len(obs_rows), 0), np.float32),
        elapsed=np.zeros(len(obs_rows), np.float32),
        obs_row=obs_rows[:chunks],
        final_obs_row=np.where(truncated, chunks + np.cumsum(truncated) - 1, -1).astype(np.int32),
        task=np.zeros(chunks, np.int32),
        record={"tokens": rng.integers(0, 256, (chunks, chunk_size, action_dim)).astype(np.uint8)},
        logprobs=np.where(executed[:, :, None], logprobs, np.float32(123.0)),
        values=rng.normal(size=chunks).astype(np.float32),
        policy_versions=rng.integers(3, 8, chunks).astype(np.int32),
        rewards=np.where(executed, rng.normal(size=(chunks, chunk_size)), -55.0).astype(np.float32),
        num_steps=num_steps,
        offsets=offsets,
        bootstrap_value=rng.normal(size=episodes).astype(np.float32),
        terminated=~truncated,
        truncated=truncated,
        success=~truncated,
        group=(np.arange(episodes) // 2).astype(np.int32),
        episode_id=np.arange(100, 100 + episodes, dtype=np.int64),
        seed=np.zeros(episodes, np.int64),
        model_version=np.full(episodes, -1, np.int32),
    )
