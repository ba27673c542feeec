"""Simulator, inference and learner overlap; `vla-rl benchmark overlap` measures it to the percent."""

import pytest

from vla_rl.commands.benchmark.overlap import StageCosts, measure_overlap

pytestmark = [pytest.mark.slow, pytest.mark.alone]


def test_an_asynchronous_iteration_takes_little_more_than_its_slowest_stage():
    outcome = measure_overlap(StageCosts(simulate=0.8, infer=0.8, train=0.8), iterations=2)
    stages = outcome.simulate + outcome.infer + outcome.train
    assert outcome.sync > 0.8 * stages, "in sync mode, stages run one after the other"
    assert outcome.to_slowest < 1.75  # 1.0 on an idle machine; CI's may be busy
    assert outcome.speedup > 1.4
