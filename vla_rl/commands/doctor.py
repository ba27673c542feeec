"""`vla-rl doctor`: what this machine has for training, what it lacks, and the remedy."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from envs.base import EnvError
from envs.base.mujoco_setup import select_gl_backend
from envs.libero.assets.resolve import cache_dir, resolve_assets
from envs.maniskill.vulkan import vulkan_devices, vulkan_problem
from vla_rl.core.gpus import GpuReport
from vla_rl.core.ipc.shared_memory import enlarge, shared_root
from vla_rl.core.machine import GIB, Machine, library_loads
from vla_rl.core.packages import install_command

if TYPE_CHECKING:
    from rich.table import Table

_AGAIN = "bash scripts/setup.sh in a checkout; else install vla_rl's wheel again, with its dependencies"
_SIMULATORS = {"libero": "hf-libero", "robosuite": "robosuite", "mujoco": "mujoco"}  # import name: distribution
_MANISKILL = ("mani_skill", "sapien")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked. ``remedy`` is empty if nothing is missing."""

    topic: str
    found: str
    remedy: str = ""
    required: bool = False  # configs/libero_ppo.yaml cannot train without it

    @property
    def state(self) -> str:
        if not self.remedy:
            return "ok"
        return "missing" if self.required else "note"


def doctor_command(args: argparse.Namespace) -> int:
    """Print what was found, and write it to ``args.json`` if given. Returns 0 if training can run, else 1."""
    from vla_rl.core.files import write_json
    from vla_rl.observability.console import make_console

    findings = examine()
    if args.json is not None:
        write_json(args.json, {"ready": is_ready(findings), "findings": as_records(findings)})
    console = make_console()
    console.print(table_of(findings, "what"))
    ready = is_ready(findings)
    console.print("Training can run." if ready else "Training cannot run yet: fix what is marked as missing.")
    return 0 if ready else 1


def is_ready(findings: Sequence[Finding]) -> bool:
    """Whether nothing that is required is missing."""
    return all(finding.state != "missing" for finding in findings)


