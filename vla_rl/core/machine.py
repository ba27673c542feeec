"""What this machine has, read without loading a heavy library."""

import ctypes
import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from vla_rl.core.gpus import Gpu, GpuReport

GIB = 1024**3
CODE = Path(__file__).resolve().parents[2]  # the folder of the packages vla_rl, envs and algos


@dataclass(frozen=True, slots=True)
class Machine:
    """Processors, memory and GPUs that this process, with the installed torch, may use."""

    cpus: int
    memory: int  # bytes
    gpus: tuple[Gpu, ...]

    @classmethod
    def detect(cls) -> Self:
        return cls(_cpus(), _memory(), GpuReport.detect().usable)


def free_port() -> int:
    """A port of this machine that is not in use."""
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has this IP address; None if none has, as behind a translation."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


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


def multiplies_bf16() -> bool:
    """Whether this processor has instructions with which torch multiplies float32 matrices in bfloat16.

    These are AMX's. AVX512_BF16 alone is not enough: there, oneDNN multiplies in float32 all the same.
    """
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False


def code_version() -> str:
    """A hash of all source files of this project, as they are on the disk."""
    digest = hashlib.sha256()
    for package in ("vla_rl", "envs", "algos"):
        for path in sorted((CODE / package).rglob("*.py")):
            digest.update(str(path.relative_to(CODE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def library_loads(*names: str) -> bool:
    """Whether the system's linker finds one of these shared libraries, such as ``libEGL.so.1``."""
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False
