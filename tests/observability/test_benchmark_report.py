"""Failures by kind, and the report of a benchmark evaluation."""

import math
from dataclasses import replace

import pytest

from tests.runtime_fakes import SPEC, result
from vla_rl.core.records import EpisodeResult
from vla_rl.observability.benchmark_report import benchmark_results, episode_row, markdown
from vla_rl.observability.success_rate import Evaluation
from vla_rl.observability.verdicts import FAILURES, failure_kind
from vla_rl.replay.schedule import benchmark_episodes


def ended(success: bool, terminated: bool, best: float = math.nan, final: float = math.nan) -> EpisodeResult:
    (episode,) = benchmark_episodes([0], 1, 50, 0)
    one = result(episode)
    return replace(one, success=success, terminated=terminated, best_progress=best, final_progress=final)


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (ended(True, True, 1.0, 1.0), None),
        (ended(False, True, 0.9, 0.9), "ended"),
        (ended(False, False), "time_limit"),
        (ended(False, False, 0.2, 0.1), "no_progress"),
        (ended(False, False, 1.0, 0.0), "progress_lost"),
        (ended(False, False, 0.7, 0.6), "on_the_way"),
        (replace(ended(False, False), set_aside=True), "set_aside"),
    ],
)
def test_failures_have_a_kind(outcome: EpisodeResult, kind: str | None) -> None:
    assert failure_kind(outcome) == kind
    assert kind is None or kind in FAILURES


def test_benchmark_episodes_depend_on_task_and_trial_alone() -> None:
    few, many = benchmark_episodes([1, 3], 2, 50, 7), benchmark_episodes([0, 1, 2, 3], 60, 50, 7)
    by_key = {(e.task, e.member): e for e in many}
    assert len(by_key) == 240
    assert all(by_key[e.task, e.member] == e for e in few)
    assert [e.init_state for e in many if e.task == 2] == [*range(50), *range(10)]
    assert len({e.seed for e in many}) == 240
    assert by_key[1, 0].seed != benchmark_episodes([1], 1, 50, 8)[0].seed


def test_the_report_counts_each_suite_and_averages_what_publications_average() -> None:
    rows = []
    for suite, successes in (("one", 3), ("two", 1), ("ninety", 0)):
        for number, episode in enumerate(benchmark_episodes([0, 1], 2, 50, 0)):
            outcome = replace(result(episode), success=number < successes, best_progress=1.0, final_progress=0.0)
            rows.append(episode_row(suite, SPEC.instructions[episode.task], outcome))
    found = benchmark_results(rows, {"one": 4, "two": 4, "ninety": 180}, ("one", "two"))
    assert [suite["success"] for suite in found["suites"]] == [0.75, 0.25, 0.0]
    assert [task["success"] for task in found["suites"][0]["tasks"]] == [1.0, 0.5]
    assert (found["overall"]["suites"], found["overall"]["success"]) == (["one", "two"], 0.5)
    assert found["overall"]["success_low95"] == pytest.approx(0.2152, abs=1e-4)  # Wilson's, 4 of 8
    assert found["suites"][1]["failures"] == {"progress_lost": 3}
    assert not found["complete"], "ninety lacks 176 episodes"
    page = markdown("A page", ["first fact"], found)
    assert page.startswith("# A page\n\n* first fact\n")
    assert "| one | 4 | 75.0% | 30.1% to 95.4% | 10 |" in page
    assert "| ninety | 4 of 180 | 0.0% | 0.0% to 49.0% | 10 |" in page
    assert "| 1 | do that | 2 | 50.0% | 9.5% to 90.5% | 10 | progress_lost 1 |" in page
    assert "| progress_lost | 8 |" in page
    assert "**Not complete**" in page
    assert benchmark_results(rows, {"one": 4}, ())["complete"]


def test_an_episode_that_was_set_aside_is_no_failure_of_the_policy() -> None:
    outcomes = [replace(result(e), success=e.member == 0) for e in benchmark_episodes([0], 3, 50, 0)]
    outcomes[2] = replace(outcomes[2], success=False, steps=0, set_aside=True)
    found = benchmark_results([episode_row("one", "do this", outcome) for outcome in outcomes], {"one": 3}, ())
    (suite,) = found["suites"]
    assert (suite["episodes"], suite["success"], suite["mean_steps"], suite["set_aside"]) == (2, 0.5, 10, 1)
    assert suite["failures"] == {"time_limit": 1}
    assert not found["complete"], "it is played again"
    page = markdown("A page", [], found)
    assert "| one | 2 of 3 | 50.0% |" in page
    assert "| time_limit 1, set_aside 1 |" in page
    assert f"| set_aside | 1 | {FAILURES['set_aside']} |" in page
    evaluation = Evaluation(SPEC, True, tuple(outcomes))
    assert (evaluation.success, evaluation.record()["episodes"], evaluation.record()["set_aside"]) == (0.5, 2, 1)
    assert [(row["episodes"], row["success"]) for row in evaluation.per_task()] == [(2, 0.5)]
    assert evaluation.text().endswith("; 1 set aside: their simulators died each time)")
