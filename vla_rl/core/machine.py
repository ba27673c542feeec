"""What the machine of this process has, read without loading any heavy library."""

from __future__ import annotations

import ctypes
import os
import socket
from dataclasses import dataclass
from pathlib import Path

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU."""

    name: str
    memory: int  # bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """Processors and memory that this process may use."""

    cpus: int
    memory: int  # bytes
    gpus: tuple[Gpu, ...]

    @classmethod
    def detect(cls) -> Machine:
        return cls(_cpus(), _memory(), _gpus())


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def _cpus() -> int:
    """Processors in this process's affinity mask, or fewer where a control group allows less time."""
    cpus = len(os.sched_getaffinity(0))
    limit = _cgroup_words("cpu.max")
    if len(limit) == 2 and limit[0] != "max":
        cpus = min(cpus, max(1, round(int(limit[0]) / int(limit[1]))))
    return cpus


def _memory() -> int:
    """Physical memory in bytes, or the control group's limit where that is less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_words("memory.max")
    if limit and limit[0] != "max":
        memory = min(memory, int(limit[0]))
    return memory


def _cgroup_words(name: str) -> list[str]:
    try:
        return Path("/sys/fs/cgroup", name).read_text().split()
    except OSError:
        return []


class _NvmlMemory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _gpus() -> tuple[Gpu, ...]:
    """GPUs that the NVIDIA driver reports, as far as CUDA_VISIBLE_DEVICES shows them to this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return ()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint(0)
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        found = tuple(gpu for index in range(count.value) if (gpu := _nvml_gpu(nvml, index)) is not None)
    finally:
        nvml.nvmlShutdown()
    return found if visible is None else found[: len(visible.split(","))]


def _nvml_gpu(nvml: ctypes.CDLL, index: int) -> Gpu | None:
    handle, memory, name = ctypes.c_void_p(), _NvmlMemory(), ctypes.create_string_buffer(96)
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return None
    if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    if nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name))) != 0:
        return None
    return Gpu(name.value.decode(errors="replace"), memory.total)


def library_loads(*names: str) -> bool:
    """Whether the system's linker finds one of these shared libraries, such as ``libEGL.so.1``."""
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False
