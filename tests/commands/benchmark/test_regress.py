"""Two source trees compared: the interval, the command over a real worktree, and that the figures can be measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import ROOT
from vla_rl.commands.benchmark import figures
from vla_rl.commands.benchmark.regress import Comparison
from vla_rl.commands.cli import main

in_checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")

# Blocks differ, and both sides of a block do not.
FIGURE = f"""
import os, sys
from pathlib import Path
mine, runs = os.environ["PYTHONPATH"] == {str(ROOT)!r}, Path(__file__).with_suffix(".runs")
before = len(runs.read_text()) if runs.exists() else 0
runs.write_text("." * (before + 1))
print((1.2 if mine and sys.argv[1] == "act" else 1.0) + 0.02 * (before // 2 % 7))
"""


def test_what_counts_as_slower() -> None:
    noise = np.random.default_rng(0).normal(1.0, 0.02, (2, 9))
    alike, slower = (Comparison("act", list(noise[0]), list(factor * noise[1])) for factor in (1.0, 1.08))
    assert (alike.is_slower, slower.is_slower) == (False, True)
    low, high = slower.interval()
    assert low < 1.08 < high
    wild = Comparison("act", [1.0] * 5, [0.7, 1.6, 1.2, 0.9, 1.5])
    assert not wild.is_slower, "its own spread hides what there may be"


@in_checkout
def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, file = tmp_path / "figures.py", tmp_path / "regress.json"
    script.write_text(FIGURE)
    monkeypatch.setattr(figures, "__file__", str(script))
    command = ["benchmark", "regress", "HEAD", "--blocks", "5", "--json", str(file), "--figures"]
    assert main([*command, "act,update"]) == 1
    printed = capsys.readouterr().out
    assert "slower" in printed
    assert "no difference seen" in printed
    found = {one["figure"]: one for one in json.loads(file.read_text())["figures"]}
    assert found["act"]["interval"][0] > 1.05
    assert len(found["update"]["old"]) == len(found["update"]["new"]) == 5
    assert main([*command, "update"]) == 0
    worktrees = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "/tree " not in worktrees.stdout, "it has cleaned up"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["no-such-commit"], "no-such-commit: not a commit of"),
        (["HEAD", "--blocks", "3"], "--blocks 3: the interval of a median needs at least 5"),
        (["HEAD", "--figures", "act,fast"], "--figures fast: there are chunk, observe, act, update, start, first_step"),
    ],
)
def test_mistakes(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "regress", *arguments]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("name", ["act"])
def test_a_figure(name: str) -> None:
    result = subprocess.run(
        [sys.executable, figures.__file__, name],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert 0.01 < float(result.stdout) < 1000
