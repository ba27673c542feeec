"""Which episode comes next: settled by the run's seed, a running number and what a checkpoint holds, so that a resumed
run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from vla_rl.core.records import Episode

_EVALUATION_STREAM, _TASK_STREAM, _START_STREAM = 1, 2, 3  # keep their seeds apart from those of training episodes
_MEMORY = 0.95  # weight of what was known of a task when another of its episodes ends: the last 20 or so count
_LEAST = 0.05  # share of the failure rate that a task without failures is still sampled by, so that it is not forgotten

TaskRule = Literal["in_turn", "by_failure"]


class TaskSchedule:
    """Which task is trained next. "by_failure": drawn in proportion to the recent failure rates, which start equal."""

    def __init__(self, num_tasks: int, seed: int, rule: TaskRule) -> None:
        self.failure = [1.0] * num_tasks  # recent rate of each task
        self._seed, self._rule = seed, rule

    def observe(self, task: int, success: bool) -> None:
        """An episode of a task has ended."""
        self.failure[task] = _MEMORY * self.failure[task] + (1.0 - _MEMORY) * (not success)

    def task(self, number: int) -> int:
        """Of the ``number``-th group of training episodes."""
        if self._rule == "in_turn":
            return number % len(self.failure)
        weights = np.array(self.failure) + _LEAST
        rng = np.random.default_rng((self._seed, number, _TASK_STREAM))
        return int(rng.choice(len(weights), p=weights / weights.sum()))

    def restore(self, failure: Sequence[float]) -> None:
        """Go on with the rates of a checkpoint."""
        self.failure = list(failure)


def training_episode(number: int, task: int, seed: int, init_state: int | None = None) -> Episode:
    """The ``number``-th training episode, of a task. It starts from a benchmark initial state where one is given, else
    the simulator samples placements from its seed."""
    draw = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
    return Episode(id=number, task=task, seed=draw, init_state=init_state)


def start_state(number: int, num_tasks: int, init_states: int, seed: int) -> int:
    """Which benchmark initial state the ``number``-th group starts from. Where tasks come in turn, each of a task's
    states comes once, in an order drawn anew, before any comes again."""
    lap, position = divmod(number // num_tasks, init_states)
    rng = np.random.default_rng((seed, lap, number % num_tasks, _START_STREAM))
    return int(rng.permutation(init_states)[position])


def training_group(number: int, size: int, task: int, seed: int, init_state: int | None = None) -> list[Episode]:
    """The ``number``-th group of training episodes: one task and placement, played ``size`` times. Ids are still to be
    given."""
    one = training_episode(number, task, seed, init_state)
    return [replace(one, group=number, member=member) for member in range(size)]


def evaluation_episodes(
    first_id: int, count: int, num_tasks: int, init_states: int, seed: int, *, greedy: bool = True, record: int = 0
) -> list[Episode]:
    """``count`` episodes, spread evenly over tasks and over each task's benchmark initial states.

    The first ``record`` of them keep their frames. Seeds (of the action sampling) depend on the position in the list
    only, so that two evaluations of one policy play the same episodes.
    """
    episodes = []
    for i in range(count):
        draw = int(np.random.SeedSequence((seed, i, _EVALUATION_STREAM)).generate_state(1)[0])
        state = (i // num_tasks) % init_states
        episode = Episode(first_id + i, i % num_tasks, draw, state, evaluation=True, greedy=greedy, record=i < record)
        episodes.append(episode)
    return episodes
