"""Processes that make no progress, whether they are frozen or hang, are found and killed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from ray.exceptions import RayTaskError

from vla_rl.cluster import supervision as supervision_module
from vla_rl.cluster.calls import ProcessDied, ProcessFailed
from vla_rl.cluster.processes import pulse
from vla_rl.cluster.processes.pulse import Limits, Pulse, Pulses
from vla_rl.cluster.processes.weight_relay import WeightRelayProcess
from vla_rl.cluster.supervision import Replacements, RestartRate, Supervision
from vla_rl.config.run_config import RunConfig
from vla_rl.observability.meter import Meter
from vla_rl.placement.plan import STORE
from vla_rl.placement.processes import make_plan
from vla_rl.placement.resources import Resources

LIMITS = Limits(least=60.0, first=600.0, lease=0.0, between=60.0)


def allowed(pulses: Pulses, row: int = 0) -> float:
    """Seconds; 0: the row is not watched."""
    return pulses._rows[row, 2] * 1e-9


def test_a_component_shows_its_progress_through_its_meter(tmp_path: Path) -> None:
    pulses, meter = Pulses.create(tmp_path / "p", 3), Meter()
    beat = Pulse(tmp_path / "p", 1, LIMITS)
    assert allowed(pulses, 1) == 0.0, "nothing is expected yet"
    meter.observer = beat
    for first_or_later in (600.0, 60.0):
        with meter.time("simulate"):
            assert allowed(pulses, 1) == pytest.approx(first_or_later)
        assert allowed(pulses, 1) == pytest.approx(60.0)
    beat("simulate", None)
    beat("simulate", 30.0)
    with meter.time("simulate"):
        assert allowed(pulses, 1) == pytest.approx(20 * 30.0), "slow is not frozen"
    with meter.time("offloaded"):
        assert allowed(pulses, 1) == 0.0, "that may take any time"
    beat.rest()
    assert pulses._rows[:, 2].tolist() == [0, 0, 0]
    assert pulses._rows[1, 0] == os.getpid()


def test_a_slow_call_at_the_start_does_not_make_a_frozen_process_be_waited_for(tmp_path: Path) -> None:
    pulses = Pulses.create(tmp_path / "p", 1)
    beat = Pulse(tmp_path / "p", 0, LIMITS)
    limits = []
    for seconds in (100.0, 1.0, 10.0, *[1.0] * 138, 1.0):
        beat("train", None)
        limits.append(allowed(pulses))
        beat("train", seconds)
    assert limits[:4] == pytest.approx([600.0, 2000.0, 60.0, 200.0]), "the first call counts until there is a second"
    assert limits[-1] == pytest.approx(100.0, rel=0.01), "later ones are forgotten little by little"


def test_waiting_for_a_shared_device_is_not_a_lack_of_progress(tmp_path: Path) -> None:
    pulses, meter = Pulses.create(tmp_path / "p", 1), Meter()
    meter.observer = Pulse(tmp_path / "p", 0, Limits(60.0, 60.0, lease=600.0, between=math.inf))
    with meter.time("infer"):
        assert allowed(pulses) == pytest.approx(660.0), "others may hold it"
        with meter.time("act"):
            assert allowed(pulses) == pytest.approx(60.0), "now this process does"
        assert allowed(pulses) == pytest.approx(660.0)
    assert allowed(pulses) == 0.0, "it waits to be called"


@pytest.fixture
def frozen() -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    process.send_signal(signal.SIGSTOP)
    yield process
    process.kill()
    process.wait()


def test_a_frozen_process_is_killed_and_others_are_not(
    tmp_path: Path, frozen: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.model_validate({"placement": {"env_workers": 2}})
    plan = make_plan(config, Resources(4, 1, "cpu"))
    session = MagicMock()
    pulses = Pulses.create(tmp_path / "p", len(plan.processes))
    session.call.return_value = tmp_path / "p"
    session.ask.side_effect = lambda node, name: getattr(pulses, name)()
    supervision = Supervision(session, plan, 60.0, 600.0)
    address = supervision.address(plan.workers[1])
    Pulse(tmp_path / "p", address.row, LIMITS).expect(0.01)
    Pulse(tmp_path / "p", supervision.address(plan.servers[0]).row, LIMITS).expect(60.0)
    pulses._rows[address.row, 0] = frozen.pid
    time.sleep(0.02)
    assert supervision.look() == ["env worker 1 made no progress for 0 s: killed"]
    assert frozen.wait(10.0) == -signal.SIGKILL
    monkeypatch.setattr(supervision_module, "_LOOK_EVERY_S", 0.0)
    assert supervision.look() == [], "once"


def test_a_node_that_does_not_answer_hinders_no_other(tmp_path: Path, frozen: subprocess.Popen) -> None:
    """Whoever looks at pulses too seldom takes itself for paused, and kills nothing."""
    config = RunConfig.model_validate({"placement": {"env_workers": 4, "nodes": 2, "ray_address": "auto"}})
    plan = make_plan(config, Resources(8, 2, "cpu", nodes=2))
    session = MagicMock()
    pulses = Pulses.create(tmp_path / "p", len(plan.processes) + 1)
    session.call.return_value = tmp_path / "p"
    session.ask.side_effect = lambda node, name: pulses.kill_overdue() if node == 0 else None
    supervision = Supervision(session, plan, 60.0, 600.0)
    worker = next(p for p in plan.workers if p.node == 0)
    Pulse(tmp_path / "p", supervision.address(worker).row, LIMITS).expect(0.01)
    pulses._rows[supervision.address(worker).row, 0] = frozen.pid
    session.call.reset_mock()
    time.sleep(0.02)
    assert supervision.look() == [f"env worker {worker.index} made no progress for 0 s: killed"]
    assert [call.args[0] for call in session.ask.call_args_list] == [0, 1]
    session.call.assert_not_called()


def test_all_processes_of_a_run_are_watched_each_on_its_node(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"placement": {"env_workers": 4, "nodes": 3, "ray_address": "auto"}})
    plan = make_plan(config, Resources(9, 3, "cpu", nodes=3))
    assert [(relay.index, relay.node) for relay in plan.relays] == [(0, 1), (1, 2)], "the learner's first rank is on 0"
    session, rows = MagicMock(), dict[int, int]()
    session.call.side_effect = lambda node, name, count: rows.setdefault(node, count) and tmp_path / f"{node}"
    supervision = Supervision(session, plan, 60.0, 600.0)
    watched = [*plan.processes, *plan.relays, STORE]
    assert [supervision.address(process).row for process in watched] == list(range(len(watched)))
    assert rows == dict.fromkeys(range(3), len(watched))
    pulses = Pulses.create(tmp_path / "2", len(watched))
    relay = WeightRelayProcess(plan.relays[1], tmp_path / "weights")
    relay.beat(supervision.address(plan.relays[1]))
    row = supervision.address(plan.relays[1]).row
    deadline = time.monotonic() + 30.0
    while allowed(pulses, row) == 0.0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert allowed(pulses, row) == pytest.approx(60.0), "it is killed if it shows nothing for so long"
    assert pulses._rows[row, 0] == os.getpid()


def test_when_everything_was_paused_nothing_is_killed(
    tmp_path: Path, frozen: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a container or a laptop goes on: all processes seem late by the same time."""
    pulses = Pulses.create(tmp_path / "p", 1)
    Pulse(tmp_path / "p", 0, LIMITS).expect(0.05)
    pulses._rows[0, 0] = frozen.pid
    time.sleep(0.1)
    monkeypatch.setattr(pulse, "_PATIENT_S", 0.01)
    assert pulses.kill_overdue() == {}
    assert frozen.poll() is None
    monkeypatch.setattr(pulse, "_PATIENT_S", 30.0)
    time.sleep(0.1)
    assert pulses.kill_overdue().keys() == {0}, "the second time it counts"


