"""Where a result comes from: code, libraries, machine, and what a checkpoint was made for."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vla_rl.config.run_config import RunConfig
from vla_rl.core.files import json_or_empty
from vla_rl.core.gpus import GpuReport
from vla_rl.core.records import EnvSpec

_PACKAGES = (
    *("torch", "ray", "deepspeed", "transformers", "peft", "gymnasium", "numpy"),
    *("mujoco", "robosuite", "hf-libero", "mani_skill", "sapien", "metaworld", "lerobot"),
)
_RANGES = "proprio_range"
_CONDITIONS = "conditions"  # which an algorithm adds to instructions (``algos.recap``)


def metadata(config: RunConfig, spec: EnvSpec, argv: Sequence[str]) -> dict[str, Any]:
    """JSON-able facts that are needed to trust or repeat a result."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [Path(argv[0]).name, *argv[1:]],
        "git_commit": git_commit(),
        "python": sys.version.split()[0],
        "packages": package_versions(),
        "machine": machine_record(),
        "simulator": spec.name,
        "engine": spec.engine,
        "assets": spec.assets,
        "instructions": list(spec.instructions),
        "max_episode_steps": spec.max_episode_steps,
        _RANGES: spec.proprio_range,
        _CONDITIONS: list(config.algo.conditions),
    }


def with_ranges_of(run: Path, spec: EnvSpec) -> EnvSpec:
    """``spec`` with the ranges of the state that the run began with; a simulator may measure others each time."""
    ranges = tuple((low, high) for low, high in json_or_empty(run / "metadata.json").get(_RANGES, ()))
    return replace(spec, proprio_range=ranges) if len(ranges) == spec.proprio_dim else spec


def knows_conditions(checkpoint: str | None, conditions: Sequence[str]) -> bool:
    """Whether a policy was trained under all of these additions to its instructions, as far as its metadata say."""
    if checkpoint is None or set(conditions) == {""}:
        return True
    try:
        written = json.loads((Path(checkpoint) / "metadata.json").read_text(encoding="utf-8"))
        return set(conditions) <= set(written[_CONDITIONS])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def package_versions() -> dict[str, str | None]:
    """The libraries that results depend on; None for those that are missing."""
    return {name: _package_version(name) for name in _PACKAGES}


def machine_record() -> dict[str, Any]:
    """This machine's system, processor, memory and GPUs, JSON-able: part of every result."""
    return {
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [gpu.name for gpu in GpuReport.detect().gpus],
    }


def git_commit() -> str | None:
    """The commit of this source tree, with ``+changes`` if it was edited since; None outside a git checkout."""
    root = Path(__file__).resolve().parents[2]
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
