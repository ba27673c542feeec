"""What ``vla_rl.train`` returns: a short text, curves, films, and what a notebook shows of it."""

import json
from pathlib import Path

import pytest

from vla_rl import TrainResult
from vla_rl.core.errors import UserError


@pytest.fixture
def result(tmp_path: Path) -> TrainResult:
    metrics = [
        {"iteration": i, "time/seconds": 60.0 * i, "episodes/control_steps": 50 * i, "rollout/success": i / 4}
        | ({"eval/greedy_success": i / 4, "eval/greedy_low95": 0.0, "eval/greedy_high95": 1.0} if i % 2 == 0 else {})
        for i in range(4)
    ]
    run = tmp_path / "a<b"
    (run / "evaluations").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    return TrainResult(run, metrics, run / "checkpoints/000003/policy", None, 3)


def test_it_says_in_a_line_what_came_out(result: TrainResult) -> None:
    assert repr(result) == f"<TrainResult {result.run}: 3 updates, greedy success 0% to 50%>"
    result.metrics.clear()
    assert repr(result) == f"<TrainResult {result.run}: 3 updates>"


def test_curves_are_drawn_over_what_is_asked_for(result: TrainResult, tmp_path: Path) -> None:
    assert result.plot().path == result.run / "curves.png"
    over_steps = result.plot("steps")
    assert over_steps.path == result.run / "curves_steps.png"
    assert Path(over_steps).read_bytes().startswith(b"\x89PNG")
    assert '<img alt="Curves of &lt;TrainResult' in over_steps._repr_html_()
    assert result.plot(output=tmp_path / "x.png").path.is_file()
    with pytest.raises(UserError, match=r"x='episodes': the curves of .* can be drawn over steps, minutes$"):
        result.plot("episodes")


def test_films_are_found_by_iteration(result: TrainResult) -> None:
    with pytest.raises(UserError, match=r"no film; none of its evaluations was filmed; train with log.video=true"):
        result.film()
    for iteration in (0, 2):
        (result.run / f"evaluations/00000{iteration}-greedy.mp4").write_bytes(b"film")
    assert result.film().path.name == "000002-greedy.mp4"
    assert result.film(0).path.name == "000000-greedy.mp4"
    with pytest.raises(UserError, match=r"no film of iteration 1; it has those of iterations 0, 2"):
        result.film(1)


def test_a_notebook_shows_figures_curves_and_the_newest_film(result: TrainResult) -> None:
    assert "<img" not in result._repr_html_(), "showing it writes nothing"
    result.plot()
    (result.run / "evaluations/000002-greedy.mp4").write_bytes(b"film")
    shown = result._repr_html_()
    for part in ("a&lt;b</td>", "<th>greedy success</th><td>0% to 50%</td>", "<img alt=", "<video controls"):
        assert part in shown, part
    assert "a<b" not in shown
