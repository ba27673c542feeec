"""`vla-rl study`: what it refuses, what it makes of finished runs, and that it goes on where it stood."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import ROOT
from vla_rl.commands import study
from vla_rl.commands.cli import main
from vla_rl.commands.study import is_complete, plan_runs, read_study
from vla_rl.commands.study_figures import Saving, evaluated_steps, summarize, summarize_throughput, time_to
from vla_rl.core.errors import UserError
from vla_rl.observability import heartbeat

SHIPPED = sorted((ROOT / "configs" / "studies").glob("*.yaml"))
TINY = """
title: two costs
config: {config}
overrides: [env.max_episode_steps=8, policy.checkpoint=null, train.iterations=2, train.batch_episodes=4,
  train.eval_every=0, train.eval_episodes=2, log.video=false, log.tensorboard=false]
variants:
  plain: []
  grpo, 0.5 small: [algo=grpo, algo.group_size=2, algo.max_filtered=0]
seeds: [3]
threshold: 0.5
"""


def _write(folder: Path, text: str = TINY) -> Path:
    file = folder / "costs.yaml"
    file.write_text(text.format(config=ROOT / "configs" / "tabletop.yaml"))
    return file


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_the_shipped_studies_plan_their_runs(path, monkeypatch, tmp_path):
    for name in ("checkpoints", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "runs/demos-libero").mkdir(parents=True)  # users record them first, as libero_robot_hours.yaml says
    monkeypatch.chdir(tmp_path)
    study = read_study(path)
    runs = list(plan_runs(study, tmp_path))
    assert len(runs) == len(study.variants) * len(study.seeds) == len({run.folder for run in runs})
    assert {run.config.seed for run in runs} == set(study.seeds)
    assert [run.variant for run in runs[: len(study.variants)]] == list(study.variants), (
        "every variant before a 2nd seed"
    )
    described = {json.dumps(run.config.model_dump(exclude={"log"}), default=str) for run in runs}
    assert len(described) == len(runs), "two variants are the same"


def test_mistakes_are_named_before_anything_runs(tmp_path):
    file = _write(tmp_path, TINY.replace("seeds: [3]", "seeds: []\ncolour: red"))
    with pytest.raises(UserError, match=r"(?s)seeds: .*colour: "):
        read_study(file)
    for lines, mistake in (
        ("baseline: PPO\nthresholds: {{greedy: 0.5}}", "baseline 'PPO' is none of the variants plain, grpo, 0.5 small"),
        ("baseline: plain", "baseline and thresholds are given together"),
        ("baseline: plain\nthresholds: {{greedy: 2}}", "thresholds.greedy: "),
        ("baseline: plain\nthresholds: {{best: 0.5}}", "thresholds.best"),
    ):
        with pytest.raises(UserError, match=mistake):
            read_study(_write(tmp_path, TINY + lines))
    refused = read_study(_write(tmp_path, TINY.replace("algo.group_size=2", "algo.group_sice=2")))
    with pytest.raises(UserError, match="group_sice"):
        list(plan_runs(refused, tmp_path))
    assert main(["study", str(tmp_path / "none.yaml")]) == 2


def test_figures_of_several_seeds():
    def run(success: list[float], greedy: float) -> list[dict[str, float]]:
        records = [
            {"iteration": i, "rollout/success_played": s, "time/iteration_s": 6.0, "time/seconds": 6.0 * i}
            | {"time/iteration_cpu_s": 9.0}
            for i, s in enumerate(success, 1)
        ]
        return [
            {"iteration": 0, "eval/greedy_success": 0.1, "time/seconds": 0.0},
            *records[:-1],
            records[-1] | {"eval/greedy_success": greedy},
        ]

    rising, flat = run([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0], 0.9), run([0.2] * 8, 0.2)
    assert time_to(rising, 0.8) == pytest.approx(0.5), "the mean of iterations 3 to 7 is the first above 0.8"
    assert time_to(flat, 0.8) is None
    lucky = run([1.0] * 5 + [0.5] * 15, 0.5)
    assert time_to(lucky, 0.8) == pytest.approx(0.3)
    assert time_to([m | {"rollout/episodes": 8.0} for m in lucky], 0.8) is None, "40 episodes are too few"
    assert time_to(lucky[:4], 0.8) is None, "nor are three iterations enough"
    figures = summarize([rising, flat], 0.8)
    assert figures["greedy success"] == [0.9, 0.2]
    assert figures["minutes to 80%"] == [pytest.approx(0.5)]
    assert figures["minutes in all"] == [pytest.approx(0.8)] * 2
    assert figures["minutes without evaluations"] == [pytest.approx(0.8)] * 2
    assert figures["minutes of a core"] == [pytest.approx(1.2)] * 2
    assert "sampled success" not in figures
    frames = {"predicted": 6.0, "copied": 20.0, "shuffled": 10.0, "gap": 0.4}
    rising[-1] |= {f"world_model/depth1_{name}": value for name, value in frames.items()}
    figures = summarize([rising, flat], 0.8)
    assert figures["frames' error to copying's"] == [0.3]
    assert figures["shuffled frames' error to copying's"] == [0.5]
    assert figures["frames' gap to copying's"] == [0.4], "the run without frames has none"


def _evaluated(*points: tuple[float, float]) -> list[dict[str, float]]:
    return [
        {"iteration": i, "episodes/control_steps": steps, "eval/greedy_success": success}
        for i, (steps, success) in enumerate(points)
    ]


def test_control_steps_to_a_success_rate_beside_the_baseline() -> None:
    slow, slower = _evaluated((0, 0.2), (1000, 0.6), (2000, 0.6)), _evaluated((0, 0.2), (2000, 0.6))
    fast, never = _evaluated((0, 0.2), (500, 0.6), (900, 0.1)), _evaluated((0, 0.2), (700, 0.3))
    assert evaluated_steps(slow, "greedy", 0.5) == pytest.approx(750), "on the line between the evaluations"
    assert evaluated_steps(never, "greedy", 0.5) is None
    assert evaluated_steps(fast, "greedy", 0.2) == 0
    saving = Saving.of([slow, slower], [fast, fast], "greedy", 0.5)
    assert (saving.steps, saving.reached, saving.ratio) == (375, 2, pytest.approx(1125 / 375))
    assert (saving.low, saving.high) == (pytest.approx(2), pytest.approx(4)), "all resamples: 750, 1125 or 1500 steps"
    failed = Saving.of([slow, slower], [fast, never], "greedy", 0.5)
    assert (failed.steps, failed.reached, failed.ratio, failed.low) == (375, 1, 0, 0)
    assert Saving.of([never], [fast], "greedy", 0.5).ratio == pytest.approx(700 / 375), "the baseline's steps in all"
    assert Saving.of([slow], [never], "greedy", 0.5).steps is None


@pytest.mark.slow
def test_a_study_runs_and_shows_and_repeats_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENCE_S", 1.0)  # its runs are short
    monkeypatch.setattr(study, "_LOOK_S", 0.2)
    file = _write(tmp_path, TINY + "baseline: plain\nthresholds: {{greedy: 0.5}}")
    command = ["study", str(file), "--runs", str(tmp_path), "--json", str(tmp_path / "a.json")]
    assert main([*command, "--jobs", "2", "--output", str(tmp_path / "a.png")]) == 0
    record = json.loads((tmp_path / "a.json").read_text())
    assert set(record["variants"]) == {"plain", "grpo, 0.5 small"}
    assert all(len(row["greedy success"]) == 1 for row in record["variants"].values())
    assert set(record["savings"]["grpo, 0.5 small"]["50% greedy"]) == {"steps", "reached", "ratio", "low", "high"}
    assert all(row["minutes of a core"][0] > 0 for row in record["variants"].values())
    assert (tmp_path / "a.png").stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert "2 of 2: " in shown
    assert re.search(r"iterations of all runs, (plain|grpo, 0\.5 small), seed 3.*: \d of \d", shown), "meanwhile"
    logs = {path.name for path in (tmp_path / "costs").glob("*.log")}
    assert logs == {"plain-seed3.log", "grpo,_0.5_small-seed3.log"}
    kept = tmp_path / "costs" / "plain-seed3" / "metrics.jsonl"
    before = kept.stat().st_mtime_ns
    capsys.readouterr()
    assert main(command) == 0, "nothing is left to run: it is shown again at once"
    assert "0 runs to do" in capsys.readouterr().out
    assert kept.stat().st_mtime_ns == before
    (run,) = [r for r in plan_runs(read_study(tmp_path / "costs.yaml"), tmp_path / "costs") if r.variant == "plain"]
    assert is_complete(run)
    (run.folder / "curves.png").unlink()
    assert not is_complete(run), "it was killed at its end, and will be resumed"


def _line(iteration: int, seconds: float, rate: float) -> dict[str, float]:
    rates = {f"throughput/{name}_per_s": rate for name in ("env_steps", "chunks", "episodes", "batches")}
    busy = {f"busy/{name}": rate / 100 for name in ("simulate", "render", "reset", "inference", "learner")}
    return {"iteration": iteration, "time/iteration_s": seconds, "memory/gib": iteration} | rates | busy


def test_rates_are_means_over_time_after_the_warm_up():
    metrics = [_line(0, 99.0, 99.0), _line(2, 99.0, 99.0), _line(3, 1.0, 10.0), _line(4, 3.0, 30.0)]
    figures = summarize_throughput([metrics, metrics])
    assert figures["env steps/s"] == pytest.approx([25.0, 25.0])
    assert figures["busy: learner"] == pytest.approx([0.25, 0.25])
    assert figures["memory, GiB"] == [4, 4]
    assert summarize_throughput([metrics, metrics[:2]]) == {}, "one seed has too few iterations"


@pytest.mark.exhaustive
def test_a_study_of_throughput(tmp_path, capsys):
    text = TINY.replace("train.iterations=2", "train.iterations=1000000, train.max_minutes=0.8").replace(
        "train.eval_episodes=2", "train.eval_episodes=0"
    )
    output = tmp_path / "a.json"
    assert main(["study", str(_write(tmp_path, text)), "--runs", str(tmp_path), "--json", str(output)]) == 0
    for figures in json.loads(output.read_text())["throughput"].values():
        assert figures["batches/s"][0] > 0
        assert figures["episodes/s"] == pytest.approx([4 * figures["batches/s"][0]], rel=0.5)
    assert "throughput" in capsys.readouterr().out
