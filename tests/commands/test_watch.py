"""`vla-rl watch`: a run by its folder."""

import json
import re
import threading
import time
from pathlib import Path

import pytest

from vla_rl.commands import watch
from vla_rl.commands.cli import main
from vla_rl.config.loading import dump_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.file_lock import FileLock


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = RunConfig.model_validate({"env": {"name": "workload"}, "train": {"iterations": 4}})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    (tmp_path / "metadata.json").write_text(json.dumps({"simulator": "workload of 1 ms"}))
    return tmp_path


def log(run: Path, *iterations: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        for iteration in iterations:
            record = {"iteration": iteration, "time": time.time() - 60, "rollout/success_played": iteration / 8}
            file.write(json.dumps(record | {"learner/update_kl": None}) + "\n")


def test_once_is_one_panel_of_what_the_folder_has(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = FileLock.acquire(run / "lock")
    assert lock is not None
    before = {path: path.read_bytes() for path in run.iterdir()}
    assert main(["watch", str(run), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "PPO on workload of 1 ms, async" in shown
    assert "iteration 0/4 (0 %)" in shown
    assert "running, no figures yet: process" in shown
    assert {path: path.read_bytes() for path in run.iterdir()} == before, "nothing is written"
    log(run, 1, 2)
    main(["watch", str(run), "--once"])
    assert re.search(r"running, figures of 6\d s ago: process", shown := capsys.readouterr().out)
    assert "success of the rollouts 25.0 %" in shown
    lock.release()
    main(["watch", str(run), "--once"])
    assert f"not running, and not complete: vla-rl train --resume {run}" in capsys.readouterr().out.replace("\n", "")
    log(run, 3, 4)
    main(["watch", str(run), "--once"])
    assert "complete" in (shown := capsys.readouterr().out)
    assert "▃▅▇█" in shown
    assert not FileLock.is_held(run / "lock")


def test_it_follows_a_run_to_its_end(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_POLL_S", 0.02)
    lock = FileLock.acquire(run / "lock")
    assert lock is not None
    assert FileLock.is_held(run / "lock")
    log(run, 1, 2)
    watcher = threading.Thread(target=main, args=(["watch", str(run)],))
    watcher.start()
    shown, deadline = "", time.monotonic() + 20.0
    while "iteration 2/4" not in shown and time.monotonic() < deadline:
        time.sleep(0.02)
        shown += capsys.readouterr().out
    assert watcher.is_alive()
    (run / "new").write_text((run / "metrics.jsonl").read_text().splitlines()[0] + "\n")
    (run / "new").replace(run / "metrics.jsonl")  # a restart from iteration 1
    log(run, 2, 3, 4)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "rollout')  # is being written
    time.sleep(0.1)
    lock.release()
    watcher.join(10.0)
    assert not watcher.is_alive()
    lines = (shown + capsys.readouterr().out).splitlines()
    assert [line.split(" | ")[0] for line in lines] == [
        *(f"iteration {i}/4 ({25 * i} %)" for i in (1, 2, 1, 2, 3, 4)),
        "complete",
    ]
    assert lines[-2].endswith("success 50.0 %")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (None, "", "no run folder"),
        ("config.yaml", "train: {}", "is not the config of a run"),
        ("metrics.jsonl", "{\n", "metrics.jsonl:1 is not JSON"),
    ],
)
def test_what_is_no_run_is_one_clear_error(
    run: Path, name: str | None, content: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name:
        (run / name).write_text(content)
    assert main(["watch", str(run if name else run / "none"), "--once"]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.startswith("vla-rl watch: error: ")
