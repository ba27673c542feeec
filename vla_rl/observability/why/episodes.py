"""Causes in the episodes: rewards, successes, actions, conventions, groups, and how many there are.

"Healthy" are the runs in docs/results that learned.
"""

from pathlib import Path
from typing import Any

from vla_rl.core.files import json_or_empty
from vla_rl.observability.why.recorded import WINDOW, Recorded, Verdict

_MANY = 200  # episodes without a success: a policy that succeeds in 2 % has one in 98 % of the cases
_AT_LIMITS = 0.9  # share of the numbers that are not in the middle; scripted experts have 0.3 to 0.5
_IN_MIDDLE = 0.95  # share of the numbers; scripted experts have 0.1 to 0.7
_SOLVED = 0.8
_LATE = 0.85  # share of the time limit that successes take; healthy: at most 0.5
_RARE = 0.02  # success below which the length of a success is not known
_PASSES = 30  # over the demonstrations; 17 made a clone of 48 % (PushCube), 62 one of 3 % (docs/recipes.md)
_FAILING = 0.2
_FILTERED = 0.8  # of the finished episodes; healthy: at most 0.7, where 94 % succeed
_FEW_EPISODES = 8  # healthy: 16 and more
_DIAGNOSE = "vla-rl diagnose {} compares images, actions, statistics and prompts with demonstrations."


def actions_saturated(run: Recorded) -> Verdict | None:
    share = run.typical("rollout/action_saturation")
    if not share > _AT_LIMITS or run.success_now >= _SOLVED:
        return None
    return Verdict(
        f"{share:.0%} of the numbers that move anything lie within 1 % of a limit or beyond it, and "
        f"{run.success_now:.0%} of the episodes succeed: another scale, other statistics or a policy that has diverged "
        "does this.",
        _compare(run),
    )


def normalization_missing(run: Recorded) -> Verdict | None:
    share = run.typical("rollout/action_middle")
    if not share > _IN_MIDDLE or not _always_fails(run):
        return None
    return Verdict(
        f"{share:.0%} of the executed numbers lie within 1 % of the middle of their limits, and none of {run.played} "
        "episodes succeeded: the statistics that scale actions are probably missing, or others.",
        _compare(run),
    )


def success_never_true(run: Recorded) -> Verdict | None:
    if not _always_fails(run) or (rise := run.rise("rollout/return")) is None:
        return None
    return Verdict(
        f"The mean return rose from {rise[0]:.3g} to {rise[1]:.3g}, and none of {run.played} episodes succeeded.",
        "Film some (vla-rl eval RUN --video FILE): if they look solved, correct the test of success (env.success of "
        "env=gymnasium); if nearly, raise env.max_episode_steps.",
    )


def time_limit_too_short(run: Recorded) -> Verdict | None:
    limit = run.setting("env.max_episode_steps", run.metadata.get("max_episode_steps"))
    steps, success = run.values("rollout/episode_steps")[-WINDOW:], run.values("rollout/success")[-WINDOW:]
    if limit is None or len(success) < WINDOW or not _RARE < (p := float(success.mean())) < _SOLVED:
        return None
    length = (float(steps.mean()) - (1 - p) * limit) / p  # if failures last until the limit; else it is more
    if length < _LATE * limit:
        return None
    return Verdict(
        f"{p:.0%} succeed, after about {length:.0f} of {limit} steps: many more may have been about to.",
        f"Raise env.max_episode_steps to {3 * limit // 2}.",
    )


def demonstrations_wrong(run: Recorded) -> Verdict | None:
    demos = [*run.setting("sft.demos", ()), *run.setting("algo.bc_demos", ())]
    if not demos or not _always_fails(run) or run.rise("rollout/return"):
        return None
    return Verdict(
        f"None of {run.played} episodes succeeded, and the config names demonstrations, {demos[0]}.",
        f"vla-rl demos inspect {demos[0]} CONFIG compares grippers, scales, signs and images with the simulator.",
    )


def wrong_convention(run: Recorded) -> Verdict | None:
    checkpoint = run.setting("policy.checkpoint")
    if checkpoint is None or not _always_fails(run) or run.rise("rollout/return"):
        return None
    return Verdict(
        f"None of {run.played} episodes succeeded, though the policy began as {checkpoint}. Images upside down, another"
        " scale of actions, a gripper turned around or other statistics do this.",
        _DIAGNOSE.format(checkpoint),
    )


def overfitted_clone(run: Recorded) -> Verdict | None:
    about = _of_checkpoint(run)
    first = next(m["eval/greedy_success"] for m in run.metrics if "eval/greedy_success" in m)
    if not about.get("passes", 0) > _PASSES or first > _FAILING:
        return None
    return Verdict(
        f"It was trained on each of its {about.get('steps')} steps {about['passes']:g} times, to a loss of "
        f"{about.get('final_loss')}, and began at a success of {first:.0%}.",
        "Clone more demonstrations (sft.demo_episodes), or make fewer updates (sft.updates).",
    )


def reward_never_seen(run: Recorded) -> Verdict | None:
    if not _always_fails(run) or run.values("rollout/return").any():
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
        f"{filtered:.0f} of the last {filtered + trained:.0f} episodes were filtered out, since their whole group "
        f"returned the same; success is {run.success_now:.0%}.",
        "Take a better warm start, a larger algo.group_size, a higher policy.temperature, or algo=ppo.",
    )


def too_little_data(run: Recorded) -> Verdict | None:
    episodes, success = run.typical("rollout/episodes"), run.values("rollout/success")
    if len(success) < WINDOW:
        return None
    if len(remembered := run.values("learner/memory_episodes")):
        takes_demos = run.setting("policy.steer") is None  # demonstrations hold no noise
        return _too_little_remembered(remembered[-1], run.last("learner/memory_success"), takes_demos)
    seen = episodes * float(success[-WINDOW:].mean())
    if episodes * run.setting("train.reuse", 1) >= _FEW_EPISODES and not 0 < seen < 1:
        return None
    return Verdict(
        f"An update has {episodes:.0f} new episodes, {seen:.1f} of them successful: chance decides where it goes.",
        "Raise train.batch_episodes (recipes have 16 to 64), or train.reuse with train.max_staleness.",
    )


def _too_little_remembered(episodes: float, success: float, takes_demos: bool) -> Verdict | None:
    """Of a replay memory, in which few new episodes are no fault: all are drawn many times."""
    if not 0 < episodes * success < _FEW_EPISODES:
        return None
    return Verdict(
        f"The memory has {episodes:.0f} episodes, {episodes * success:.0f} of them successful: the critic hardly knows "
        "what succeeds.",
        "Begin with a better clone (more sft.demo_episodes or sft.updates)"
        + (", or add demonstrations (algo.demos)." if takes_demos else "."),
    )


def _always_fails(run: Recorded) -> bool:
    return run.never_succeeds and run.played >= _MANY


def _compare(run: Recorded) -> str:
    checkpoint = run.setting("policy.checkpoint")
    if checkpoint is not None:
        return _DIAGNOSE.format(checkpoint)
    return "Compare the limits of the actions (env.action_limits of env=gymnasium) with what the task needs."


def _of_checkpoint(run: Recorded) -> dict[str, Any]:
    """What `vla-rl sft` wrote about the policy with which the run began; empty where that is not here."""
    checkpoint = run.setting("policy.checkpoint")
    return {} if checkpoint is None else json_or_empty(Path(checkpoint) / "metadata.json")
