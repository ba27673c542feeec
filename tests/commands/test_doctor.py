import argparse
import json
from pathlib import Path

import pytest

from envs.base import EnvError
from envs.libero.assets.resolve import LiberoAssets
from envs.maniskill import vulkan
from envs.maniskill.vulkan import VulkanDevice
from vla_rl.commands import doctor
from vla_rl.commands.doctor import doctor_command, examine
from vla_rl.core.gpus import Gpu, GpuReport
from vla_rl.core.machine import Machine


def findings() -> dict[str, doctor.Finding]:
    return {finding.topic: finding for finding in examine()}


@pytest.fixture(autouse=True)
def assets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LiberoAssets:
    """Looking for the real ones is another module's work."""
    found = LiberoAssets(tmp_path, "placeholder")
    monkeypatch.setattr(doctor, "resolve_assets", lambda: found)
    return found


def test_the_report_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "report.json"
    assert doctor_command(argparse.Namespace(json=file)) == 0
    assert "Training can run." in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["ready"] is True
    rows = {row["topic"]: row for row in report["findings"]}
    assert {"Python", "torch", "GPU", "ray", "deepspeed", "off-screen GL", "Vulkan", "libero", "LIBERO assets"} <= set(
        rows
    )
    assert rows["libero"]["found"] == "0.1.4"
    assert rows["LIBERO assets"]["found"].startswith("placeholder")
    assert all(row["state"] in ("ok", "note", "missing") for row in rows.values())
    assert all(bool(row["remedy"]) == (row["state"] != "ok") for row in rows.values())


def test_a_required_thing_that_is_missing_gives_status_1_and_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def no_gl() -> str:
        raise EnvError("no off-screen GL library found: install one")

    monkeypatch.setattr(doctor, "select_gl_backend", no_gl)
    assert findings()["off-screen GL"].state == "missing"
    assert doctor_command(argparse.Namespace(json=None)) == 1
    assert "Training cannot run yet" in capsys.readouterr().out


def test_little_main_memory_is_named(monkeypatch: pytest.MonkeyPatch):
    for gib, state in ((4, "note"), (16, "ok")):
        monkeypatch.setattr(Machine, "detect", lambda gib=gib: Machine(2, gib << 30, ()))
        found = findings()["main memory"]
        assert (found.found, found.state) == (f"{gib}.0 GiB", state)
    assert findings()["processors"].found == "2 cores"


def test_looking_changes_neither_the_renderer_nor_the_hub_settings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    seen = {}
    monkeypatch.setattr(
        doctor, "resolve_assets", lambda: seen.update(doctor.os.environ) or LiberoAssets(Path(), "package")
    )
    assert findings()["LIBERO assets"].state == "ok"
    assert seen["HF_HUB_OFFLINE"] == "1"
    assert doctor.os.environ["HF_HUB_OFFLINE"] == "0"
    assert "MUJOCO_GL" not in doctor.os.environ


def test_a_renderer_set_by_the_user_that_cannot_work_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUJOCO_GL", "wgl")
    found = findings()["off-screen GL"]
    assert found.state == "missing"
    assert "MUJOCO_GL=wgl" in found.remedy


@pytest.mark.parametrize("devices", [None, [], [VulkanDevice("llvmpipe", True, "Mesa 22.3.6")]])
def test_a_machine_without_a_vulkan_driver_can_train_all_but_maniskill(
    monkeypatch: pytest.MonkeyPatch, devices: list[VulkanDevice] | None
):
    for module in (doctor, vulkan):
        monkeypatch.setattr(module, "vulkan_devices", lambda: devices)
    found = findings()["Vulkan"]
    assert found.state == "note"
    assert found.remedy.startswith("only for ManiSkill tasks: no Vulkan")
    assert "mesa-vulkan-drivers 23.1 or newer" in found.remedy


def test_vulkan_devices_are_named(monkeypatch: pytest.MonkeyPatch):
    for module in (doctor, vulkan):
        monkeypatch.setattr(module, "vulkan_devices", lambda: [VulkanDevice("llvmpipe", True, "Mesa 25.0.7")])
    found = findings()["Vulkan"]
    assert (found.state, found.found) == ("ok", "llvmpipe, Mesa 25.0.7")


def test_missing_packages_and_little_room_have_a_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_SIMULATORS", {"no_such_simulator": "no-such-simulator"})
    monkeypatch.setattr(Machine, "detect", lambda: Machine(cpus=1, memory=4 << 30, gpus=()))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: argparse.Namespace(free=1 << 20, total=1 << 40))
    found = findings()
    assert found["no_such_simulator"].state == "missing"
    assert found["no_such_simulator"].remedy == "bash scripts/setup.sh"
    assert found["main memory"].state == "note"
    assert "--shm-size" in found["shared memory"].remedy
    assert "VLA_RL_CACHE" in found["cache folder's disk"].remedy


@pytest.mark.parametrize(
    ("report", "usable", "state", "found", "remedy"),
    [
        (GpuReport((Gpu("H200", 139 << 30),), "580.65", (13, 0), (13, 0)), True, "ok", "H200 (139 GiB)", ""),
        (
            GpuReport((Gpu("A100", 80 << 30),), "550.54", (12, 4), (13, 0)),
            False,
            "missing",
            "driver 550.54; not usable by torch",
            "torch is built for CUDA 13.0, which needs driver 580 or newer",
        ),
        (
            GpuReport((Gpu("A100", 80 << 30),), "550.54", (12, 4), None),
            False,
            "missing",
            "not usable by torch",
            "setup.sh --cuda 12); or hide the GPUs, to train on the cores: CUDA_VISIBLE_DEVICES=-1",
        ),
        (GpuReport((Gpu("A100", 80 << 30),), "580.65", (13, 0), (13, 0)), False, "missing", "A100", "torch finds none"),
        (GpuReport(), False, "note", "none", "none needed for the tiny policy"),
    ],
)
def test_gpus_that_torch_cannot_use_are_missing(
    monkeypatch: pytest.MonkeyPatch, report: GpuReport, usable: bool, state: str, found: str, remedy: str
):
    monkeypatch.setattr(GpuReport, "detect", lambda: report)
    monkeypatch.setattr("torch.cuda.is_available", lambda: usable)
    finding = findings()["GPU"]
    assert (finding.state, found in finding.found, remedy in finding.remedy) == (state, True, True)


def test_gpus_that_are_hidden_are_named_as_hidden(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GpuReport, "detect", lambda: GpuReport((), "580.65", (13, 0), (13, 0)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert findings()["GPU"].found == "none visible: CUDA_VISIBLE_DEVICES=-1"
