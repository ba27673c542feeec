"""Returns and advantages of ragged episodes, in numpy, float64 throughout.

The M chunks of B episodes are flat, one episode after the other: the rows of episode b are
``offsets[b]:offsets[b + 1]``. One action chunk is one decision: its reward is the sum over its executed steps, and the
discount applies once per chunk. After its last chunk an episode is worth 0, or, where ``bootstrap_mask`` is true,
``bootstrap_value``: the value of its final observation (time limits: Pardo et al., arXiv:1712.00378).
"""

from typing import Literal

import numpy as np

from vla_rl.core.errors import NotFiniteError
from vla_rl.core.records import SuperBatch

Array = np.ndarray
Baseline = Literal["mean", "leave_one_out"]  # what an episode's return is compared with
Scale = Literal["group", "batch", "none"]  # what the difference is divided by

# Far below the spread of useful returns, far above float32 noise around a constant.
NORMALIZE_EPSILON = 1e-5
GROUP_EPSILON = 1e-6  # one success among 8 gives a deviation of 0.35
LEAST_SPREAD = 0.1  # of real returns, for the size of imagined advantages: one success in a hundred episodes
FLOOR = 0.1  # of the spread of returns: advantages that vary by less are errors of the value function


def chunk_rewards(rewards: Array, num_steps: Array) -> Array:
    """Rewards of chunks: float64 [M], the sums of the first ``num_steps[m]`` of the K steps in ``rewards`` [M, K]."""
    return np.where(_executed(num_steps, rewards.shape[1]), rewards, 0.0).sum(axis=1, dtype=np.float64)


def chunk_log_ratios(numerator: Array, denominator: Array, num_steps: Array) -> Array:
    """Log-ratios of chunk probabilities: float64 [M], from [M, K, A] log-probabilities under two policies."""
    executed = _executed(num_steps, numerator.shape[1])[:, :, None]
    difference = np.where(executed, numerator.astype(np.float64) - denominator, 0.0)
    return difference.sum(axis=(1, 2))


def episode_log_ratios(numerator: Array, denominator: Array, num_steps: Array, offsets: Array) -> Array:
    """Log-ratios of episode probabilities: float64 [M], the sum of ``chunk_log_ratios`` in each chunk's episode."""
    per_chunk = chunk_log_ratios(numerator, denominator, num_steps)
    return np.repeat(np.add.reduceat(per_chunk, offsets[:-1]), np.diff(offsets))


def gae(
    rewards: Array,
    values: Array,
    offsets: Array,
    bootstrap_value: Array,
    bootstrap_mask: Array,
    gamma: float,
    lam: float,
) -> tuple[Array, Array]:
    """Generalized advantage estimation (arXiv:1506.02438, equation 16).

        delta_t = r_t + gamma V_(t+1) - V_t
        A_t = delta_t + gamma lam A_(t+1)

    Args:
        rewards: [M], reward of each chunk.
        values: [M], predicted value of the observation in which each chunk was chosen.
        offsets: int [B + 1].
        bootstrap_value: [B], read where ``bootstrap_mask`` is true.
        bootstrap_mask: bool [B].
        gamma, lam: discount and lambda per chunk.

    Returns advantages A and lambda-returns A + V, which the value function learns; both float64 [M].
    Raises ValueError if shapes and offsets disagree, or if a number is not finite.
    """
    rewards, values = _finite("rewards", rewards), _finite("values", values)
    last = _last_rows(offsets, rewards, values)
    deltas = rewards + gamma * _following(values, last, _bootstrap(bootstrap_value, bootstrap_mask, len(last))) - values
    advantages = _discounted_sum(deltas, offsets, np.zeros(len(last)), gamma * lam)
    return advantages, advantages + values


def vtrace(
    rewards: Array,
    values: Array,
    log_weights: Array,
    offsets: Array,
    bootstrap_value: Array,
    bootstrap_mask: Array,
    gamma: float,
    lam: float,
    cap: float,
) -> tuple[Array, Array]:
    """V-trace (arXiv:1802.01561, equation 1 and section 4.2): targets corrected for staleness.

        w_t = min(cap, pi / pi_behaviour)
        v_t = V_t + w_t delta_t + gamma lam min(1, w_t) (v_(t+1) - V_(t+1)), delta as in ``gae``
        A_t = r_t + gamma (lam v_(t+1) + (1 - lam) V_(t+1)) - V_t

    The paper's advantage is the case of lam = 1. The mixture is rlax's (``vtrace_td_error_and_advantage``): with it,
    both A and v are those of ``gae`` if all w are 1.

    Args: as ``gae``, and
        log_weights: [M], log(pi / pi_behaviour) of each chunk.
        cap: of the weights (the paper's rho); traces (its c) are at most 1, too.

    Returns advantages A, which the policy gradient must weigh by w itself, and returns v; both float64 [M]. Raises as
    ``gae``.
    """
    rewards, values = _finite("rewards", rewards), _finite("values", values)
    weights = np.minimum(np.exp(_finite("log_weights", log_weights)), cap)
    last = _last_rows(offsets, rewards, values, weights)
    after = _bootstrap(bootstrap_value, bootstrap_mask, len(last))
    deltas = rewards + gamma * _following(values, last, after) - values
    traces = gamma * lam * np.minimum(weights, 1.0)
    returns = values + _discounted_sum(weights * deltas, offsets, np.zeros(len(last)), traces)
    mixed = lam * returns + (1.0 - lam) * values
    return rewards + gamma * _following(mixed, last, after) - values, returns


