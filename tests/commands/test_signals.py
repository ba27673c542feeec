"""What the first Ctrl-C does, at any moment of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest
import yaml

from tests.runtime_fakes import SPEC, result
from vla_rl.commands.evaluate import run_evaluations
from vla_rl.commands.signals import StopRequest
from vla_rl.config.run_config import RunConfig
from vla_rl.replay.schedule import evaluation_episodes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_is_acknowledged_and_the_second_interrupts(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        stop.become_graceful()
        os.kill(os.getpid(), number)
        assert stop.requested
        assert "stopping with a checkpoint" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_while_a_run_starts_the_first_signal_interrupts(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    assert "interrupted: ending all processes of the run" in capfd.readouterr().err


class _Finalized:
    """Python drops what a finalizer raises, as of the callbacks of some libraries."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_start_ends_where_its_interrupt_was_dropped() -> None:
    with StopRequest() as stop:
        finalized = _Finalized()
        del finalized
        assert stop.requested  # and the start has gone on
        with pytest.raises(KeyboardInterrupt):
            stop.become_graceful()


@pytest.mark.slow
def test_a_start_that_is_interrupted_says_so_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    values = {
        "env": {"name": "workload"},
        "policy": {"size": "nano"},
        "train": {"eval_episodes": 0},
        "log": {"dir": str(tmp_path), "name": "run"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "vla_rl.commands.cli", "train", "config.yaml"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.stdout is not None
    while not (line := run.stdout.readline()).startswith("PPO on workload"):
        assert line, "the run has ended"
    driver, deadline = psutil.Process(run.pid), time.monotonic() + 60.0
    while len(started := driver.children(recursive=True)) < 4 and time.monotonic() < deadline:  # Ray's, then the run's
        time.sleep(0.05)
    sent = time.monotonic()
    run.send_signal(signal.SIGINT)
    while "interrupted: ending all processes" not in (line := run.stdout.readline()):
        assert line, "it ends without a word"
    assert time.monotonic() - sent < 5.0
    assert run.wait(60.0) == 130
    assert not psutil.wait_procs(started, timeout=20.0)[1]
    assert not (tmp_path / "run").exists()


def test_an_evaluation_ends_when_it_is_asked_to() -> None:
    results = [result(e) for e in evaluation_episodes(0, 4, 2, 50, seed=0)]
    answers = iter([results[:1], [], results[:1], results[1:]])
    cluster = MagicMock(config=RunConfig())
    cluster.get.side_effect = lambda *_: next(answers)
    stop = SimpleNamespace(requested=False)

    def status(text: str) -> None:
        stop.requested = text.startswith("evaluating (greedy): 1 of 4 episodes")

    options = {"kinds": [True], "record": 0, "status": status}
    assert run_evaluations(cluster, SPEC, 4, 0, stopped=lambda: stop.requested, **options) == []
    assert cluster.get.call_count == 1
    (evaluation,) = run_evaluations(cluster, SPEC, 4, 0, **options)
    assert len(evaluation.results) == 4


def test_greedy_and_sampled_episodes_are_evaluated_together() -> None:
    cluster, played = MagicMock(config=RunConfig()), []
    cluster.call_store.side_effect = lambda _, episodes: played.extend(episodes)
    cluster.get.side_effect = lambda *_: [result(e) for e in reversed(played)]
    found = run_evaluations(cluster, SPEC, 4, 0, kinds=[True, False], record=2, status=lambda text: None)
    assert [evaluation.greedy for evaluation in found] == [True, False]
    assert [sum(r.episode.record for r in evaluation.results) for evaluation in found] == [2, 0]
    for evaluation in found:
        assert {r.episode.greedy for r in evaluation.results} == {evaluation.greedy}
        assert len({(r.episode.task, r.episode.init_state) for r in evaluation.results}) == 4
