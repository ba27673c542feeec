"""What a person sees of long work, in a terminal and in a log; and how much memory a run holds."""

import io
import re
import subprocess
import sys
import time
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from tests.runtime_fakes import SPEC
from vla_rl.observability import heartbeat
from vla_rl.observability.console import ProgressDisplay, StatusDisplay, TrainingView, make_console

PIPED: dict[str, Any] = {"check": True, "capture_output": True, "text": True}


def shown(*, terminal: bool, pause: float = 0.0) -> str:
    screen = io.StringIO()
    with ProgressDisplay(Console(file=screen, force_terminal=terminal, width=120), "cloning", 8) as display:
        for done in range(1, 5):
            display.update(done, f"loss {1 / done:.3f}")
        time.sleep(pause)
    return screen.getvalue()


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(terminal=False) == "", "soon done"
    monkeypatch.setattr(heartbeat, "SILENCE_S", 0.05)
    lines = shown(terminal=False, pause=0.3).splitlines()
    assert lines[0] == "cloning, loss 0.250: 4 of 8, about 0 s left"
    assert 2 <= len(lines) <= 6, "at its pace, not at that of the updates"


def test_a_log_is_never_silent_for_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(heartbeat, "SILENCE_S", 0.5)
    with TrainingView("a run", SPEC, 40, 10) as view:
        view.status("filling the next super-batch: 2 of 6 episodes")
        for number in range(6):
            time.sleep(0.1)
            view.say(f"event {number}")
        assert "filling" not in capsys.readouterr().out, "there were other lines"
        time.sleep(0.3)
        view.status("filling the next super-batch: 3 of 6 episodes")  # the same stage
        time.sleep(0.3)
        assert capsys.readouterr().out == (
            "iteration 10/40 (25 %): filling the next super-batch, for 1 s: 3 of 6 episodes\n"
        )
        view.update(11, {"rollout/success_played": 0.5, "time/left_s": 300.0})
        assert capsys.readouterr().out == "iteration 11/40 (28 %) | success 50.0 % | 5 min left\n"
    with StatusDisplay(make_console(), "evaluating (greedy): 0 of 4 episodes"):
        time.sleep(0.8)
    assert capsys.readouterr().out == "evaluating (greedy): 0 of 4 episodes\n"


def test_how_long_a_stage_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    activity = heartbeat.Activity("training")
    now[0] += 31.0
    assert activity.text() == "training, for 31 s"
    activity.set("starting: learner 0 of 1")
    assert activity.text() == "starting: learner 0 of 1"
    now[0] += 720.0
    activity.set("starting: learner 1 of 1")
    assert activity.text() == "starting, for 12 min: learner 1 of 1"
    assert heartbeat.duration(3.5 * 3600) == "3.5 h"
    assert heartbeat.duration(12 * 86400) == "12 days"


def test_a_terminal_shows_a_run_from_the_first_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        "vla_rl.observability.console.make_console", lambda: Console(file=screen, force_terminal=True, width=80)
    )
    earlier = [{"iteration": i, "rollout/success_played": i / 10} for i in range(10)]
    with TrainingView("a run", SPEC, 40, 8, earlier) as view:
        view.status("starting: Ray")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert "iteration 8/40 (20 %)" in text
    assert "success of the rollouts 80.0 %" in text, "iteration 9 came after the checkpoint"
    assert "starting: Ray" in text


def test_tables_are_whole_in_a_log(capsys):
    table = Table(*(f"column {i}" for i in range(12)))
    table.add_row(*(f"value {i}" for i in range(12)))
    make_console().print(table)
    lines = capsys.readouterr().out.splitlines()
    assert any("column 0" in line and "column 11" in line for line in lines)
    assert any("value 0" in line and "value 11" in line for line in lines)


def test_a_terminal_gets_a_bar():
    assert "cloning, loss 0.250" in shown(terminal=True)


def test_the_memory_of_a_run_is_what_its_processes_hold():
    """In a process of its own: what others of this one's have just given back would be missed."""
    code = (
        "import numpy, vla_rl.observability.usage as u; before = u.resident_gib(); x = numpy.ones(300 << 17)"  # 300 MiB
    )
    found = subprocess.run([sys.executable, "-c", f"{code}; print(u.resident_gib() - before)"], **PIPED)
    assert 0.28 < float(found.stdout) < 0.31
