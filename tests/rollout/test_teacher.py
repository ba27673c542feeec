"""The scripted expert as a teacher, in a real simulator."""

from __future__ import annotations

import numpy as np
import pytest

from envs import make_env
from envs.base import EnvError
from envs.workload.config import WorkloadConfig
from envs.workload.env import WorkloadVectorEnv
from vla_rl.config.loading import load_config
from vla_rl.core.records import TeacherRule
from vla_rl.replay.schedule import evaluation_episodes, training_episode
from vla_rl.rollout.teacher import Teacher

K = 4


def test_it_takes_over_as_often_as_the_rule_says_and_never_in_evaluations() -> None:
    env = WorkloadVectorEnv(WorkloadConfig(), 1)
    teacher = Teacher(TeacherRule(0.5, decay=10), env, K)
    episodes = [training_episode(number, 0, 0) for number in range(400)]
    shares = [np.mean([teacher.takes_over(e, 3, version) for e in episodes]) for version in (0, 5, 10, 12)]
    assert shares == pytest.approx([0.5, 0.25, 0.0, 0.0], abs=0.06)
    assert [teacher.takes_over(e, 3, 0) for e in episodes] == [teacher.takes_over(e, 3, 0) for e in episodes]
    (judged,) = evaluation_episodes(0, 1, 1, 50, 0)
    assert not any(teacher.takes_over(judged, chunk, 0) for chunk in range(50))


def test_its_chunks_solve_the_task_and_are_recorded_as_they_were_executed() -> None:
    config = load_config(None, ["env=tabletop", "env.tasks=[reach]"]).env
    env, twin = make_env(config, 1), make_env(config, 1)
    teacher, episode = Teacher(TeacherRule(1.0), env, K), training_episode(3, 0, 0)
    for one in (env, twin):
        one.reset([0], [episode])
    for _ in range(50):
        taught = teacher.play(0)
        assert taught is not None
        steps = int(taught.outcome.num_steps[0])
        assert not taught.actions[steps:].any()
        again = twin.step([0], taught.actions[None])
        for name in ("rewards", "num_steps", "terminated", "truncated", "success"):
            assert np.array_equal(getattr(again, name), getattr(taught.outcome, name)), name
        if again.terminated[0]:
            break
    assert taught.outcome.success[0]
    for one in (env, twin):
        one.close()


def test_a_simulator_without_an_expert_is_refused() -> None:
    env = WorkloadVectorEnv(WorkloadConfig(), 1)
    env.reset([0], [training_episode(0, 0, 0)])
    with pytest.raises(EnvError):
        Teacher(TeacherRule(1.0), env, K).play(0)
