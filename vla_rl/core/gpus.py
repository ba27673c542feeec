"""NVIDIA GPUs: which ones this process may use, and whether the installed torch can use them. Does not load torch.

The driver's management library (NVML) counts all GPUs of a machine and numbers them in the order of the PCI bus.
CUDA_VISIBLE_DEVICES, if it is set, names those that a process may use, by number or by UUID, and defines their order:
device i is entry i of the list. As for CUDA itself, the list ends at the first entry that names no GPU.
"""

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, Self

Version = tuple[int, int]  # of CUDA: major, minor

# The oldest driver for programs of each major version of CUDA, by NVIDIA's notes on minor version compatibility.
_OLDEST_DRIVER = {11: "450", 12: "525", 13: "580"}
# The newest release of torch that the package index has as a build for CUDA 12 (requirements-cuda12.txt).
_TORCH_FOR_CUDA_12 = "2.10.0"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU, or a part of one (MIG)."""

    name: str
    memory: int  # bytes
    entry: str = "0"  # what CUDA_VISIBLE_DEVICES calls it: a number or a UUID
    number: int = 0  # NVML's; EGL counts GPUs alike, whatever CUDA_VISIBLE_DEVICES says


@dataclass(frozen=True, slots=True)
class GpuReport:
    """What the driver offers to this process, and what torch can do with it."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""  # its version, such as 580.65; empty without a driver
    driver_cuda: Version = (0, 0)  # the newest version of CUDA that the driver runs
    torch_cuda: Version | None = None  # the version that torch was built for; None: a CPU build, or no torch

    @classmethod
    def detect(cls) -> Self:
        """Ask NVML, and read torch's own version file. No driver, or one that has failed, is a report without GPUs."""
        import pynvml

        torch_cuda = _torch_cuda()
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return cls(torch_cuda=torch_cuda)
        try:
            version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
            cuda = version // 1000, version % 1000 // 10
            return cls(tuple(_visible(pynvml)), pynvml.nvmlSystemGetDriverVersion(), cuda, torch_cuda)
        except pynvml.NVMLError:
            return cls(torch_cuda=torch_cuda)
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    @property
    def problem(self) -> str:
        """Why torch cannot use these GPUs, with the remedy; empty if it can, and if there are none."""
        if not self.gpus:
            return ""
        here = f"the NVIDIA driver is {self.driver}, for CUDA up to {_text(self.driver_cuda)}"
        if self.torch_cuda is None:
            return f"torch is a CPU build ({here}); {self._build_for_driver}"
        if self.driver_cuda[0] < self.torch_cuda[0]:
            oldest = _OLDEST_DRIVER.get(self.torch_cuda[0], "newer")
            return (
                f"torch is built for CUDA {_text(self.torch_cuda)}, which needs driver {oldest} or newer ({here}); "
                f"{self._build_for_driver}"
            )
        return ""

    @property
    def _build_for_driver(self) -> str:
        cuda = self.driver_cuda[0]
        if cuda < 12:
            return f"update the driver: {_OLDEST_DRIVER[12]} or newer runs torch's builds for CUDA 12"
        command = f"install torch's build for CUDA {cuda}: {sys.executable} -m pip install --force-reinstall"
        if cuda == 12:
            return f"{command} torch=={_TORCH_FOR_CUDA_12} (in a checkout: bash scripts/setup.sh --cuda 12)"
        return f"{command} torch=={_torch_release()}, from an index that has it"

    @property
    def usable(self) -> tuple[Gpu, ...]:
        """The GPUs that torch can use."""
        return () if self.problem else self.gpus


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _visible(nvml: Any) -> Iterator[Gpu]:
    """The GPUs that CUDA would show to this process, in its order."""
    visible, count = os.environ.get("CUDA_VISIBLE_DEVICES"), nvml.nvmlDeviceGetCount()
    entries = [str(number) for number in range(count)] if visible is None else [e.strip() for e in visible.split(",")]
    seen = set[str]()
    for entry in entries:
        try:
            handle = _handle(nvml, entry, count)
            if handle is None or (uuid := nvml.nvmlDeviceGetUUID(handle)) in seen:
                return
            seen.add(uuid)
            name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle).total
            yield Gpu(name, memory, entry, _number(nvml, handle))
        except nvml.NVMLError:  # a GPU that has failed
            if visible is not None:
                return


def _handle(nvml: Any, entry: str, count: int) -> Any:
    """NVML's handle of an entry of CUDA_VISIBLE_DEVICES; None if it names no GPU. A UUID may be shortened."""
    if entry.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(entry)) if int(entry) < count else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    with contextlib.suppress(nvml.NVMLError):
        return nvml.nvmlDeviceGetHandleByUUID(entry)
    handles = map(nvml.nvmlDeviceGetHandleByIndex, range(count))
    found = [handle for handle in handles if nvml.nvmlDeviceGetUUID(handle).startswith(entry)]
    return found[0] if len(found) == 1 else None


def _number(nvml: Any, handle: Any) -> int:
    """NVML's number of the GPU; of a part, that of the whole."""
    with contextlib.suppress(nvml.NVMLError):
        handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return nvml.nvmlDeviceGetIndex(handle)


def _torch_release() -> str:
    """Of the installed torch, without the name of its build."""
    try:
        return installed_version("torch").partition("+")[0]
    except PackageNotFoundError:
        return "VERSION"


def _torch_cuda() -> Version | None:
    """The version of CUDA that the installed torch was built for, from the file in which it keeps its version."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b.*= *['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None
