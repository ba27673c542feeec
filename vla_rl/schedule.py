"""Which episode comes next: a pure function of the run's seed and a running number, so that a resumed run goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vla_rl.types import Episode

_EVALUATION_STREAM = 1  # keeps evaluation seeds apart from training seeds


def training_episode(number: int, num_tasks: int, seed: int) -> Episode:
    """The ``number``-th training episode: tasks in turn, placements sampled by the simulator from its seed."""
    draw = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
    return Episode(id=number, task=number % num_tasks, seed=draw)


def training_group(number: int, size: int, num_tasks: int, seed: int) -> list[Episode]:
    """The ``number``-th group of training episodes: one task and placement, played ``size`` times. Ids are still to be
    given."""
    one = training_episode(number, num_tasks, seed)
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
