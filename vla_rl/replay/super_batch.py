"""Collating finished episodes into one super-batch, and the metrics of its data."""

from collections.abc import Sequence

import numpy as np

from vla_rl.core.records import EXPERT_STEPS, SuperBatch, Trajectory, join_records


def collate(
    new: Sequence[Trajectory],
    policy_version: int,
    max_episode_steps: int,
    again: Sequence[Trajectory] = (),
    imagined: Sequence[Trajectory] = (),
) -> SuperBatch:
    """Flatten whole episodes, in the given order, for the update of ``policy_version``.

    ``again``: real episodes that earlier updates have trained on. ``imagined``: of the world model. Raises ValueError
    without a new one.
    """
    if not new:
        raise ValueError("a super-batch needs at least one trajectory")
    trajectories = [*new, *again, *imagined]
    chunks = np.array([t.num_chunks for t in trajectories])
    rows = np.array([len(t.images) for t in trajectories])
    first_row = np.concatenate(([0], np.cumsum(rows)[:-1]))
    obs_row = np.concatenate([start + np.arange(n) for start, n in zip(first_row, chunks, strict=True)])

    def joined(field: str) -> np.ndarray:
        return np.concatenate([getattr(t, field) for t in trajectories])

    return SuperBatch(
        policy_version=policy_version,
        max_episode_steps=max_episode_steps,
        new_episodes=len(new),
        images=joined("images"),
        proprio=joined("proprio"),
        elapsed=joined("elapsed"),
        obs_row=obs_row.astype(np.int32),
        final_obs_row=np.where(rows > chunks, first_row + chunks, -1).astype(np.int32),
        task=np.repeat([t.episode.task for t in trajectories], chunks).astype(np.int32),
        record=join_records([t.record for t in trajectories]),
        logprobs=joined("logprobs"),
        values=joined("values"),
        policy_versions=joined("policy_versions"),
        rewards=joined("rewards"),
        num_steps=joined("num_steps"),
        offsets=np.concatenate(([0], np.cumsum(chunks))).astype(np.int32),
        bootstrap_value=np.array([t.bootstrap_value for t in trajectories], np.float32),
        terminated=np.array([t.terminated for t in trajectories]),
        truncated=np.array([t.truncated for t in trajectories]),
        success=np.array([t.success for t in trajectories]),
        group=np.array([t.episode.group for t in trajectories], np.int32),
        episode_id=np.array([t.episode.id for t in trajectories], np.int64),
        seed=np.array([t.episode.seed for t in trajectories], np.int64),
        model_version=np.array([t.model_version for t in trajectories], np.int32),
    )


def describe(batch: SuperBatch) -> dict[str, float]:
    """Metrics of the new real data (success, return, lengths), of the imagined data, and the staleness of all."""
    new = slice(0, batch.new_episodes)
    returns = np.add.reduceat(batch.rewards.sum(axis=1), batch.offsets[:-1])[new]
    steps = np.add.reduceat(batch.num_steps, batch.offsets[:-1])[new]
    success = batch.success[new]
    staleness = batch.staleness
    shares = np.bincount(staleness) / len(staleness)
    tasks = batch.task[batch.offsets[:-1]][new]
    per_task = {task: success[tasks == task].mean() for task in np.unique(tasks)}
    return {
        "rollout/success": float(success.mean()),
        "rollout/return": float(returns.mean()),
        "rollout/episode_steps": float(steps.mean()),
        "rollout/episodes": float(batch.new_episodes),
        "rollout/chunks": float(batch.offsets[batch.new_episodes]),
        "rollout/env_steps": float(steps.sum()),
        "rollout/staleness_mean": float(staleness.mean()),
        "rollout/staleness_max": float(staleness.max()),
        **{f"rollout/staleness_{updates}": float(share) for updates, share in enumerate(shares)},
        **{f"rollout/success_task_{task}": float(rate) for task, rate in per_task.items() if len(per_task) > 1},
        **({"rollout/expert_share": _expert_share(batch)} if EXPERT_STEPS in batch.record else {}),
        **_describe_imagined(batch),
    }


def _expert_share(batch: SuperBatch) -> float:
    """Of the control steps of the new episodes, those that the expert chose."""
    chunks = slice(0, batch.offsets[batch.new_episodes])
    return float(batch.record[EXPERT_STEPS][chunks].sum() / batch.num_steps[chunks].sum())


def _describe_imagined(batch: SuperBatch) -> dict[str, float]:
    """Nothing without a world model. ``return_spread``: standard deviation within a group, mean over groups."""
    if not batch.imagined_episodes:
        return {}
    part = slice(batch.num_episodes - batch.imagined_episodes, None)
    returns = np.add.reduceat(batch.rewards.sum(axis=1), batch.offsets[:-1])[part]
    groups = [returns[batch.group[part] == group] for group in np.unique(batch.group[part])]
    return {
        "imagined/episodes": float(batch.imagined_episodes),
        "imagined/chunks": float(batch.num_chunks - batch.real_chunks),
        "imagined/return": float(returns.mean()),
        "imagined/return_spread": float(np.mean([group.std() for group in groups])),
        "imagined/real_fraction": batch.real_chunks / batch.num_chunks,
    }
