"""`vla-rl eval --suite`: the folder that continues, mistakes, and a whole evaluation that was killed in its middle."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from envs.base import NothingPlayable
from envs.libero.config import LiberoConfig
from envs.tabletop.config import TabletopConfig
from envs.tabletop.env import env_spec
from tests import ROOT
from tests.commands.test_run_folder import contents
from vla_rl.commands import evaluate_suites
from vla_rl.commands.cli import main
from vla_rl.commands.evaluate_suites import _separation
from vla_rl.commands.evaluation_folder import EvaluationFolder
from vla_rl.config.loading import dump_config, load_config
from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec

COMMAND = ["eval", str(ROOT / "checkpoints/tabletop_reach"), "--config", str(ROOT / "configs/tabletop.yaml")]


def test_suites_select_all_tasks() -> None:
    suites = LiberoConfig.suites()
    assert list(suites) == ["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"]
    assert suites["libero_90"] == {"suite": "libero_90", "tasks": ()}
    spec = env_spec(TabletopConfig(**TabletopConfig.suites()["push"]))
    assert all(instruction.startswith("push") for instruction in spec.instructions)


def test_tasks_are_drawn_evenly() -> None:
    spec = replace(env_spec(TabletopConfig()), instructions=tuple("abcdefgh"))
    assert evaluate_suites._tasks(spec, "reach", None, 3) == [0, 2, 5]
    assert evaluate_suites._tasks(spec, "reach", None, 20) == list(range(8))
    assert evaluate_suites._tasks(spec, "reach", "7,1", 3) == [1, 7]


def test_of_a_pattern_suites_that_cannot_be_played_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = env_spec(TabletopConfig())

    def spec_of(_: object, suite: str) -> EnvSpec:
        if suite == "p/light":
            raise NothingPlayable("p/light: no scene")
        return spec

    monkeypatch.setattr(evaluate_suites, "_spec_of", spec_of)
    config = load_config(ROOT / "configs/tabletop.yaml")
    found = evaluate_suites._specs(config, ["p/camera", "p/light"], "p/*")
    assert found == ({"p/camera": spec}, ["Left out: p/light: no scene"])
    with pytest.raises(UserError, match="no scene"):
        evaluate_suites._specs(config, ["p/camera", "p/light"], "p/camera,p/light")
    with pytest.raises(UserError, match="no scene"):
        evaluate_suites._specs(config, ["p/light"], "p/*")


def test_films_of_a_suite_that_is_a_folder_stay_inside(tmp_path: Path) -> None:
    folder = EvaluationFolder.open(tmp_path / "out", {})
    film = folder.video("/somewhere/bddl", 1, 0, "success")
    assert film.parent == tmp_path / "out/videos/somewhere-bddl"
    film.touch()
    assert folder.filmed("/somewhere/bddl", 1, 0)
    folder.close()


def test_a_folder_continues_and_drops_a_line_that_was_cut_off(tmp_path: Path) -> None:
    folder = EvaluationFolder.open(tmp_path / "out", {"seed": 0, "tasks": (1, 2)})
    row = {"suite": "reach", "task": 1, "trial": 4, "success": True, "failure": None, "steps": 3, "instruction": "x"}
    folder.begin()
    folder.add(row)
    with pytest.raises(UserError, match=r"is in use by process"):
        EvaluationFolder.open(tmp_path / "out", {"seed": 0, "tasks": (1, 2)})
    folder.close()
    with (tmp_path / "out/episodes.jsonl").open("a") as file:
        file.write('{"suite": "rea')
    again = EvaluationFolder.open(tmp_path / "out", {"seed": 0, "tasks": (1, 2)})
    assert again.rows == [row]
    again.begin()
    again.add(row | {"trial": 5})
    again.add(row | {"trial": 6, "success": False, "failure": "set_aside"})
    assert again.played("reach") == {(1, 4), (1, 5), (1, 6)}
    again.video("reach", 1, 4, "success").touch()
    assert again.filmed("reach", 1, 4)
    assert not again.filmed("reach", 1, 5)
    again.close()
    with pytest.raises(UserError, match=r"another protocol \(seed differ\): name a new folder with --output"):
        EvaluationFolder.open(tmp_path / "out", {"seed": 1, "tasks": (1, 2)})
    once_more = EvaluationFolder.open(tmp_path / "out", {"seed": 0, "tasks": (1, 2)})
    once_more.begin()
    once_more.close()
    assert once_more.played("reach") == {(1, 4), (1, 5)}, "what was set aside is played again"
    assert len((tmp_path / "out/episodes.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("protocol.json", "{", r"protocol.json is damaged \(.*\): name a new folder with --output"),
        ("protocol.json", "[]", r"protocol.json is damaged \(it is no mapping\)"),
        ("episodes.jsonl", "{\n", r"episodes.jsonl is damaged: line 1 is no finished episode; remove the line"),
        ("episodes.jsonl", '{"suite": "reach"}\n', "line 1 is no finished episode"),
        ("episodes.jsonl", "3\n", "line 1 is no finished episode"),
    ],
)
def test_a_damaged_folder_is_one_clear_error_and_is_not_kept_locked(
    tmp_path: Path, name: str, content: str, expected: str
) -> None:
    EvaluationFolder.open(tmp_path, {"seed": 0}).close()
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=expected):
        EvaluationFolder.open(tmp_path, {"seed": 0})
    (tmp_path / name).unlink()
    EvaluationFolder.open(tmp_path, {"seed": 0}).close()


def test_an_evaluation_that_does_not_start_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refusing(*_: object) -> Iterator[None]:
        raise UserError("the policy cannot be built")
        yield

    monkeypatch.setattr(evaluate_suites, "evaluation_cluster", refusing)
    command = [*COMMAND, "--suite", "reach", "--per-task", "1", "--output"]
    assert main([*command, str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(evaluate_suites, "_play_suite", lambda *arguments: arguments[4].begin())
    assert main([*command, str(tmp_path / "out")]) == 0
    monkeypatch.undo()
    monkeypatch.setattr(evaluate_suites, "evaluation_cluster", refusing)
    row = {"suite": "reach", "task": 0, "trial": 0, "success": False, "failure": "set_aside", "steps": 3}
    with (tmp_path / "out/episodes.jsonl").open("a") as file:
        file.write(json.dumps(row | {"instruction": "x"}) + '\n{"suite": "rea')
    before = contents(tmp_path)
    for more in ([], ["--per-task", "2"], ["seed=1"]):
        assert main([*command, str(tmp_path / "out"), *more]) == 2
        assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("start_states", "expected"),
    [("sampled", "never saw the benchmark's initial states"), ("benchmark", "trained and tested on the same states")],
)
def test_results_say_whether_training_saw_the_test_states(tmp_path: Path, start_states: str, expected: str) -> None:
    policy = tmp_path / "run/checkpoints/000004/policy"
    policy.mkdir(parents=True)
    assert "not known here" in _separation(policy)
    config = load_config(None, ["env=tabletop", f"train.start_states={start_states}"])
    (tmp_path / "run/config.yaml").write_text(dump_config(config))
    for target in (tmp_path / "run", policy.parent, policy):
        assert expected in _separation(target)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--suite", "reach,pull"], "has no suite 'pull': use reach, push, pick_place, all"),
        (["--suite", "reach", "--tasks", "0,4"], "--tasks 0,4: reach has the tasks 0..3"),
        (["--suite", "reach", "--tasks", "x"], "--tasks x: write numbers, such as 0,3"),
        (["--suite", "reach", "--episodes", "9"], "with --suite, use --per-task and --videos"),
        (["--suite", "reach", "--failures", "2"], "with --suite, use --per-task and --videos"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *arguments, "--output", str(tmp_path / "out")]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_evaluation_that_was_killed_loses_the_episodes_under_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, lines = tmp_path / "out", tmp_path / "out/episodes.jsonl"
    command = [*COMMAND, "--suite", "reach,push", "--tasks", "0,2", "--per-task", "4", "--output", str(out)]
    slowly = ["env.latency_ms=15", "placement.env_workers=1"]
    process = subprocess.Popen([sys.executable, "-m", "vla_rl.commands.cli", *command, *slowly], cwd=ROOT)
    deadline = time.monotonic() + 120
    while not lines.exists() or len(lines.read_text().splitlines()) < 4:
        assert process.poll() is None, "it ended early"
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = lines.read_text()
    assert 4 <= len(before.splitlines()) < 16
    assert main([*command, *slowly]) == 0
    assert lines.read_text().startswith(before[: before.rindex("\n") + 1]), "finished episodes are kept"
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    keys = [(row["suite"], row["task"], row["trial"]) for row in rows]
    assert sorted(keys) == [(s, t, i) for s in ("push", "reach") for t in (0, 2) for i in range(4)], "each exactly once"
    results = json.loads((out / "results.json").read_text())
    assert results["complete"]
    assert [suite["episodes"] for suite in results["suites"]] == [8, 8]
    assert results["suites"][1]["success"] == 0.0, "it has learned to reach, not to push"
    assert "| push | 8 | 0.0% | 0.0% to 32.4% |" in (out / "results.md").read_text()
    films = sorted(path.relative_to(out / "videos").as_posix() for path in out.glob("videos/*/*.mp4"))
    assert len(films) == 4, "one a task"
    assert all(re.fullmatch(r"(reach|push)/task0[02]-trial0\d-(failure-\w+|success)\.mp4", film) for film in films)
    assert "results:" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*command, "--videos", "x"])
    assert main([*command, *slowly, "seed=1"]) == 2, "another protocol"
