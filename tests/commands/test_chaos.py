"""Faults of nearly all kinds on whole runs: each is got over, and no episode is missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.processes import answers, listening
from vla_rl.commands.chaos.command import Schedule, chosen, inject, torment
from vla_rl.commands.chaos.faults import FAULTS
from vla_rl.commands.chaos.report import is_sound, summarize, write_report
from vla_rl.commands.chaos.resources import draw_resources, sampled
from vla_rl.commands.chaos.training_run import TrainingRun, adds_up, ledger
from vla_rl.commands.cli import main
from vla_rl.commands.command_table import FAULT_NAMES
from vla_rl.core.errors import UserError
from vla_rl.core.ipc.shared_memory import shared_root

CHEAP = ["exception", "nan_observation", "nan_loss", "delay", "full_disk"]  # replaced or skipped within the cluster
DEAR = [  # the run starts again, but for some kills and freezes
    "kill",
    "freeze",
    "corrupt_checkpoint",
    "full_shared_memory",
    "node",
    "driver",
]


def test_the_command_knows_the_faults() -> None:
    assert tuple(FAULTS) == FAULT_NAMES
    assert set(chosen("all")) == set(FAULTS) - {"tree"}
    with pytest.raises(UserError, match="--faults kill,flood: 'flood' is none; choose from all, none, kill"):
        chosen("kill,flood")


def test_a_victim_that_ends_before_its_fault_comes_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        victim = psutil.Process(process.pid)
    monkeypatch.setitem(FAULTS, "kill", lambda run, rng: victim.kill())
    assert inject("kill", None, None) is None


def test_a_ledger_that_did_not_add_up_once_is_a_failure() -> None:
    assert is_sound({"ledger": {"missing": 0}, "unbalanced_iterations": []})
    assert not is_sound({"ledger": {"missing": 0}, "unbalanced_iterations": [7]})
    assert not is_sound({"ledger": {"missing": 1}, "unbalanced_iterations": [8]})
    counts = dict.fromkeys(
        ("trained", "stale", "filtered", "evaluated", "lost", "running", "buffered", "in_training"), 2
    )
    record = {f"episodes/{name}": float(count) for name, count in (counts | {"started": 16}).items()}
    assert adds_up(ledger(record))
    imagined = {"delivered": 9, "trained": 4, "unused": 3, "lost": 1, "waiting": 0}
    record |= {f"episodes/imagined_{name}": float(count) for name, count in imagined.items()}
    assert ledger(record)["imagined_missing"] == 1
    assert not adds_up(ledger(record))


def test_what_processes_hold_is_sampled_and_drawn(tmp_path: Path) -> None:
    kept = []
    with sampled(lambda: [psutil.Process()], every=0.02) as samples:
        deadline = time.monotonic() + 30.0
        while len(samples.seconds) < 16 and time.monotonic() < deadline:
            kept.append((tmp_path / f"{len(kept)}").open("w"))
            time.sleep(0.02)
    assert samples.growth()["descriptors"] > 0
    assert samples.series["memory"][-1] > 0.05
    samples.memory_of[-1].clear()  # the run had ended
    samples.memory_of[0]["at the start"] = 1.0
    assert samples.growth_of_memory().keys() == {psutil.Process().name()}
    for file in kept:
        file.close()
    draw_resources(tmp_path / "resources.png", samples, "a test")
    assert (tmp_path / "resources.png").stat().st_size > 10_000


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a run in ``tmp_path/run``."""
    values = {
        "env": {"name": "workload", "image_size": 48, "max_episode_steps": 16, "length_spread": 0.5, "step_ms": 10.0},
        "policy": {"name": "openvla_oft", "size": "nano", "chunk_size": 8},
        "train": {"iterations": 5000, "batch_episodes": 6, "eval_episodes": 0, "checkpoint_every": 3},
        "placement": {"env_workers": 2, "envs_per_worker": 2, "stall_timeout_s": 6.0},
        "log": {"dir": str(tmp_path), "name": "run", "video": False},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.slow
def test_the_command_writes_a_report_and_says_whether_the_ledger_adds_up(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without faults, for a few seconds: one run is both sides."""
    assert main(["chaos", str(config), "--faults", "none", "--minutes", "0.05"]) == 0
    summary = json.loads((tmp_path / "run/report.json").read_text())
    assert summary["count"] == summary["resumed"] == summary["ledger"]["missing"] == 0
    assert summary["ledger"]["trained"] > 0
    assert summary["throughput"] == 1.0
    assert "Longest time between two updates" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "run").glob("*.png")} == {"report.png", "resources.png"}
    (iteration, *_) = (tmp_path / "run/run/metrics.jsonl").read_text().splitlines()
    assert json.loads(iteration)["iteration"] == 1, "an ordinary run folder"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(720)
def test_a_run_gets_over_faults_of_all_kinds(config: Path, tmp_path: Path) -> None:
    run = TrainingRun(config, tmp_path / "run", tmp_path / "orders")
    kinds = [*CHEAP, *DEAR]
    schedule = Schedule(kinds, seconds=540.0, every=0.5, seed=1, count=len(kinds))
    events, processes, drivers = [], set(), set()
    for event in torment(run, schedule, print):
        events.append(event)
        processes.update(run.processes())
        drivers.add(run.process.pid)
        if len(events) == len(kinds):
            run.stop()
        if len(events) == 1:
            assert listening(run.processes()) == {"127.0.0.1"}, "nothing listens to other machines"
    assert {event.kind for event in events} == set(kinds), run.tail()
    assert run.starts == 2, "only a killed driver needs the command again"
    said = run.log.read_text()
    for words in (r"is replaced( in \d+ s)?: Crash", r"is replaced( in \d+ s)?: NotFiniteError", "is passed over"):
        assert re.search(words, said)
    records = run.records()
    assert [record["iteration"] for record in records] == list(range(1, len(records) + 1)), "nothing twice"
    assert records[-1]["episodes/trained"] == 6 * len(records)
    assert all(ledger(record)["missing"] == 0 for record in records)
    assert list((run.folder / "not_finite").glob("*.json")), "of the update with a loss that was not finite"
    assert run.process.returncode == 0
    assert run.checkpoints()[-1].name == f"{len(records):06d}"
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive, answers(alive, psutil.Process.cmdline)
    assert not [path for pid in drivers for path in shared_root().glob(f"vla_rl-{pid}-*")]
    summary = summarize([{"kind": e.kind, "time": e.time, "seconds": e.seconds, "resumed": e.resumed} for e in events],
                        run.folder, run.folder)  # fmt: skip
    write_report(tmp_path, summary, records, records, "chaos")
    assert (
        f"| full_disk | 1 | {summary['faults']['full_disk']['median_s']:.1f} |" in (tmp_path / "report.md").read_text()
    )
    assert summary["equal_weights"] is True
    assert 0 < summary["longest_pause_s"]["disturbed"] < 120
    assert is_sound(summary)
    assert (tmp_path / "report.png").stat().st_size > 10_000
