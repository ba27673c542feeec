"""What this machine has, read without loading a heavy library."""

import contextlib
import ctypes
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU."""

    name: str
    memory: int  # bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """Processors, memory and GPUs that this process may use."""

    cpus: int
    memory: int  # bytes
    gpus: tuple[Gpu, ...]

    @classmethod
    def detect(cls) -> Self:
        return cls(_cpus(), _memory(), _gpus())


def free_port() -> int:
    """A port of this machine that is not in use."""
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def _cpus() -> int:
    """Processors in this process's affinity mask, or fewer if a control group limits the time."""
    cpus = len(os.sched_getaffinity(0))
    limit = _cgroup_words("cpu.max")
    if len(limit) == 2 and limit[0] != "max":
        cpus = min(cpus, max(1, round(int(limit[0]) / int(limit[1]))))
    return cpus


def _memory() -> int:
    """Physical memory in bytes, or the limit of the control group if that is lower."""
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


def _gpus() -> tuple[Gpu, ...]:
    """GPUs that the NVIDIA driver reports and CUDA_VISIBLE_DEVICES shows to this process; none without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return ()
    import pynvml

    found = []
    with contextlib.suppress(pynvml.NVMLError):  # no driver, or one that has failed
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):  # a GPU that has failed
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                found.append(Gpu(pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle).total))
        pynvml.nvmlShutdown()
    return tuple(found if visible is None else found[: len(visible.split(","))])


def library_loads(*names: str) -> bool:
    """Whether the system's linker finds one of these shared libraries, such as ``libEGL.so.1``."""
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False
