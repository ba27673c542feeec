"""What the runtime costs with many env workers: whose time is whose, and what saturates first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vla_rl.commands.benchmark.workers import Cost, kind_of
from vla_rl.commands.cli import main


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["ray::EnvWorkerProcess.run"], "EnvWorkerProcess"),
        (["ray::VirtualLearnerProcess"], "LearnerProcess"),
        (["/usr/lib/ray/raylet", "--node"], "raylet"),
        ([], ""),
    ],
)
def test_kinds_of_processes(command: list[str], kind: str) -> None:
    assert kind_of(command) == kind


def test_what_saturates_first_exists_once() -> None:
    spent = {"EnvWorkerProcess": 40.0, "StoreProcess": 5.0, "driver": 8.0, "raylet": 1.0}
    assert Cost(4, 10.0, 1.0, 0.5, spent).first_limit == ("driver", 125.0)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "costs.json", tmp_path / "costs.png"
    short = ["env.max_episode_steps=16", "env.reset_ms=1", "train.max_staleness=0"]
    command = ["benchmark", "workers", "configs/scaling/workers.yaml", *short, "--workers", "1,2", "--iterations", "1"]
    assert main([*command, "--json", str(file), "--output", str(picture)]) == 0
    assert "at episodes/s" in capsys.readouterr().out
    costs = json.loads(file.read_text())["costs"]
    assert [cost["workers"] for cost in costs] == [1, 2]
    for cost in costs:
        assert cost["chunks_per_s"] > 0
        assert {"EnvWorkerProcess", "InferenceProcess", "StoreProcess", "driver"} <= cost["milliseconds"].keys()
    assert picture.stat().st_size > 0
