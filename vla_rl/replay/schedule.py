"""Which episode comes next: a function of the run's seed, a running number and a checkpoint's state, so that a resumed
run continues with the same episodes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from vla_rl.core.records import EpisodeSpec

# numbers that separate their seeds from those of training episodes
_EVALUATION_STREAM, _TASK_STREAM, _START_STREAM, _BENCHMARK_STREAM = 1, 2, 3, 4
_MEMORY = 0.95  # decay of a task's failure rate per episode: about the last 20 episodes count
_LEAST = 0.05  # added to every task's weight, so that a solved task is still sampled

TaskRule = Literal["in_turn", "by_failure"]


class TaskSchedule:
    """Which task is trained next: tasks in turn, or "by_failure", in proportion to their recent failure rates."""

    def __init__(self, num_tasks: int, seed: int, rule: TaskRule) -> None:
        self.failure = [1.0] * num_tasks  # recent failure rate of each task
        self._seed, self._rule = seed, rule

    def observe(self, task: int, success: bool) -> None:
        """Count the outcome of an episode."""
        self.failure[task] = _MEMORY * self.failure[task] + (1.0 - _MEMORY) * (not success)

    def task(self, number: int) -> int:
        """The task of the ``number``-th group of training episodes."""
        if self._rule == "in_turn":
            return number % len(self.failure)
        weights = np.array(self.failure) + _LEAST
        rng = np.random.default_rng((self._seed, number, _TASK_STREAM))
        return int(rng.choice(len(weights), p=weights / weights.sum()))

    def restore(self, failure: Sequence[float]) -> None:
        """Continue with the failure rates of a checkpoint."""
        self.failure = list(failure)


def training_episode(number: int, task: int, seed: int, init_state: int | None = None) -> EpisodeSpec:
    """The ``number``-th training episode, of a task. It starts from a benchmark initial state where one is given, else
    the simulator samples placements from its seed."""
    draw = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
    return EpisodeSpec(id=number, task=task, seed=draw, init_state=init_state)


def start_state(number: int, num_tasks: int, init_states: int, seed: int) -> int:
    """Which benchmark initial state the ``number``-th group starts from.

    If tasks come in turn, every state of a task is used once, in random order, before any is used again.
    """
    lap, position = divmod(number // num_tasks, init_states)
    rng = np.random.default_rng((seed, lap, number % num_tasks, _START_STREAM))
    return int(rng.permutation(init_states)[position])


def training_group(number: int, size: int, task: int, seed: int, init_state: int | None = None) -> list[EpisodeSpec]:
    """The ``number``-th group of training episodes: one start, played ``size`` times. The caller sets the ids."""
    one = training_episode(number, task, seed, init_state)
    return [replace(one, group=number, member=member) for member in range(size)]


def evaluation_episodes(
    first_id: int, count: int, num_tasks: int, init_states: int, seed: int, *, greedy: bool = True, record: int = 0
) -> list[EpisodeSpec]:
    """``count`` episodes, spread evenly over tasks and over each task's benchmark initial states.

    The first ``record`` of them keep their frames. Seeds of the action sampling depend only on the position in the
    list, so that two evaluations of one policy play the same episodes.
    """
    episodes = []
    for i in range(count):
        draw = int(np.random.SeedSequence((seed, i, _EVALUATION_STREAM)).generate_state(1)[0])
        state = (i // num_tasks) % init_states
        episode = EpisodeSpec(
            first_id + i, i % num_tasks, draw, state, evaluation=True, greedy=greedy, record=i < record
        )
        episodes.append(episode)
    return episodes


def benchmark_episodes(
    tasks: Sequence[int], trials: int, init_states: int, seed: int, *, greedy: bool = True
) -> list[EpisodeSpec]:
    """``trials`` episodes of each task, one task after the other; trial i starts from benchmark initial state i.

    ``EpisodeSpec.member`` is the trial. An episode depends on its task and trial alone, not on what else is played:
    an evaluation can be interrupted, and extended by further trials.
    """
    episodes = []
    for task in tasks:
        for trial in range(trials):
            draw = int(np.random.SeedSequence((seed, task, trial, _BENCHMARK_STREAM)).generate_state(1)[0])
            state = trial % init_states
            episodes.append(EpisodeSpec(0, task, draw, state, member=trial, evaluation=True, greedy=greedy))
    return episodes