def episode_returns(rewards: Array, num_steps: Array, offsets: Array) -> Array:
    """Undiscounted sums of rewards: float64 [B]. Arguments as ``chunk_rewards`` and ``gae``; raises as ``gae``."""
    per_chunk = _finite("rewards", chunk_rewards(rewards, num_steps))
    _last_rows(offsets, per_chunk)
    return np.add.reduceat(per_chunk, np.asarray(offsets[:-1], np.int64))


def return_spread(batch: SuperBatch, gamma: float) -> float:
    """Standard deviation of the discounted returns of the episodes; 0 where nothing tells good from bad ones.

    What a value function says has no part in it. Deviations within float32's rounding are 0.
    """
    rewards = chunk_rewards(batch.rewards, batch.num_steps)
    returns = discounted_returns(rewards, batch.offsets, gamma)[batch.offsets[:-1]]
    spread = float(np.std(returns))
    return spread if spread > 1e-6 * float(np.abs(returns).max()) else 0.0


def discounted_returns(rewards: Array, offsets: Array, gamma: float) -> Array:
    """Discounted sums of the rewards from each chunk on: float64 [M]. Arguments as ``gae``; raises as ``gae``."""
    rewards = _finite("rewards", rewards)
    last = _last_rows(offsets, rewards)
    return _discounted_sum(rewards, offsets, np.zeros(len(last)), gamma)


def group_advantages(returns: Array, group: Array, *, baseline: Baseline, scale: Scale) -> Array:
    """How much better each episode did than its group: ``A = (R - baseline) / scale``.

    Args:
        returns: [B], R.
        group: int [B]; episodes with the same number form a group.
        baseline: "mean" of the group (GRPO, arXiv:2402.03300), or "leave_one_out", the mean of the others (RLOO,
            arXiv:2402.14740), which gives n / (n - 1) times the same difference.
        scale: "group" divides by the group's unbiased standard deviation, "batch" by the root mean square of all
            differences (REINFORCE++ with a group baseline, arXiv:2501.03262), both plus ``GROUP_EPSILON``; "none" by 1
            (Dr. GRPO, arXiv:2503.20783).

    Returns A, float64 [B]; 0 in a group of equal returns.
    Raises ValueError if an episode is alone in its group, or if a return is not finite.
    """
    returns = _finite("returns", returns)
    ids, index, sizes = np.unique(group, return_inverse=True, return_counts=True)
    if sizes.min() < 2:
        raise ValueError(f"group {ids[sizes.argmin()]} has one episode: there is nothing to compare it with")
    size = sizes[index]
    difference = returns - (np.bincount(index, returns) / sizes)[index]
    squares = np.bincount(index, difference**2)
    if baseline == "leave_one_out":
        difference = difference * size / (size - 1)
    match scale:
        case "group":
            return difference / (np.sqrt(squares / (sizes - 1))[index] + GROUP_EPSILON)
        case "batch":
            return difference / (np.sqrt(np.mean(difference**2)) + GROUP_EPSILON)
        case "none":
            return difference


def normalize(advantages: Array, weights: Array | None = None, spread: float | None = None) -> Array:
    """Advantages with mean 0 and standard deviation 1: ``(A - mean(A)) / (std(A) + NORMALIZE_EPSILON)``.

    Call it on the whole super-batch, so that the result does not depend on micro-batches or ranks.

    Args:
        advantages: [M], A.
        weights: [M], how often each entry counts in mean and deviation; None: once.
        spread: of the returns (``return_spread``). The divisor is at least ``FLOOR`` times that: where episodes
            hardly differ, what is left of A is noise of the value function, and stays small.

    Returns float64 [M]; 0 if all entries are equal, or if ``spread`` is 0.
    Raises ValueError if weights are negative, sum to zero or have another shape.
    """
    advantages = np.asarray(advantages, np.float64)
    weights = np.ones_like(advantages) if weights is None else np.asarray(weights, np.float64)
    if weights.shape != advantages.shape or np.any(weights < 0) or not weights.sum() > 0:
        raise ValueError(
            f"weights of shape {weights.shape}, sum {weights.sum()}, for advantages of shape {advantages.shape}: "
            "give one non-negative weight per entry, not all zero"
        )
    mean = np.average(advantages, weights=weights)
    deviation = np.sqrt(np.average((advantages - mean) ** 2, weights=weights))
    if spread is not None:
        if spread == 0:
            return np.zeros_like(advantages)
        deviation = max(deviation, FLOOR * spread)
    return (advantages - mean) / (deviation + NORMALIZE_EPSILON)