def test_a_long_run_may_replace_many_processes_and_a_broken_one_ends() -> None:
    rate = RestartRate(most=3, window_s=600.0)
    assert not any(rate.count(300.0 * number) for number in range(1000)), "three days"
    assert [rate.count(1e6 + number) for number in range(4)] == [False, False, False, True]


def test_a_process_that_dies_again_and_again_is_replaced_more_and_more_slowly() -> None:
    found, now, pauses = Replacements(["env worker 0"]), 0.0, []
    for lived in (5000.0, *[3.0] * 9, 61.0, 3.0):
        now += lived
        pauses.append(found.pause("env worker 0", now))
        now += pauses[-1]
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60, 0, 1]
    assert found.pause("env worker 1", now) == 0.0, "each has its own"


def test_a_simulator_that_kills_its_process_at_each_start_ends_the_run() -> None:
    found = Replacements(["env worker 0", "env worker 1", "inference server 0"])
    for _ in range(4):
        found.admit("env worker 0", None)
    found.progressed()
    for name in ["env worker 0"] * 6 + ["env worker 1"] * 4:
        assert found.admit(name, None) == "it returned", "as long as another may do the work"
    with pytest.raises(
        ProcessFailed, match="env worker 1 died 5 times without getting anywhere, as did every other env"
    ):
        found.admit("env worker 1", None)


def test_a_process_that_waits_to_be_called_shows_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_BEAT_S", 0.01)
    pulses = Pulses.create(tmp_path / "p", 1)
    beat, alive = Pulse(tmp_path / "p", 0, LIMITS), threading.Event()
    beat.beat(alive.set)
    assert alive.wait(10.0)
    seen, deadline = pulses._rows[0, 1], time.monotonic() + 10.0
    while pulses._rows[0, 1] == seen and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pulses._rows[0, 1] > seen
    assert allowed(pulses) == pytest.approx(60.0)
    beat("train", None)
    began = pulses._rows[0, 1]
    time.sleep(0.1)
    assert pulses._rows[0, 1] == began, "an activity has its own limit"


def test_an_error_that_comes_back_at_once_ends_the_run_with_the_first_cause() -> None:
    def raised(text: str) -> RayTaskError:
        return RayTaskError("run", text, ValueError(text), pid=1, ip="", actor_repr=None)

    found = Replacements([f"env worker {i}" for i in range(10)])
    assert found.admit("env worker 0", raised("the first")) == "ValueError: the first"
    found.admit("env worker 0", raised("the second"))
    with pytest.raises(ProcessFailed, match="env worker 0 failed 3 times within 600 s: ValueError: the first"):
        found.admit("env worker 0", raised("the third"))
    assert found.admit("env worker 1", raised("another's")) == "ValueError: another's"
    for _ in range(47):
        found.admit("env worker 2", None)
    with pytest.raises(ProcessDied, match=r"env worker 2 died \(it returned\), and 50 others"):
        found.admit("env worker 2", None)
