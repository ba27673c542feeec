import os
from types import SimpleNamespace

import pynvml
import pytest

from vla_rl.core import machine
from vla_rl.core.machine import Machine, library_loads


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    files: dict[str, str] = {}
    monkeypatch.setattr(machine, "_cgroup_words", lambda name: files.get(name, "").split())
    return files


def test_this_machine(cgroup: dict[str, str]):
    found = Machine.detect()
    assert found.cpus == len(os.sched_getaffinity(0))
    assert found.memory > 1 << 30


def test_a_control_group_limits_processors_and_memory(cgroup: dict[str, str]):
    cgroup |= {"cpu.max": "50000 100000", "memory.max": str(1 << 30)}
    found = Machine.detect()
    assert (found.cpus, found.memory) == (1, 1 << 30)
    cgroup |= {"cpu.max": "max 100000", "memory.max": "max"}
    assert Machine.detect().memory > 1 << 30


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, as the driver's library reports them."""
    for name, value in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index + 1,
        "nvmlDeviceGetName": lambda handle: f"GPU {handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=handle << 30),
    }.items():
        monkeypatch.setattr(pynvml, name, value)


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, ["GPU 1", "GPU 2"]), ("0,1", ["GPU 1", "GPU 2"]), ("0", ["GPU 1"]), ("", []), ("-1", [])],
)
@pytest.mark.usefixtures("driver")
def test_gpus_are_those_that_cuda_would_show(monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = Machine.detect().gpus
    assert [gpu.name for gpu in found] == names
    assert [gpu.memory >> 30 for gpu in found] == [1, 2][: len(names)]


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert Machine.detect().gpus == ()


def test_libraries():
    assert library_loads("libno-such-thing.so.9", "libc.so.6")
    assert not library_loads("libno-such-thing.so.9")
