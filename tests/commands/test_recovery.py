"""A run goes on after a failure: from where, how often, and what is said when it is over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from vla_rl.cluster.calls import ProcessDied, ProcessFailed
from vla_rl.commands import recovery as recovery_module
from vla_rl.commands.recovery import Recovery
from vla_rl.commands.run_folder import RunFolder
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import RunError, StallError, UserError
from vla_rl.replay.trajectory_file import save_trajectories

DIED = ProcessDied("a process died while the run waited for the learner's update: it was killed")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that recoveries sleep; other threads of this process go on sleeping."""
    found: list[float] = []
    clock = SimpleNamespace(**vars(time) | {"sleep": found.append})
    monkeypatch.setattr(recovery_module, "time", clock)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with metrics of the iterations 1 to 5, and checkpoints of 2 and 4."""
    run = RunFolder(tmp_path, RunConfig())
    for iteration in range(1, 6):
        run.log(iteration, {})
    for iteration in (2, 4):
        with run.checkpoints.write(iteration) as partial:
            (partial / "state.json").write_text(json.dumps({"policy_version": iteration, "seconds": 1.0, "store": {}}))
            save_trajectories(partial / "trajectories.npz", [])
    return run


@pytest.fixture
def make(folder: RunFolder, waits: list[float]) -> Callable[..., tuple[Recovery, list[str]]]:
    def of(restarts: int = 3) -> tuple[Recovery, list[str]]:
        said: list[str] = []
        config = RunConfig.model_validate({"train": {"restarts": restarts}})
        return Recovery(config, folder, 10.0, said.append), said

    return of


@pytest.mark.parametrize(
    "error", [DIED, StallError("waited 60 s"), ProcessFailed("out of memory"), OSError("no space")]
)
def test_a_run_goes_on_from_its_newest_checkpoint(make: Callable, folder: RunFolder, error: Exception) -> None:
    recovery, said = make()
    start = recovery.start_after(error)
    assert start.checkpoint == folder.checkpoints.of(4)
    assert start.state["policy_version"] == 4
    assert start.state["seconds"] >= 10.0, "the clock of the run does not go back"
    assert [record["iteration"] for record in folder.metrics()] == [1, 2, 3, 4]
    assert said == [f"the run is restarted from its newest checkpoint: {error}"]
    assert recovery.restarts == 1


def test_a_damaged_checkpoint_is_passed_over(make: Callable, folder: RunFolder) -> None:
    (folder.checkpoints.of(4) / "trajectories.npz").write_bytes(b"PK")
    recovery, said = make()
    assert recovery.start_after(DIED).checkpoint == folder.checkpoints.of(2)
    assert "trajectories.npz is damaged" in said[-1]
    assert [record["iteration"] for record in folder.metrics()] == [1, 2]
    assert [path.name for path in folder.checkpoints.complete()] == ["000002"], "the other is set aside"


def test_without_a_checkpoint_it_begins_again(tmp_path: Path, make: Callable, folder: RunFolder) -> None:
    (folder.path / "checkpoints").rename(tmp_path / "elsewhere")
    start = make()[0].start_after(DIED)
    assert (start.checkpoint, start.state["policy_version"]) == (None, 0)
    assert folder.metrics() == []


def test_what_keeps_coming_ends_the_run_with_the_first_cause(make: Callable, waits: list[float]) -> None:
    recovery, _ = make(restarts=3)
    recovery.start_after(ProcessFailed("CUDA out of memory"))
    for _ in range(2):
        recovery.start_after(UserError("shared memory is full"))  # what the restart itself finds
    with pytest.raises(RunError) as caught:
        recovery.start_after(StallError("waited 600 s for the learner"))
    first, *rest = str(caught.value).splitlines()
    assert first == "CUDA out of memory"
    assert "restarted 3 times within an hour" in rest[1]
    assert "waited 600 s" in rest[-1]
    assert waits == [1.0, 4.0], "it waits longer and longer if there was no update in between"


def test_failures_far_apart_do_not_add_up(make: Callable, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    recovery, _ = make(restarts=1)
    clock = iter(range(0, 10**9, 4000))
    monkeypatch.setattr(recovery_module.time, "monotonic", lambda: float(next(clock)))
    for iteration in range(6, 16):
        folder.log(iteration, {})
        recovery.start_after(DIED)
    assert recovery.restarts == 10


def test_what_is_wrong_from_the_beginning_is_for_the_user(tmp_path: Path, make: Callable) -> None:
    new = Recovery(RunConfig(), RunFolder(tmp_path / "new", RunConfig()), 0.0, print)
    for error in (ProcessFailed("out of memory"), UserError("shared memory"), OSError("no space")):
        with pytest.raises(type(error), match=str(error)):
            new.start_after(error)
    with pytest.raises(RunError, match="diverged"):
        make()[0].start_after(RunError("training has diverged"))
    with pytest.raises(ProcessDied):
        make(restarts=0)[0].start_after(DIED)
