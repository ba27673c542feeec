"""The templates of deploy/, with programs that only say how they were called."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import ROOT

_BLOCKED_TERM = 1 << 14  # of the mask in /proc/PID/status: signal 15


@pytest.fixture
def said(tmp_path: Path) -> Path:
    """Where programs write how they were called; they are in the folder ``bin`` next to it."""
    programs = {
        "vla-rl": f'echo "vla-rl $*" >> {tmp_path}/said',
        "ray": f'echo "ray $* $(grep SigBlk /proc/self/status)" >> {tmp_path}/said',
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
        "scontrol": "printf 'one\\ntwo\\n'",
        "hostname": "echo 10.0.0.1",
        "sleep": f"echo >> {tmp_path}/slept; until [ $(cat {tmp_path}/said 2>&- | grep -c ^ray) -ge "
        f"$(wc -l < {tmp_path}/slept) ]; do {shutil.which('sleep')} 0.05; done",  # until Ray has started once more
        "python": f'exec {sys.executable} "$@"',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path / "said"


def run(command: list[str], said: Path, **variables: str) -> list[str]:
    """What was said."""
    home = said.parent
    environment = os.environ | {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "HOME": str(home)} | variables
    said.unlink(missing_ok=True)
    subprocess.run(command, cwd=home, env=environment, check=True, timeout=60)
    return said.read_text().splitlines()


def slurm(said: Path, nodes: int) -> list[str]:
    variables = {"SLURM_JOB_ID": "7", "SLURM_NNODES": str(nodes), "SLURM_JOB_NODELIST": "x"}
    command = ["bash", str(ROOT / "deploy/slurm.sbatch"), "libero_ppo", "seed=3"]
    return run(command, said, VLA_RL_VENV=str(said.parent), **variables)


def sky(said: Path) -> list[str]:
    task = yaml.safe_load((ROOT / "deploy/skypilot.yaml").read_text())
    (said.parent / ".venv").mkdir(exist_ok=True)
    if not (said.parent / ".venv/bin").exists():
        (said.parent / ".venv/bin").symlink_to(said.parent / "bin")
    return run(["bash", "-c", task["run"]], said, **task["envs"])


def kuberay(said: Path) -> list[str]:
    job = yaml.safe_load((ROOT / "deploy/kuberay.yaml").read_text())
    assert job["spec"]["submissionMode"] == "HTTPMode", "else another shell reads the entrypoint before"
    variables = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    entrypoint = job["spec"]["entrypoint"].replace("/data/runs", str(said.parent / "runs"))
    return run(["sh", "-c", entrypoint], said, **variables)


@pytest.mark.parametrize(("start", "name"), [(lambda s: slurm(s, 1), "slurm-7"), (sky, "sky"), (kuberay, "kuberay")])
def test_a_job_that_starts_again_continues_also_without_a_checkpoint(start, name: str, said: Path) -> None:
    (first,) = start(said)
    assert first.startswith("vla-rl train libero_ppo ")
    assert f"log.name={name}" in first
    (said.parent / "runs" / name).mkdir(parents=True)
    (said.parent / "runs" / name / "config.yaml").touch()
    (again,) = start(said)
    words = again.split()
    assert words[:3] == ["vla-rl", "train", "--resume"]
    assert words[3].endswith(f"runs/{name}")
    assert "log.name" not in again


def test_on_several_nodes_ray_does_not_hear_the_signal_that_asks_for_a_checkpoint(said: Path) -> None:
    *started, trained = slurm(said, 2)
    assert sorted(line.split()[4] for line in started) == ["--address=10.0.0.1:20007", "--head"], started
    for line in started:
        assert int(line.split()[-1], 16) & _BLOCKED_TERM
    assert trained.endswith("placement.nodes=2 placement.ray_address=10.0.0.1:20007")
