"""vla_rl.core.gpus: which GPUs a process may use, by CUDA_VISIBLE_DEVICES, and whether torch can use them."""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from vla_rl.core import gpus
from vla_rl.core.gpus import GpuReport
from vla_rl.core.machine import Machine

UUIDS = ("GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333", "GPU-cccc4444")
PART = "MIG-dddd5555"  # of the last GPU


def install_driver(monkeypatch: pytest.MonkeyPatch, uuids: tuple[str, ...] = UUIDS, **answers: Any) -> None:
    """GPUs as the driver's library reports them; a handle is a UUID."""

    def by_uuid(uuid: str) -> str:
        if uuid not in (*uuids, PART):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def whole(handle: str) -> str:
        if handle != PART:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return uuids[-1]

    known = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.65.06",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
        "nvmlDeviceGetCount": lambda: len(uuids),
        "nvmlDeviceGetHandleByIndex": lambda index: uuids[index],
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": whole,
        "nvmlDeviceGetIndex": uuids.index,
        "nvmlDeviceGetUUID": lambda handle: handle,
        "nvmlDeviceGetName": lambda handle: f"name of {handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=(1 if handle == PART else 80) << 30),
    }
    for name, value in (known | answers).items():
        monkeypatch.setattr(pynvml, name, value)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(monkeypatch)
    monkeypatch.setattr(gpus, "_torch_cuda", lambda: (13, 0))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, [("0", 0), ("1", 1), ("2", 2), ("3", 3)]),
        ("2,3", [("2", 2), ("3", 3)]),
        ("3, 0", [("3", 3), ("0", 0)]),
        ("GPU-bbbb3333,0", [("GPU-bbbb3333", 2), ("0", 0)]),
        ("GPU-b", [("GPU-b", 2)]),  # a shortened UUID
        ("GPU-aaaa", []),  # of two GPUs
        ("MIG-dddd5555", [("MIG-dddd5555", 3)]),
        ("1,7,2", [("1", 1)]),  # CUDA ignores what follows an entry that names no GPU
        ("1,1", [("1", 1)]),
        ("2,GPU-bbbb3333", [("2", 2)]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
@pytest.mark.usefixtures("driver")
def test_device_i_is_entry_i_of_the_callers_list(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, found: list[tuple[str, int]]
):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    seen = Machine.detect().gpus
    assert [(gpu.entry, gpu.number) for gpu in seen] == found
    assert all(gpu.memory == (1 if gpu.entry == PART else 80) << 30 for gpu in seen)


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetCount", "nvmlSystemGetCudaDriverVersion_v2"])
@pytest.mark.usefixtures("driver")
def test_a_missing_or_failed_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch, failing: str):
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, failing, fail)
    assert Machine.detect().gpus == GpuReport.detect().gpus == ()
    assert GpuReport.detect().problem == ""


@pytest.mark.parametrize(
    ("torch_cuda", "driver_cuda", "problem"),
    [
        ((13, 0), (13, 0), ""),
        ((13, 2), (13, 0), ""),  # minor versions are compatible
        ((12, 8), (13, 0), ""),
        ((13, 0), (12, 4), "torch is built for CUDA 13.0, which needs driver 580 or newer (the NVIDIA driver is 550.5"),
        (
            None,
            (12, 4),
            "torch is a CPU build (the NVIDIA driver is 550.54, for CUDA up to 12.4); install torch's build",
        ),
        (
            None,
            (13, 0),
            "torch is a CPU build (the NVIDIA driver is 550.54, for CUDA up to 13.0); install torch's build",
        ),
        (
            (12, 8),
            (11, 4),
            "torch is built for CUDA 12.8, which needs driver 525 or newer (the NVIDIA driver is 550.54",
        ),
    ],
)
@pytest.mark.usefixtures("driver")
def test_a_gpu_that_torch_cannot_use_is_not_planned_with(
    monkeypatch: pytest.MonkeyPatch, torch_cuda: gpus.Version | None, driver_cuda: gpus.Version, problem: str
):
    monkeypatch.setattr(gpus, "_torch_cuda", lambda: torch_cuda)
    install_driver(
        monkeypatch,
        nvmlSystemGetDriverVersion=lambda: "550.54",
        nvmlSystemGetCudaDriverVersion_v2=lambda: 1000 * driver_cuda[0] + 10 * driver_cuda[1],
    )
    report = GpuReport.detect()
    assert len(report.gpus) == 4, "they are there"
    assert report.problem.startswith(problem)
    assert bool(report.problem) == bool(problem)
    if problem:
        pinned = importlib.metadata.version("torch").split("+")[0]
        command = f"{sys.executable} -m pip install --force-reinstall torch=="
        assert report.problem.endswith(
            {
                11: "update the driver: 525 or newer runs torch's builds for CUDA 12",
                12: f"{command}2.10.0 (in a checkout: bash scripts/setup.sh --cuda 12)",
                13: f"{command}{pinned}, from an index that has it",
            }[driver_cuda[0]]
        )
    assert len(Machine.detect().gpus) == (0 if problem else 4)


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("cuda: Optional[str] = '12.8'", (12, 8)),
        ('cuda = "13.0"', (13, 0)),
        ("cuda: Optional[str] = None", None),
        ("hip: Optional[str] = '6.1'", None),
    ],
)
def test_the_cuda_version_of_torch_is_read_from_its_version_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, version: gpus.Version | None
):
    (tmp_path / "version.py").write_text(f"from typing import Optional\n__version__ = '2.13.0'\n{line}\nxpu = None\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert gpus._torch_cuda() == version


def test_the_installed_torch_says_the_same_of_itself():
    torch = pytest.importorskip("torch")
    built = torch.version.cuda
    assert gpus._torch_cuda() == (None if built is None else tuple(map(int, built.split(".")[:2])))
