"""What is wrong with a run, in words, from what it has recorded: a table of causes, each a small function.

Their order is that of the answer: what explains others comes first. docs/troubleshooting.md has a section for each, in
the same order. A cause whose figures a run lacks (an older version, another algorithm) is not judged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vla_rl.observability.why import episodes, speed, updates
from vla_rl.observability.why.recorded import Finding, Recorded, Verdict

__all__ = ["CAUSES", "Cause", "Finding", "Recorded", "findings", "judge", "not_judged"]


@dataclass(frozen=True, slots=True)
class Cause:
    """``needs``: metrics without which it is not judged; with a ``|``, one of them is enough."""

    title: str
    judge: Callable[[Recorded], Verdict | None]
    needs: tuple[str, ...]
    kind: Literal["fault", "likely", "speed"] = "fault"

    @property
    def name(self) -> str:
        return self.judge.__name__.replace("_", "-")

    def lacks(self, run: Recorded) -> tuple[str, ...]:
        """What it needs and the run has not recorded."""
        known = set().union(*run.metrics)
        return tuple(names for names in self.needs if not known & set(names.split("|")))


_KL, _RETURN, _EXPLAINED = "learner/update_kl|learner/approx_kl", "rollout/return", "learner/explained_variance"
CAUSES = (
    Cause("Optimizer steps were skipped", updates.nan_steps, ("learner/skipped_steps",)),
    Cause("The learning rate is too high", updates.learning_rate_too_high, (_KL, "learner/lr")),
    Cause("The learning rate is too low", updates.learning_rate_too_low, ("learner/lr",)),
    Cause("Updates go beyond algo.target_kl", updates.kl_beyond_its_bound, ("learner/update_kl",)),
    Cause("Nearly all actions are at a limit", episodes.actions_saturated, ("rollout/action_saturation",), "likely"),
    Cause("Actions hardly move anything", episodes.normalization_missing, ("rollout/action_middle",), "likely"),
    Cause("Returns rise, and nothing counts as a success", episodes.success_never_true, (_RETURN,), "likely"),
    Cause("The time limit may be too short", episodes.time_limit_too_short, ("rollout/episode_steps",), "likely"),
    Cause("The demonstrations mean something else", episodes.demonstrations_wrong, (_RETURN,), "likely"),
    Cause("The policy sees or acts in another convention", episodes.wrong_convention, (_RETURN,), "likely"),
    Cause("The clone knows its demonstrations by heart", episodes.overfitted_clone, ("eval/greedy_success",), "likely"),
    Cause("No episode has had a reward", episodes.reward_never_seen, (_RETURN,)),
    Cause("Nearly all groups are filtered out", episodes.all_groups_equal, ("episodes/filtered",)),
    Cause("An update sees too little", episodes.too_little_data, ("rollout/episodes", "rollout/success"), "likely"),
    Cause("The entropy has collapsed", updates.entropy_collapsed, ("learner/entropy",)),
    Cause("The data are too stale", updates.data_too_stale, ("learner/ess|episodes/stale",)),
    Cause("The value head explains nothing", updates.value_head_explains_nothing, (_EXPLAINED,), "likely"),
    Cause("The critic expects too much", updates.critic_expects_too_much, ("learner/critic_bias",), "likely"),
    Cause("Memory is short", speed.memory_bound, ("memory/gib",), "speed"),
    Cause("The processor's cores limit the speed", speed.cores_bound, ("machine/cpu",), "speed"),
    Cause("Simulators limit the speed", speed.simulator_bound, (speed.SIMULATORS,), "speed"),
    Cause("Inference limits the speed", speed.inference_bound, (speed.INFERENCE,), "speed"),
    Cause("The learner limits the speed", speed.learner_bound, (speed.LEARNER,), "speed"),
    Cause("One env worker is slower than the others", speed.slow_env_worker, ("throughput/slowest_worker",), "speed"),
    Cause("Evaluations take the time", speed.evaluations_take_the_time, ("time/iteration_s",), "speed"),
)


def findings(run: Path) -> list[Finding]:
    """What is wrong with the run in a folder, or with that of a copy of its ``metrics.jsonl``; best first.

    What limits its speed comes last. Raises UserError for no run, or one without an iteration.
    """
    return judge(Recorded.of(run))


def judge(run: Recorded) -> list[Finding]:
    """The same, of what was read."""
    found = [(cause, cause.judge(run)) for cause in CAUSES if not cause.lacks(run)]
    return [
        Finding(cause.name, cause.title, verdict.evidence, verdict.remedy, "likely" if verdict.weaker else cause.kind)
        for cause, verdict in found
        if verdict is not None
    ]


def not_judged(run: Recorded) -> dict[str, tuple[str, ...]]:
    """Causes that could not be judged, with the metrics that are missing."""
    return {cause.name: lacking for cause in CAUSES if (lacking := cause.lacks(run))}
