"""`vla-rl plot`: pictures of runs."""

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests import ROOT
from vla_rl.commands.cli import main
from vla_rl.observability import plots
from vla_rl.observability.plots import smoothed


def records(path: Path, success: float, evaluated: bool = True) -> Path:
    lines = [
        {"iteration": i, "time/seconds": 60.0 * i, "rollout/success": success}
        | ({"eval/greedy_success": success, "eval/greedy_low95": 0.0, "eval/greedy_high95": 1.0} if evaluated else {})
        for i in range(4)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_one_run_and_several(tmp_path, capsys):
    one, other = records(tmp_path / "one.jsonl", 0.2), records(tmp_path / "other.jsonl", 0.7, evaluated=False)
    sizes = set()
    for runs in ([one], [one, other]):
        picture = tmp_path / "curves.png"
        assert main(["plot", *map(str, runs), "--output", str(picture)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        sizes.add(picture.stat().st_size)
        assert str(picture) in capsys.readouterr().out
    assert len(sizes) == 2


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "does not exist"),
        ("", "nothing to draw"),
        ('{"iteration": 1', "nothing to draw"),  # cut off by a crash
        ('{"iteration": 1}\n{\n', "metrics.jsonl:2 is not JSON"),
        ('{"iteration": 1}\n[2]\n', "metrics.jsonl:2 is not a record of metrics"),
        ('{"seed": 1}\n', "metrics.jsonl:1 is not a record of metrics"),
        ("[" * 5000 + "\n", "metrics.jsonl:1 is not JSON"),
        ("1" * 5000 + "\n", "metrics.jsonl:1 is not JSON"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path, capsys, content, expected):
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_text(content)
    assert main(["plot", str(path), "--output", str(tmp_path / "p.png")]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "p.png").exists()


def test_runs_of_the_same_name_are_refused(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    paths = [records(tmp_path / "m.jsonl", 0.1), records(tmp_path / "a" / "m.jsonl", 0.2)]
    assert main(["plot", *map(str, paths), "--output", str(tmp_path / "p.png")]) == 2
    assert "same name" in capsys.readouterr().err


def test_the_moving_mean_shifts_nothing():
    ramp = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert list(smoothed(np.array(ramp), 3)) == [0.5, 1.0, 2.0, 3.0, 3.5]


def test_a_comparison_has_no_panel_for_evaluations_that_no_run_made(tmp_path, monkeypatch):
    titles = []
    plotted = plots.figure

    @contextmanager
    def spied(*arguments, **options):
        with plotted(*arguments, **options) as axes:
            yield axes
            titles.append([axis.get_title() for axis in axes[0]])

    monkeypatch.setattr(plots, "figure", spied)
    rollouts = {"iteration": 1, "time/seconds": 60.0, "rollout/success": 0.2}
    for more in ({}, {"eval/greedy_success": 0.5}):
        plots.draw_comparison({"a": [rollouts], "b": [rollouts | more]}, tmp_path / "curves.png")
    assert titles == [[titles[1][-1]], ["greedy success, evaluation", "success of the rollouts (moving mean of 9)"]]


def test_seeds_of_one_variant_share_a_colour_and_a_mean(monkeypatch):
    drawn = []

    @contextmanager
    def unsaved(path, title, rows, columns, size, **options):
        axes = Figure().subplots(rows, columns, **options)
        yield axes
        drawn.extend((line.get_label(), line.get_color(), list(line.get_ydata())) for line in axes[0, 0].lines)

    monkeypatch.setattr(plots, "figure", unsaved)

    def run(*success):
        return [{"time/seconds": 60.0 * i, "iteration": i, "rollout/success": s} for i, s in enumerate(success)]

    runs = {"a-seed1": run(0.2, 0.2), "a-seed12": run(0.4, 0.4), "b-seed1": run(1.0, 1.0)}
    plots.draw_comparison(runs, Path("unsaved.png"))
    mean, first, second, other = drawn
    assert (mean[0], other[0]) == ("a, mean of 2", "b")
    assert np.allclose(mean[2], 0.3)
    assert mean[1] == first[1] == second[1] != other[1]
    assert (first[2], second[2]) == ([0.2, 0.2], [0.4, 0.4])


def test_curves_over_control_steps(tmp_path, capsys, monkeypatch):
    drawn = []

    @contextmanager
    def unsaved(path, title, rows, columns, size, **options):
        axes = Figure().subplots(rows, columns, **options)
        yield axes
        drawn.append((axes[0, 0].get_xlabel(), list(axes[0, 0].lines[0].get_xdata())))

    monkeypatch.setattr(plots, "figure", unsaved)
    file = records(tmp_path / "run.jsonl", 0.2)
    command = ["plot", str(file), "--x", "steps", "--output", str(tmp_path / "p.png")]
    assert main(command) == 2
    assert "--x steps: run has not recorded episodes/control_steps; leave --x out" in capsys.readouterr().err
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [line | {"episodes/control_steps": 500.0 * line["iteration"]} for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(command) == 0
    assert drawn == [("thousand control steps played", [0.0, 0.5, 1.0, 1.5])]


def test_rates_leave_out_the_update_after_an_evaluation():
    evaluated = {1, 4}
    metrics = [{"iteration": i} | ({"eval/greedy_success": 0.5} if i in evaluated else {}) for i in range(7)]
    assert [m["iteration"] for m in plots.steady(metrics)] == [0, 1, 3, 4, 6]
    always = [m | {"eval/greedy_success": 0.5} for m in metrics]
    assert plots.steady(always) == always


def test_counters_of_several_sessions_go_on():
    metrics = [
        {"iteration": i, "episodes/played": n, "time/iteration_s": 2.0} for i, n in enumerate([5.0, 9.0, 3.0, 4.0])
    ]
    totals = plots.with_totals([*metrics[:1], {"iteration": 9}, *metrics[1:]])
    assert [m.get("episodes/played") for m in totals] == [5.0, None, 9.0, 12.0, 13.0]
    assert [m["time/trained_s"] for m in totals] == [2.0, 2.0, 4.0, 6.0, 8.0]


def test_runs_as_rows_of_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(ROOT / f"docs/results/hosts/{name}-seed1.jsonl") for name in ("one_host", "over_hosts")]
    assert main(["plot", *runs, "--table", "markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| run | updates | episodes | minutes | greedy, before | greedy, after |")
    assert lines[2].startswith("| one_host-seed1 | 40 | 2,560 | 2.5 | 23 (16 to 32) | 65 (55 to 74) | ")
    assert len(lines) == 4
    assert main(["plot", *runs, "--table", "latex"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrrrrr}"
    assert lines[4].startswith(r"one\_host-seed1 & 40 & 2,560 & 2.5 & 23 (16 to 32) & 65 (55 to 74) & ")
    assert lines[-1] == r"\end{tabular}"


def test_what_it_took_to_a_success_rate(capsys: pytest.CaptureFixture[str]) -> None:
    folder = ROOT / "docs/results/libero_offpolicy"
    runs = [str(folder / f"{name}-seed{seed}.jsonl") for name in ("td3_bc", "dagger") for seed in (1, 2, 3)]
    assert main(["plot", *runs, "--x", "robot-hours", "--reach", "0.9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "td3_bc: 0.877 (seeds: 0.857, 0.83, 0.945); hours of one robot"
    assert lines[1] == "dagger: never (seeds: never, 1.27, never); hours of one robot"
    with pytest.raises(SystemExit):
        main(["plot", *runs, "--reach", "90"])
    assert "0.9 are 90 %" in capsys.readouterr().err