def as_records(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """For a JSON file."""
    return [asdict(finding) | {"state": finding.state} for finding in findings]


def table_of(findings: Sequence[Finding], topic: str) -> "Table":
    """A row for each; ``topic``: the heading over what they are about."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("", topic, "found", "remedy"):
        table.add_column(column, overflow="fold")
    styles = {"ok": "green", "note": "yellow", "missing": "bold red"}
    for finding in findings:
        state = f"[{styles[finding.state]}]{finding.state}[/]"
        table.add_row(state, escape(finding.topic), escape(finding.found), escape(finding.remedy))
    return table


def examine() -> list[Finding]:
    """All findings, in the order of the report."""
    machine = Machine.detect()
    return [
        _python(),
        Finding("processors", f"{machine.cpus} cores"),
        _main_memory(machine),
        *_torch(),
        *(_package(name, name, _AGAIN, required=True) for name in ("ray", "deepspeed", "transformers")),
        *(_package(name, dist, install_command("libero"), required=True) for name, dist in _SIMULATORS.items()),
        _gl(),
        *(
            _package(name, name, f"only for ManiSkill tasks: {install_command('maniskill')}", required=False)
            for name in _MANISKILL
        ),
        _vulkan(),
        _package(
            "metaworld",
            "metaworld",
            f"only for Meta-World tasks: {install_command('metaworld')}",
            required=False,
        ),
        _assets(),
        _space("run folder's disk", Path.cwd(), 5 * GIB, "free some space, or set log.dir to another disk"),
        _space("cache folder's disk", cache_dir(), 5 * GIB, "free some space, or set VLA_RL_CACHE to another disk"),
        _shared_memory(),
    ]


def _python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable})"
    fits = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Finding("Python", found, "" if fits else "use Python 3.11 or 3.12", required=True)


def _main_memory(machine: Machine) -> Finding:
    """What the default run needs is 8 GiB; with learner.offload_optimizer=cpu, a 7b policy needs some hundreds."""
    remedy = "lower placement.env_workers: the default run needs 8 GiB; `vla-rl plan CONFIG` shows what a run needs"
    return Finding("main memory", f"{machine.memory / GIB:.1f} GiB", remedy if machine.memory < 8 * GIB else "")


def _torch() -> Iterator[Finding]:
    """torch, and the GPUs that it can use."""
    usable = False
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of a CUDA build is missing
        yield Finding("torch", f"cannot be imported: {error}", _AGAIN, required=True)
    else:
        usable = torch.cuda.is_available()
        build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
        yield Finding("torch", f"{torch.__version__}, {build}", required=True)
    yield _gpu(GpuReport.detect(), usable)


def _gpu(report: GpuReport, usable: bool) -> Finding:
    """``usable``: whether torch itself finds a GPU that it can use."""
    if not report.gpus:
        hidden = f" visible: CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}" if report.driver else ""
        remedy = "none needed for the tiny policy; a 7b policy needs an NVIDIA GPU and its driver"
        return Finding("GPU", f"none{hidden}", remedy)
    names = ", ".join(f"{gpu.name} ({gpu.memory / GIB:.0f} GiB)" for gpu in report.gpus)
    found = f"{names}; driver {report.driver}"
    if report.problem or not usable:
        problem = report.problem or 'torch finds none of them: python -c "import torch; torch.cuda.init()" tells why'
        remedy = f"{problem}; or hide the GPUs, to train on the cores: CUDA_VISIBLE_DEVICES=-1"
        return Finding("GPU", f"{found}; not usable by torch", remedy, required=True)
    return Finding("GPU", found, required=True)


def _package(module: str, distribution: str, remedy: str, *, required: bool) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(module, "not installed", remedy, required)
    try:
        return Finding(module, importlib.metadata.version(distribution), required=required)
    except importlib.metadata.PackageNotFoundError:
        return Finding(module, "of unknown version", required=required)


def _gl() -> Finding:
    """The off-screen renderer that MuJoCo would use."""
    chosen = "MUJOCO_GL" in os.environ
    libraries = {"osmesa": ("libOSMesa.so.8", "libOSMesa.so.6"), "egl": ("libEGL.so.1",)}
    loading = [name for name, files in libraries.items() if library_loads(*files)]
    loads = f"loads: {', '.join(loading) or 'none'}"
    try:
        with patch.dict(os.environ):  # the check changes no variable
            backend = select_gl_backend()
    except EnvError as error:
        return Finding("off-screen GL", loads, str(error), required=True)
    return Finding("off-screen GL", f"MUJOCO_GL={backend} ({'as set' if chosen else 'chosen'}); {loads}", required=True)


def _vulkan() -> Finding:
    """The devices that ManiSkill could render with."""
    devices, problem = vulkan_devices(), vulkan_problem()
    found = "no loader (libvulkan)" if devices is None else "; ".join(map(str, devices)) or "no device"
    return Finding("Vulkan", found, f"only for ManiSkill tasks: {problem}" if problem else "")


def _assets() -> Finding:
    try:
        with patch.dict(os.environ, HF_HUB_OFFLINE="1"):  # the check must not start a download
            assets = resolve_assets()
    except EnvError as error:
        return Finding("LIBERO assets", "none", str(error), required=True)
    remedy = ""
    if assets.origin == "placeholder":
        remedy = "results on them are not benchmark numbers; the first run asks the hub, or set LIBERO_ASSETS to a copy"
    return Finding("LIBERO assets", f"{assets.origin}: {assets.path}", remedy, required=False)


def _shared_memory() -> Finding:
    """What the default run needs is 1 GiB; ``vla-rl plan CONFIG`` shows what another one does."""
    remedy = f"{enlarge(4 * GIB)}; `vla-rl plan CONFIG` shows what a run needs"
    return replace(_space("shared memory", shared_root(), GIB, remedy), required=True)


def _space(topic: str, folder: Path, enough: int, remedy: str) -> Finding:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free ({folder})"
    return Finding(topic, found, remedy if usage.free < enough else "")
