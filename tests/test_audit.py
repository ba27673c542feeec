"""scripts/audit.sh, with a pip-audit that answers what a test wants."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

_CLEAN = {"name": "numpy", "version": "2.4.0", "vulns": []}
_SICK = {"name": "pillow", "version": "1.0", "vulns": [{"id": "CVE-1", "fix_versions": ["1.1", "2.0"]}]}
_UNKNOWN = {"name": "torch", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("answer", "status", "expected"),
    [
        ({"dependencies": [_CLEAN, _UNKNOWN]}, 0, "audit: 1 of 2 packages could be asked about; 0 known"),
        ({"dependencies": [_CLEAN, _SICK]}, 1, "pillow 1.0: CVE-1, corrected in 1.1, 2.0\naudit: 2 of 2 packages"),
        (None, 0, "audit: the database did not answer (no route to host); nothing is known"),
    ],
)
def test_an_audit_fails_for_known_vulnerabilities_alone(
    answer: dict | None, status: int, expected: str, tmp_path: Path
) -> None:
    says = "echo no route to host >&2; exit 1" if answer is None else f"echo '{json.dumps(answer)}'; exit 1"
    programs = {"pip": "exit 0", "pip-audit": says, "python": f'exec {sys.executable} "$@"'}
    (tmp_path / "audit/bin").mkdir(parents=True)
    for name, text in programs.items():
        (tmp_path / "audit/bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "audit/bin" / name).chmod(0o755)
    found, said = run(tmp_path)
    assert (found, said[: len(expected)]) == (status, expected)


def test_an_audit_without_its_tool_says_that_nothing_was_asked(tmp_path: Path) -> None:
    (tmp_path / "no_python").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "no_python").chmod(0o755)
    assert run(tmp_path, PYTHON=str(tmp_path / "no_python")) == (
        0,
        "audit: pip-audit cannot be installed; nothing was asked",
    )


def run(cache: Path, **variables: str) -> tuple[int, str]:
    """The status, and what is said."""
    environment = os.environ | {"VLA_RL_CACHE": str(cache)} | variables
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/audit.sh")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.strip()
