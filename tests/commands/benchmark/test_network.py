"""What the way over the network costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vla_rl.commands.benchmark import network
from vla_rl.commands.benchmark.network import WAYS, Way
from vla_rl.commands.cli import main


def test_a_link_adds_what_it_needs_for_the_bytes() -> None:
    assert Way(round_trips=[3.0, 1.0, 2.0], nbytes=125_000).at(100) == pytest.approx(2.0 + 10.0)


def test_all_ways_are_measured(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_BLOCK", 5)
    file = tmp_path / "network.json"
    assert main(["benchmark", "network", "configs/tabletop.yaml", "--blocks", "2", "--json", str(file)]) == 0
    record, shown = json.loads(file.read_text()), capsys.readouterr().out
    assert set(record["ways"]) == set(WAYS)
    assert all(name in shown for name in ("round trip", "at 100 Mbit/s"))
    near, plain, small = (record["ways"][name] for name in WAYS)
    size = record["config"]["env"]["image_size"]
    assert near["nbytes"] == 0 < small["nbytes"] < size**2 * 3 < plain["nbytes"] < size**2 * 3 + 8192
    assert all(len(way["round_trips"]) == 2 and min(way["round_trips"]) > 0 for way in record["ways"].values())
