import json

import numpy as np
import pytest

from tests.runtime_fakes import SPEC, result
from vla_rl.observability.success_rate import Evaluation, wilson_interval
from vla_rl.replay.schedule import evaluation_episodes


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # by hand from Wilson's formula with z = 1.959964
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (25, 50, 0.36645, 0.63355), (1, 1, 0.20655, 1.0)],
)
def test_wilson_interval(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-4)


def test_wilson_interval_covers_the_truth():
    rng = np.random.default_rng(0)
    for rate in (0.05, 0.3, 0.9):
        draws = rng.binomial(50, rate, size=2000)
        covered = np.mean([low <= rate <= high for low, high in (wilson_interval(int(d), 50) for d in draws)])
        assert covered > 0.92


def test_record_counts_tasks_and_versions():
    episodes = evaluation_episodes(100, 7, 2, 50, seed=0, greedy=False, record=2)
    evaluation = Evaluation(SPEC, False, tuple(result(e, version=3) for e in reversed(episodes)))
    record = json.loads(json.dumps(evaluation.record()))
    assert record["successes"] == sum(e.id % 2 == 0 for e in episodes) == 4
    assert record["actions"] == "sampled"
    assert record["assets"] == "none"
    assert record["policy_versions"] == [3]
    assert [t["episodes"] for t in record["tasks"]] == [4, 3]
    assert [round(t["success"], 2) for t in record["tasks"]] == [1.0, 0.0]
    assert record["tasks"][0]["success_low95"] == pytest.approx(0.51011, abs=1e-4)
    assert record["tasks"][1]["success_high95"] == pytest.approx(0.56150, abs=1e-4)
    table = evaluation.table()
    assert [list(column.cells) for column in table.columns[1:]] == [
        ["4 of 4", "0 of 3"],
        ["100%", "0%"],
        ["51% to 100%", "0% to 56%"],
    ]
    assert [r["init_state"] for r in record["runs"]] == [0, 0, 1, 1, 2, 2, 3]
    assert "57.1% (4/7" in evaluation.text()
    assert [e.record for e in episodes] == [True, True] + [False] * 5


def test_episodes_that_start_alike_narrow_no_interval():
    once, twice = (
        Evaluation(SPEC, True, tuple(result(e) for e in evaluation_episodes(0, count, 1, 10, seed=0)))
        for count in (10, 20)
    )
    assert (once.successes, twice.successes) == (5, 10)
    assert twice.interval == once.interval == wilson_interval(5, 10)
    assert "10/20 from 10 different starts, 95%" in twice.text()
    assert "5/10, 95%" in once.text()
