"""The code of docs/tutorials/from_nothing.md and docs/demonstrations.md runs as it stands there, with fewer steps."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from envs import env_spec
from envs.base.config import DemosConfig
from envs.base.demonstrations import demonstrations_for
from tests import ROOT
from tests.tutorials.test_tutorials import blocks
from vla_rl import load_config
from vla_rl.commands.cli import main

FEWER = ["sft.updates=4", "train.iterations=1", "train.batch_episodes=4", "train.eval_episodes=0"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)  # six commands
def test_from_nothing_to_a_trained_policy(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for language in ("python", "yaml"):
        for text in blocks("tutorials/from_nothing.md", language):
            name = re.match(r"# file: (\S+)\n", text)
            assert name is not None
            (here / name[1]).write_text(text)
    shown = []
    for line in "".join(blocks("tutorials/from_nothing.md", "bash")).splitlines():
        program, *words = shlex.split(line)
        if program == "python":
            code = (here / words[0]).read_text().replace("range(50)", "range(6)")
            exec(compile(code, words[0], "exec"), {})
        else:
            run = str(next(here.glob("runs/*"), ""))
            words = ["2" if word == "200" else word.replace("runs/NAME", run) for word in words]
            assert main(words + FEWER * (words[0] in ("train", "sft"))) == 0
        shown.append(capsys.readouterr().out)
    recorded, inspected, _, cloned, _, improved = shown
    assert "6 demonstrations" in recorded
    assert "nothing looks wrong" in inspected
    assert "camera is observation.images.image" in inspected
    assert all(re.search(r"greedy success .*/2\D", text.replace(", ", "/")) for text in (cloned, improved))


def test_the_page_of_demonstrations_records(here: Path) -> None:
    (code,) = blocks("demonstrations.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    exec(compile(code, str(ROOT / "docs/demonstrations.md"), "exec"), {})
    spec = env_spec(load_config("tabletop").env)
    assert demonstrations_for(spec, [here / "my_demos"], DemosConfig()).num_demonstrations == 3
