"""Causes in the episodes: rewards, successes, actions, conventions, groups, and how many there are."""

from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.core.files import json_or_empty
from vla_rl.observability.why.recorded import WINDOW, Recorded, Verdict

_MANY = 200  # episodes without a success, after which chance is no explanation: one in 70 would be seen in 95 %
_AT_LIMITS = 0.9  # share of the numbers
_AT_REST = 0.95
_SOLVED = 0.8
_LATE = 0.85  # share of the time limit that successes take; healthy: at most 0.6
_RARE = 0.02  # success below which the length of a success is not known
_PASSES = 30  # over the demonstrations; 17 made a clone of 48 % (PushCube), 62 one of 3 % (docs/recipes.md)
_FAILING = 0.2
_FILTERED = 0.8  # of the finished episodes; healthy: at most 0.75, where 94 % succeed
_FEW_EPISODES = 8  # healthy: 16 and more
_DIAGNOSE = "vla-rl diagnose {checkpoint} names the convention, of images, actions, statistics and prompts."


def actions_saturated(run: Recorded) -> Verdict | None:
    share = run.typical("rollout/action_saturation")
    if not share > _AT_LIMITS or run.success_now >= _SOLVED:
        return None
    return Verdict(
        f"{share:.0%} of the executed numbers lie within 1 % of a limit or beyond it, at a success of "
        f"{run.success_now:.0%}: statistics of another data set, another unit, or an entropy that grows do this.",
        _compare(run),
        likely=True,
    )


def normalisation_missing(run: Recorded) -> Verdict | None:
    share = run.typical("rollout/action_middle")
    if not share > _AT_REST or not _fails_for_long(run):
        return None
    return Verdict(
        f"{share:.0%} of the executed numbers lie within 1 % of the middle of their limits, and none of {run.played} "
        "episodes succeeded: normalized numbers are probably taken for physical ones, or the statistics are not these.",
        _compare(run),
        likely=True,
    )


def success_never_true(run: Recorded) -> Verdict | None:
    returns, third = run.values("rollout/return"), len(run.values("rollout/return")) // 3
    if not third or not _fails_for_long(run) or not returns.any():
        return None
    first, last = returns[:third], returns[-third:]
    noise = np.sqrt((first.var() + last.var()) / third)
    if not last.mean() - first.mean() > 2 * noise:
        return None
    return Verdict(
        f"The mean return rose from {first.mean():.3g} to {last.mean():.3g}, and none of {run.played} episodes succeeded.",
        "Film some (vla-rl eval RUN --video FILE): if they look solved, correct the test of success (env.success of "
        "env=gymnasium); if they nearly are, raise env.max_episode_steps.",
        likely=True,
    )


def time_limit_too_short(run: Recorded) -> Verdict | None:
    limit = run.setting("env.max_episode_steps", run.metadata.get("max_episode_steps"))
    steps, success = run.values("rollout/episode_steps")[-WINDOW:], run.values("rollout/success")[-WINDOW:]
    if limit is None or len(steps) < WINDOW or not _RARE < (p := success.mean()) < _SOLVED:
        return None
    length = (steps.mean() - (1 - p) * limit) / p  # of successes, where failures last until the limit
    if length < _LATE * limit:
        return None
    return Verdict(
        f"Successes take about {length:.0f} of {limit} steps (by {steps.mean():.0f} steps an episode and a success of "
        f"{p:.0%}).",
        "Raise env.max_episode_steps by a half.",
        likely=True,
    )


def demonstrations_wrong(run: Recorded) -> Verdict | None:
    demos = [*run.setting("sft.demos", ()), *run.setting("algo.bc_demos", ())]
    if not demos or not _fails_for_long(run) or run.values("rollout/return").any():
        return None
    return Verdict(
        f"None of {run.played} episodes has had a reward, and the policy was cloned from {demos[0]}.",
        f"vla-rl demos inspect {demos[0]} CONFIG compares grippers, scales, signs and images with the simulator.",
        likely=True,
    )


def wrong_convention(run: Recorded) -> Verdict | None:
    checkpoint = run.setting("policy.checkpoint")
    if checkpoint is None or not _fails_for_long(run) or run.values("rollout/return").any():
        return None
    return Verdict(
        f"None of {run.played} episodes has had a reward, though the policy comes from {checkpoint}: images upside down, "
        "another scale of actions, a gripper turned around or other statistics do this.",
        _DIAGNOSE.format(checkpoint=checkpoint),
        likely=True,
    )


def overfitted_clone(run: Recorded) -> Verdict | None:
    about = _of_checkpoint(run)
    first = next(m["eval/greedy_success"] for m in run.metrics if "eval/greedy_success" in m)
    if not about.get("passes", 0) > _PASSES or first > _FAILING:
        return None
    return Verdict(
        f"It saw each of {about.get('steps')} demonstrated steps {about['passes']:g} times, to a loss of "
        f"{about.get('final_loss')}, and succeeds in {first:.0%}.",
        "Clone more demonstrations (sft.demo_episodes), or fewer updates (sft.updates).",
        likely=True,
    )


def reward_never_seen(run: Recorded) -> Verdict | None:
    if not _fails_for_long(run) or run.values("rollout/return").any():
        return None
    return Verdict(
        f"All of {run.played} episodes returned 0: no update has a signal.",
        "Begin with a policy that succeeds at times (vla-rl sft), with an easier task, or with env.shaping.",
    )


def all_groups_equal(run: Recorded) -> Verdict | None:
    filtered, trained = run.grown("episodes/filtered"), run.grown("episodes/trained")
    if filtered <= _FILTERED * (filtered + trained) or run.success_now >= _SOLVED:
        return None
    return Verdict(
        f"{filtered:.0f} of the last {filtered + trained:.0f} episodes were filtered out, since their group returned the "
        f"same, at a success of {run.success_now:.0%}.",
        "Take a better warm start, a larger algo.group_size, a higher policy.temperature, or algo=ppo.",
    )


def too_little_data(run: Recorded) -> Verdict | None:
    episodes, success = run.typical("rollout/episodes"), run.values("rollout/success")
    seen = episodes * float(success[-WINDOW:].mean()) if len(success) else 0.0
    if len(success) < WINDOW or (episodes * run.setting("train.reuse", 1) >= _FEW_EPISODES and not 0 < seen < 1):
        return None
    return Verdict(
        f"An update has {episodes:.0f} new episodes, {seen:.1f} of them successful: chance decides where it goes.",
        "Raise train.batch_episodes (this project's runs had 16 to 64), or train.reuse with train.max_staleness.",
        likely=True,
    )


def _fails_for_long(run: Recorded) -> bool:
    return run.never_succeeds and run.played >= _MANY


def _compare(run: Recorded) -> str:
    checkpoint = run.setting("policy.checkpoint")
    if checkpoint is not None:
        return _DIAGNOSE.format(checkpoint=checkpoint)
    return "Compare env.action_limits, the limits that the simulator declares, with what the task needs."


def _of_checkpoint(run: Recorded) -> dict[str, Any]:
    """What `vla-rl sft` wrote about the policy with which the run began; empty where that is not here."""
    checkpoint = run.setting("policy.checkpoint")
    return {} if checkpoint is None else json_or_empty(Path(checkpoint) / "metadata.json")
