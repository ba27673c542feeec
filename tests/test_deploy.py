"""The templates of deploy/, with programs that only say how they were called."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import ROOT

_BLOCKED_TERM = 1 << 14  # of the mask in /proc/PID/status: signal 15


@pytest.fixture
def said(tmp_path: Path) -> Path:
    """Where programs write how they were called; they are in the folder ``bin`` next to it.

    With AT_LIMIT, a training lasts until it hears SIGTERM, and Slurm finds that its time limit is near.
    """
    programs = {
        "vla-rl": """
            if [[ $* == *ray_address=127.* ]]; then until [ "$(grep -sc ^ray said)" = 2 ]; do sleep 0.05; done; fi
            echo "vla-rl $*" >>said
            if [ -n "${AT_LIMIT:-}" ]; then
                trap 'echo saved >>said; exit 0' TERM
                echo $$ >>steps
                kill -USR1 "$BATCH"
                while :; do sleep 0.05; done
            fi""",
        "ray": """
            echo "ray $* $(grep SigBlk /proc/self/status)" >>said
            echo $$ >>steps
            last=${!#}
            if [[ $last == --port=* ]]; then exec python listen.py "${last#--port=}"; else exec sleep 60; fi""",
        # SIGTERM ends a step by force
        "srun": """
            export BATCH=$PPID
            while [[ $1 == --* ]]; do shift; done
            "$@" &
            trap "kill -KILL $!" TERM
            wait $!""",
        "scancel": 'echo "scancel $*" >>said; kill -TERM $(cat steps)',
        "scontrol": "if [ $1 = show ]; then printf 'one\\ntwo\\n'; else echo \"scontrol $*\" >>said; fi",
        "getent": "printf '127.0.0.1 STREAM\\n127.0.0.1 DGRAM\\n'",
        "python": f'exec {sys.executable} "$@"',
    }
    (tmp_path / "listen.py").write_text(
        "import socket, sys, time\nserver = socket.create_server(('127.0.0.1', int(sys.argv[1])))\ntime.sleep(60)\n"
    )
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


def slurm(said: Path, nodes: int, job: int = 7, **variables: str) -> list[str]:
    variables |= {"SLURM_JOB_ID": str(job), "SLURM_NNODES": str(nodes), "SLURM_JOB_NODELIST": "x"}
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
    job = os.getpid()
    address = f"127.0.0.1:{20000 + job % 20000}"
    *started, trained = slurm(said, 2, job)
    head, other = sorted(started, key=lambda line: "--head" not in line)
    assert "--node-ip-address=127.0.0.1" in head
    assert f"--address={address}" in other
    for line in started:
        assert int(line.split()[-1], 16) & _BLOCKED_TERM
    assert trained.endswith(f"placement.nodes=2 placement.ray_address={address}")


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_near_its_time_limit_is_requeued_once_the_run_has_saved(nodes: int, said: Path) -> None:
    job = os.getpid()
    *_, trained, asked, saved, requeued = slurm(said, nodes, job, AT_LIMIT="yes")
    assert trained.startswith("vla-rl train")
    assert asked == f"scancel --signal=TERM {job}", "which SIGTERM reaches the run and Ray"
    assert saved == "saved"
    assert requeued == f"scontrol requeue {job}"


def test_kuberay_names_the_release_of_ray_that_is_installed() -> None:
    text = (ROOT / "deploy/kuberay.yaml").read_text()
    (release,) = re.findall(r"^ray==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert yaml.safe_load(text)["spec"]["rayClusterSpec"]["rayVersion"] == release
    assert f"ray[default]=={release}" in text