def normalize_within(parts: Array, advantages: Array, weights: Array, spread: float) -> Array:
    """``normalize`` of the chunks of each part by themselves: float64 [M]; ``parts`` [M]: which part each belongs to.

    ``spread`` is of all returns: where a part's episodes all end alike, its advantages are noise and stay small.
    """
    result = np.zeros(len(parts))
    for part in np.unique(parts):
        rows = parts == part
        result[rows] = normalize(advantages[rows], weights[rows], spread)
    return result


def returns_differ(batch: SuperBatch) -> bool:
    """Whether the new episodes of a super-batch earn different sums of rewards, beyond float32's rounding."""
    earned = episode_returns(batch.rewards, batch.num_steps, batch.offsets)[: batch.new_episodes]
    return bool(np.ptp(earned) > 1e-6 * np.abs(earned).max())


def explained_variance(returns: Array, values: Array) -> float | None:
    """``1 - Var(returns - values) / Var(returns)`` of [M] each: 1 is perfect, 0 a constant.

    None for equal returns, or without any.
    """
    returns, values = np.asarray(returns, np.float64), np.asarray(values, np.float64)
    if not len(returns) or np.ptp(returns) == 0:
        return None
    return float(1.0 - np.var(returns - values) / np.var(returns))


def imagined_advantages(returns: Array, group: Array, real: int) -> Array:
    """How much more each imagined episode earns than the others from its state: float64, one for each of them.

    ``A = (R - mean of the others) / s``, where s is the standard deviation of the real episodes' returns: the size of
    real advantages where no value function helps, whatever the algorithm divides them by.

    Args:
        returns: [B], R; the first ``real`` ones are of real episodes, the others imagined.
        group: int [B]; imagined episodes with the same number begin in the same state.
    """
    difference = group_advantages(returns[real:], group[real:], baseline="leave_one_out", scale="none")
    return difference / max(float(np.std(returns[:real])), LEAST_SPREAD)


def _discounted_sum(x: Array, offsets: Array, after: Array, decay: float | Array) -> Array:
    """``y_t = x_t + decay_t * y_(t+1)`` within each episode; ``after`` [B] is y beyond its last row.

    Loops over the time steps of the longest episode, backwards from every episode's own end. All episodes take part
    from the first pass on, and drop out when their first row is reached.
    """
    lengths = np.diff(offsets)
    longest_first = np.argsort(-lengths, kind="stable")
    last = np.asarray(offsets[1:], np.int64)[longest_first] - 1
    carry = after[longest_first]
    alive = len(lengths) - np.searchsorted(np.sort(lengths), np.arange(lengths.max()), side="right")
    decay, y = np.broadcast_to(decay, x.shape), np.empty_like(x)
    for back, n in enumerate(alive):
        rows = last[:n] - back
        carry = x[rows] + decay[rows] * carry[:n]
        y[rows] = carry
    return y


def _executed(num_steps: Array, size: int) -> Array:
    """bool [M, K]."""
    return np.arange(size)[None, :] < num_steps[:, None]


def _following(x: Array, last: Array, after: Array) -> Array:
    """[M]: x of the next row, and ``after`` [B] in the last row of an episode."""
    shifted = np.append(x[1:], 0.0)
    shifted[last] = after
    return shifted


def _bootstrap(bootstrap_value: Array, bootstrap_mask: Array, episodes: int) -> Array:
    """float64 [B]: the value that follows each episode's last chunk."""
    for name, array in (("bootstrap_value", bootstrap_value), ("bootstrap_mask", bootstrap_mask)):
        if np.shape(array) != (episodes,):
            raise ValueError(f"{name} has shape {np.shape(array)} for {episodes} episodes: give one entry per episode")
    return _finite("bootstrap_value", np.where(bootstrap_mask, bootstrap_value, 0.0))


def _last_rows(offsets: Array, *per_chunk: Array) -> Array:
    """int64 [B]: row of each episode's last chunk. Checks that ``offsets`` divides the given [M] arrays."""
    chunks = {array.shape for array in per_chunk}
    offsets = np.asarray(offsets, np.int64)
    if len(offsets) < 2 or offsets[0] != 0 or np.any(np.diff(offsets) < 1) or chunks != {(offsets[-1],)}:
        raise ValueError(
            f"offsets {offsets} do not divide arrays of shapes {sorted(chunks)}: "
            "they must start at 0, rise by at least 1 per episode and end at the number of chunks"
        )
    return offsets[1:] - 1


def _finite(name: str, array: Array) -> Array:
    array = np.asarray(array, np.float64)
    if not np.all(np.isfinite(array)):
        row = int(np.flatnonzero(~np.isfinite(array))[0])
        raise NotFiniteError(f"{name}[{row}] is {array.flat[row]}: find what produced it, no advantage can be formed")
    return array
