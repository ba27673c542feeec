"""What the first Ctrl-C does, at any moment of a run."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from tests.runtime_fakes import SPEC, result
from vla_rl.commands.evaluate import run_evaluation
from vla_rl.commands.signals import StopRequest
from vla_rl.replay.schedule import evaluation_episodes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_is_acknowledged_and_the_second_interrupts(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        stop.graceful = True
        os.kill(os.getpid(), number)
        assert stop.requested
        assert "stopping with a checkpoint" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_while_a_run_starts_the_first_signal_interrupts() -> None:
    with StopRequest(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_an_evaluation_ends_when_it_is_asked_to() -> None:
    results = [result(e) for e in evaluation_episodes(0, 4, 2, 50, seed=0)]
    answers = iter([results[:1], [], results[:1], results[1:]])
    cluster = MagicMock()
    cluster.get.side_effect = lambda *_: next(answers)
    stop = SimpleNamespace(requested=False)

    def status(text: str) -> None:
        stop.requested = text.startswith("evaluating (greedy): 1 of 4 episodes")

    options = {"greedy": True, "record": 0, "status": status}
    assert run_evaluation(cluster, SPEC, 4, 0, stopped=lambda: stop.requested, **options) is None
    assert cluster.get.call_count == 1
    evaluation = run_evaluation(cluster, SPEC, 4, 0, **options)
    assert evaluation is not None
    assert len(evaluation.results) == 4
