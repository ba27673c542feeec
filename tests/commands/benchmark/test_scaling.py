"""`vla-rl benchmark scaling` on virtual devices: the real runtime, its bound, its simulation and the reference."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from vla_rl.commands.benchmark.scaling import Measurement, as_reference, for_devices
from vla_rl.commands.benchmark.scaling_points import REFERENCE, Point, gain_of
from vla_rl.commands.cli import main
from vla_rl.config.loading import load_config
from vla_rl.core.machine import Machine
from vla_rl.placement.checks import machine_checks
from vla_rl.placement.profile import load_profile, save_profile

LIBERO = "libero_openvla_oft_h100.yaml"
SHORT = ["train.batch_episodes=8", "env.max_episode_steps=64", "placement.time_scale=0.15", "placement.env_workers=1"]
YOUNG = ["train.max_staleness=1", "learner.micro_batch=8"]
# Six updates: rates count what was played, and over two updates they can be off by half.
MEASURED = ["--devices", "2", "--iterations", "6"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of the command that has measured a mode and the reference, on devices large enough for all."""
    folder = tmp_path_factory.mktemp("scaling")
    files = {name: folder / f"points.{name}" for name in ("json", "csv", "png")}
    command = ["benchmark", "scaling", "configs/scaling/libero.yaml", *SHORT, *YOUNG, *MEASURED]
    modes = ["--mode", "collocated,synchronous reference", "placement.offload=never"]
    outputs = ["--json", str(files["json"]), "--csv", str(files["csv"]), "--output", str(files["png"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert main([*command, *modes, *outputs]) == 0
    return files


def _by_mode(file: Path) -> dict[str, dict[str, Any]]:
    return {point["mode"]: point for point in json.loads(file.read_text())["points"]}


@pytest.mark.slow
@pytest.mark.alone
def test_points_are_near_their_simulation_and_above_the_reference(measured: dict[str, Path]) -> None:
    found, files = _by_mode(measured["json"]), measured
    assert list(found) == ["collocated", "synchronous reference"]
    for p in found.values():
        assert (p["backend"], p["time_scale"]) == ("virtual", 0.15)
        assert p["simulated"] == pytest.approx(p["batches_per_s"], rel=0.35)  # this machine may be busy
        assert 0.5 < p["efficiency"] < 1.3
    gain = found["collocated"]["batches_per_s"] / found["synchronous reference"]["batches_per_s"]
    assert gain > 1.1
    with files["csv"].open() as file:
        assert len(list(csv.DictReader(file))) == len(found)
    assert files["png"].stat().st_size > 5_000


@pytest.mark.slow
@pytest.mark.alone
def test_one_at_a_time_is_measured_as_it_is_simulated(
    measured: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On devices too small for inference and learner together."""
    monkeypatch.chdir(ROOT)
    profile = load_profile(ROOT / "configs/profiles" / LIBERO)
    tight = profile.model_copy(update={"memory": profile.memory.model_copy(update={"device": 32.0}), "onload": 8.0})
    save_profile(tight, tmp_path / "tight.yaml")
    command = ["benchmark", "scaling", "configs/scaling/libero.yaml", *SHORT, *YOUNG, *MEASURED, "--mode", "collocated"]
    wishes = [f"placement.virtual={tmp_path / 'tight.yaml'}", "placement.offload=auto"]
    assert main([*command, *wishes, "--json", str(tmp_path / "tight.json")]) == 0
    point, other = (_by_mode(file)["collocated"] for file in (tmp_path / "tight.json", measured["json"]))
    assert point["simulated"] == pytest.approx(point["batches_per_s"], rel=0.35)
    assert 1 / point["batches_per_s"] > 1 / other["batches_per_s"] + 4, "changes take 8.3 s"


def _point(devices: int, mode: str, batches_per_s: float, efficiency: float | None) -> Point:
    return Point(devices, mode, "", "simulated", batches_per_s, 1.0, 1.0, efficiency, None, None, None)


def test_gains_are_over_the_reference_on_as_many_devices_and_limited_by_the_best_bound() -> None:
    slow, fast, reference = (
        _point(2, "pipelined", 1.5, 1.0),
        _point(2, "hybrid", 2.0, 0.8),
        _point(2, REFERENCE, 1, 0.5),
    )
    alone = _point(1, "collocated", 3.0, 1.0)
    points = [alone, slow, fast, reference]
    assert gain_of(slow, points) == (1.5, 2.5)
    assert gain_of(fast, points) == (2.0, 2.5)
    assert gain_of(reference, points) == (1.0, 2.5)
    assert gain_of(alone, points) == (None, None)
    assert gain_of(_point(2, "real", 4.0, None), [reference]) == (4.0, None)


def test_an_interrupted_benchmark_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = tmp_path / "points.json"
    command = ["benchmark", "scaling", "configs/scaling/libero.yaml", *SHORT, "--backend", "simulated"]
    command += ["--json", str(result)]
    assert main([*command, "--devices", "2", "--mode", "collocated"]) == 0
    record = json.loads(result.read_text())
    record["points"][0]["batches_per_s"] = 123.0
    result.write_text(json.dumps(record))
    assert main([*command, "--devices", "1,2", "--mode", "all"]) == 0
    one, two = ({p["mode"]: p for p in json.loads(result.read_text())["points"] if p["devices"] == n} for n in (1, 2))
    assert list(one) == ["collocated", "auto", REFERENCE], "the others need two devices"
    assert list(two) == ["collocated", "pipelined", "hybrid", "auto", REFERENCE]
    assert two["collocated"]["batches_per_s"] == 123.0, "measured points are not repeated"
    same = {p["batches_per_s"] for p in two.values() if p["layout"] == two["auto"]["layout"] and p["mode"] != REFERENCE}
    assert len(same) == 1, "auto is one of them"


@pytest.mark.parametrize("text", ["{}", "points", "[1]"])
def test_a_file_of_something_else_is_not_written_over(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    result = tmp_path / "points.json"
    result.write_text(text)
    command = ["benchmark", "scaling", "configs/scaling/libero.yaml", "--backend", "simulated", "--json", str(result)]
    assert main([*command, "--devices", "1", "--mode", "collocated"]) == 2
    assert "holds no points" in capsys.readouterr().err
    assert result.read_text() == text


def test_points_of_another_config_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    command = ["benchmark", "scaling", "configs/scaling/libero.yaml", *SHORT, "--json", str(tmp_path / "points.json")]
    simulated = [*command, "--backend", "simulated", "--devices", "1", "--mode", "collocated"]
    assert main(simulated) == 0
    assert main([*simulated, "learner.micro_batch=4"]) == 2
    assert "its points belong to another config; name another file" in capsys.readouterr().err


def test_a_point_that_this_machine_limits_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        "vla_rl.commands.benchmark.scaling.run_virtual", lambda *_: Measurement(10.0, 1000.0, 100.0, machine=0.9)
    )
    command = ["benchmark", "scaling", "configs/scaling/libero.yaml", *SHORT, "--json", str(tmp_path / "points.json")]
    assert main([*command, "--devices", "1", "--mode", "collocated"]) == 0
    assert "discarded: this machine was the limit" in capsys.readouterr().out
    assert json.loads((tmp_path / "points.json").read_text())["points"] == []


def test_an_unknown_mode_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["benchmark", "scaling", "configs/scaling/libero.yaml", "--mode", "hybird,auto"]) == 2
    assert "--mode hybird: known are all, collocated, pipelined, hybrid, auto, sync" in capsys.readouterr().err


def test_the_reference_waits_for_all_environments_and_never_for_the_time_limit() -> None:
    """A final observation, requested when the other environments are done, would wait for the time limit."""
    profile = load_profile(ROOT / "configs/profiles/maniskill_openvla_h100.yaml")
    config = load_config(ROOT / "configs/scaling/maniskill.yaml", [], machine_checks(Machine.detect()))
    assert config.algo.bootstrap_rule != "never"
    reference, _ = as_reference(for_devices(config, profile, 2), profile)
    assert reference.algo.bootstrap_rule == "never"
    assert reference.placement.max_batch == config.train.batch_episodes
