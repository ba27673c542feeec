"""The code of docs/tutorials/from_nothing.md and docs/demonstrations.md runs as it stands there, with fewer steps."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from envs import env_spec
from envs.base.config import DemosConfig
from envs.base.demonstrations import demonstrations_for
from tests import ROOT
from tests.tutorials.test_tutorials import blocks
from vla_rl import load_config

FEWER = ["sft.updates=4", "train.iterations=1", "train.batch_episodes=4", "train.eval_episodes=4"]


def run(folder: Path, *command: str) -> str:
    """In a process of its own, as a user would: from the folder of the files, which is not on the path."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_from_nothing_to_a_trained_policy(tmp_path: Path) -> None:
    for language in ("python", "yaml"):
        for text in blocks("tutorials/from_nothing.md", language):
            name = re.match(r"# file: (\S+)\n", text)
            assert name is not None
            (tmp_path / name[1]).write_text(text.replace("range(50)", "range(6)"))
    lines = "".join(blocks("tutorials/from_nothing.md", "bash")).splitlines()
    shown = []
    for line in lines:
        program, *words = shlex.split(line, comments=True)
        words = [re.sub("^runs/NAME", str(next(tmp_path.glob("runs/*"), "")), word) for word in words]
        if program == "python":
            shown.append(run(tmp_path, sys.executable, *words))
        else:
            fewer = FEWER if words[0] in ("train", "sft") else []
            words = ["4" if word == "200" else word for word in words]
            shown.append(run(tmp_path, sys.executable, "-m", "vla_rl.commands.cli", *words, *fewer))
    recorded, inspected, _, cloned, _, improved = shown
    assert "6 demonstrations" in recorded
    assert "nothing looks wrong" in inspected
    assert "speed" in inspected
    assert all("greedy success" in text and "4)" in text for text in (cloned, improved))


def test_the_page_of_demonstrations_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("demonstrations.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    exec(compile(code, str(ROOT / "docs/demonstrations.md"), "exec"), {})
    spec = env_spec(load_config("tabletop").env)
    assert demonstrations_for(spec, [tmp_path / "my_demos"], DemosConfig()).num_demonstrations == 3
