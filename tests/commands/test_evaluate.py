import json
from dataclasses import replace

import numpy as np
import pytest

from tests.runtime_fakes import SPEC, result
from vla_rl.commands.evaluate import failures_first, replays_alike
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


def test_what_is_played_again_is_chosen_and_compared_by_how_it_ended():
    first = [result(e) for e in reversed(evaluation_episodes(0, 6, 2, 10, seed=0))]
    chosen = failures_first(first)[:4]
    assert [(r.episode.id, r.success) for r in chosen] == [(1, False), (3, False), (5, False), (0, True)]
    again = [replace(r, episode=replace(r.episode, id=90 + i, record=True)) for i, r in enumerate(chosen[::-1])]
    assert replays_alike(chosen, again) == tuple(again[::-1]), "the store has numbered them anew"
    again[1] = replace(again[1], success=True)
    again[2] = replace(again[2], steps=11)
    assert replays_alike(chosen, again[1:]) == (again[3],), "one ended otherwise, one later, and one died"


def test_a_film_shows_the_replays_if_there_are_any():
    recorded = tuple(replace(result(e), frames=(e.id,)) for e in evaluation_episodes(0, 3, 2, 10, seed=0))
    evaluation = Evaluation(SPEC, True, recorded[::-1])
    assert evaluation.frames == [(0,), (1,), (2,)]
    again = replace(evaluation, replays=recorded[1:2])
    assert again.frames == [(1,)]
    (row,) = again.record()["filmed"]
    assert (row["instruction"], row["verdict"], row["from_s"]) == ("do that", "failure: time limit", 0.0)
    assert again.success == evaluation.success, "replays count nothing"
    assert repr(again) == f"<Evaluation on fake: {evaluation.text()}>"
