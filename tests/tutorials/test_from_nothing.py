"""docs/tutorials/from_nothing.md and docs/demonstrations.md: their code runs as it stands there, with smaller numbers."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.tutorials.test_tutorials import blocks

FEWER = "train.iterations=1 train.batch_episodes=4 train.eval_episodes=4 sft.updates=4 placement.envs_per_worker=4".split()


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
    from envs.base.demonstrations import read_demonstrations
    from envs.tabletop.config import TabletopConfig
    from envs.tabletop.env import env_spec

    monkeypatch.chdir(tmp_path)
    (code,) = blocks("demonstrations.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    exec(compile(code, str(ROOT / "docs/demonstrations.md"), "exec"), {})
    spec = env_spec(TabletopConfig())
    read = read_demonstrations(
        [tmp_path / "my_demos"], instructions=spec.instructions, views=spec.views, image_size=64, proprio=spec.proprio_dim
    )
    assert read.num_demonstrations == 3
