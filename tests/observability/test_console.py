"""What a person sees of long work, in a terminal and in a log; and how much memory a run holds."""

import io

import numpy as np
from rich.console import Console
from rich.table import Table

from vla_rl.observability import console as progress
from vla_rl.observability.console import ProgressDisplay, make_console
from vla_rl.observability.usage import resident_gib


def shown(monkeypatch, *, terminal: bool, every: float) -> str:
    monkeypatch.setattr(progress, "_LINE_EVERY_S", every)
    screen = io.StringIO()
    with ProgressDisplay(Console(file=screen, force_terminal=terminal, width=120), "cloning", 8) as display:
        for done in range(1, 9):
            display.update(done, f"loss {1 / done:.3f}")
    return screen.getvalue()


def test_a_log_gets_a_line_now_and_then(monkeypatch):
    lines = shown(monkeypatch, terminal=False, every=0.0).splitlines()
    assert len(lines) == 8
    assert lines[3] == "cloning, loss 0.250: 4 of 8, about 0 s left"
    assert shown(monkeypatch, terminal=False, every=60.0) == ""


def test_tables_are_whole_in_a_log(capsys):
    table = Table(*(f"column {i}" for i in range(12)))
    table.add_row(*(f"value {i}" for i in range(12)))
    make_console().print(table)
    lines = capsys.readouterr().out.splitlines()
    assert any("column 0" in line and "column 11" in line for line in lines)
    assert any("value 0" in line and "value 11" in line for line in lines)


def test_a_terminal_gets_a_bar(monkeypatch):
    assert "cloning, loss 0.125" in shown(monkeypatch, terminal=True, every=0.0)


def test_the_memory_of_a_run_is_what_its_processes_hold():
    before = resident_gib()
    ballast = np.ones(300 << 17)  # 300 MiB
    assert 0.2 < resident_gib() - before < 0.4
    assert ballast[-1] == 1
