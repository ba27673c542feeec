"""The best iteration of a run: how it is found, kept, and what ends a run that no longer improves."""

import contextlib
import json
import math
import os
import shutil
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from tests import ROOT
from tests.learner.learner_tools import SPEC, random_batch
from tests.runtime_fakes import limited_files
from vla_rl.cluster.deadlines import Deadlines
from vla_rl.cluster.disks import Disks, Part
from vla_rl.commands import train as train_module
from vla_rl.commands import trainer as trainer_module
from vla_rl.commands.checkpoints import Checkpoints, read_state
from vla_rl.commands.divergence import DivergenceGuard
from vla_rl.commands.run_folder import RunFolder
from vla_rl.commands.saving import Saving
from vla_rl.commands.short_run import short_run
from vla_rl.commands.train import main_loop
from vla_rl.commands.trainer import Trainer
from vla_rl.config.loading import dump_config, load_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import RunError, UserError
from vla_rl.core.file_lock import FileLock
from vla_rl.core.files import measure_file, write_json
from vla_rl.core.ipc.publication import publication
from vla_rl.core.postponed import Written
from vla_rl.observability.plots import draw_curves

EMPTY = {"bytes": 0, "crc32": 0}  # a file


def run_folder(path: Path, evaluations: dict[int, float], **train: int) -> RunFolder:
    path.mkdir(exist_ok=True)
    folder = RunFolder(path, RunConfig.model_validate({"train": train, "log": {"tensorboard": False}}))
    for iteration in range(max(evaluations, default=0) + 1):
        metrics = {"eval/greedy_success": evaluations[iteration]} if iteration in evaluations else {}
        folder.log(iteration, metrics)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("evaluations", "best", "since"),
    [
        ({}, None, 0),
        ({0: 0.5}, 0, 0),
        ({0: 0.5, 2: 0.4, 4: 0.3}, 0, 2),
        ({0: 0.1, 2: 0.8, 4: 0.3}, 2, 1),
        ({0: 0.1, 2: 0.8, 4: 0.3, 6: 0.8}, 6, 0),
    ],
)
def test_the_best_iteration_is_the_last_with_the_highest_success(
    tmp_path: Path, evaluations: dict[int, float], best: int | None, since: int
) -> None:
    folder = run_folder(tmp_path, evaluations)
    assert (folder.best_iteration(), folder.evaluations_since_best()) == (best, since)


def test_the_best_checkpoint_is_kept_besides_the_newest(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, {0: 0.1, 2: 0.9, 8: 0.2}, keep_checkpoints=2)
    with pytest.raises(UserError, match="no complete checkpoint of iteration 2; there are: none"):
        folder.best_checkpoint()
    for iteration in (2, 4, 6, 8):
        with folder.checkpoints.write(iteration, folder.best_iteration()) as partial:
            (partial / "state.json").write_text("{}")
    assert [path.name for path in folder.checkpoints.complete()] == ["000002", "000006", "000008"]
    assert folder.best_checkpoint().name == "000002"


def test_a_run_without_evaluations_has_no_best_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no evaluation by which to choose"):
        run_folder(tmp_path, {}).best_checkpoint()


def test_a_run_that_no_longer_improves_ends_with_a_checkpoint(tmp_path: Path) -> None:
    trainer = MagicMock(config=RunConfig(), policy_version=1, diverges=False)
    trainer.stop.requested = trainer.is_last.return_value = trainer.due.return_value = False
    trainer.improved.return_value = trainer.propose_migration.return_value = False
    trainer.has_converged.side_effect = [False, False, True]
    assert main_loop(trainer) is False
    assert trainer.update.call_count == 3
    trainer.checkpoint.assert_called_once()
    trainer.finish.assert_called_once()
    for patience, converged in ((0, False), (1, True), (2, True), (3, False)):
        folder = run_folder(tmp_path / str(patience), {0: 0.5, 2: 0.4, 4: 0.3}, patience=patience)
        assert Trainer.has_converged(MagicMock(config=folder.config, folder=folder)) == converged


def test_resuming_an_earlier_iteration_sets_later_ones_aside(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, {0: 0.1, 2: 0.9, 8: 0.95}, keep_checkpoints=4)
    for iteration in (2, 4, 6, 8):
        with folder.checkpoints.write(iteration) as partial:
            (partial / "state.json").write_text(json.dumps({"policy_version": iteration, "seconds": 0, "store": {}}))
    (tmp_path / "lock").write_text("process 1 on another host")
    before = contents(tmp_path)
    for iteration in (4, None, 7):  # asked for, and given up
        with contextlib.suppress(UserError):
            refused, checkpoint = RunFolder.reopen(tmp_path, folder.config, iteration)
            assert refused.go_back(print) == checkpoint, "a failure at the start changes nothing"
            refused.close()
    assert contents(tmp_path) == before
    resumed, checkpoint = RunFolder.reopen(tmp_path, folder.config, 4)
    resumed.begin()
    assert checkpoint.name == "000004"
    assert resumed.checkpoints.newest().name == "000004"
    assert [record["iteration"] for record in resumed.metrics()] == [0, 1, 2, 3, 4]
    assert resumed.best_iteration() == 2
    aside = tmp_path / "checkpoints/after-000004"
    assert [(path.name, read_state(path)["policy_version"]) for path in sorted(aside.iterdir())] == [
        ("000006", 6),
        ("000008", 8),
    ]


def test_a_resume_that_is_killed_while_it_begins_loses_no_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was done by then, the newest checkpoint has all metrics up to it, and the config is a whole one."""
    config = run_folder(tmp_path, {0: 0.1, 8: 0.95}).config
    (tmp_path / "config.yaml").write_text(dump_config(config))
    for iteration in (4, 8):
        with Checkpoints(tmp_path / "checkpoints", 4).write(iteration) as partial:
            (partial / "state.json").write_text(json.dumps({"policy_version": iteration, "seconds": 0, "store": {}}))
    original = tmp_path.with_name("original")
    shutil.copytree(tmp_path, original)
    for steps in count():
        shutil.rmtree(tmp_path)
        shutil.copytree(original, tmp_path)
        with monkeypatch.context() as patch:
            left = iter(range(steps))

            def renamed(path: Path, target: Path, left=left, rename=Path.rename, replace=Path.replace) -> Path:
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return (rename if path.is_dir() else replace)(path, target)

            patch.setattr(Path, "rename", renamed)
            patch.setattr(Path, "replace", renamed)
            begun, _ = RunFolder.reopen(tmp_path, config.with_values({"seed": 7}), 4)
            try:
                begun.begin()
                ended = True
            except KeyboardInterrupt:
                ended = False
            begun.close()
        again, checkpoint = RunFolder.reopen(tmp_path, config)
        assert checkpoint is not None
        iterations = [record["iteration"] for record in again.metrics()]
        assert iterations[: int(checkpoint.name) + 1] == list(range(int(checkpoint.name) + 1)), steps
        assert load_config(tmp_path / "config.yaml").seed == (7 if ended else 0)
        again.close()
        if ended:
            break
    assert steps == 3, "the checkpoint, the metrics, the config"


def test_two_processes_do_not_continue_one_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, {0: 0.1})
    with folder.checkpoints.write(4) as partial:
        (partial / "state.json").write_text(json.dumps({"policy_version": 4, "seconds": 0, "store": {}}))
    (tmp_path / "checkpoints/.000008.1.partial").mkdir()
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations/.x.json.2.partial").write_text("")
    first, _ = RunFolder.reopen(tmp_path, folder.config)
    first.begin()
    assert not list(tmp_path.rglob(".*")), "what killed processes have left"
    metrics = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "checkpoints/.000008.3.partial").mkdir()  # the first is writing it
    with pytest.raises(UserError, match=rf"is in use by process {os.getpid()} on .*; wait for its end, or stop it"):
        RunFolder.reopen(tmp_path, folder.config)
    assert (tmp_path / "metrics.jsonl").read_text() == metrics
    assert (tmp_path / "checkpoints/.000008.3.partial").exists()
    first.close()
    with pytest.raises(UserError, match="no complete checkpoint of iteration 7; there are: 4"):
        RunFolder.reopen(tmp_path, folder.config, 7)
    RunFolder.reopen(tmp_path, folder.config)[0].close()


def test_a_folder_that_is_somebody_elses_is_neither_taken_nor_removed(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"log": {"dir": str(tmp_path), "name": "run", "tensorboard": False}})
    (tmp_path / "run").mkdir()
    lock = FileLock.acquire(tmp_path / "run/lock")  # another command that is just starting
    assert lock is not None
    (tmp_path / "run/metadata.json").write_text("{}")
    with pytest.raises(UserError, match="is in use by process"):
        RunFolder.create(config, SPEC, ["vla-rl"])
    assert (tmp_path / "run/metadata.json").is_file()
    (tmp_path / "run/episodes.jsonl").write_text("")  # of an evaluation
    with pytest.raises(UserError, match=r"exists; continue that run with --resume .*, or choose another name"):
        RunFolder.create(config, SPEC, ["vla-rl"])
    assert (tmp_path / "run/episodes.jsonl").is_file()
    lock.release()


def test_a_picture_that_cannot_be_drawn_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = run_folder(tmp_path, {0: 0.1})
    (tmp_path / "curves.png").write_text("older")
    trainer = MagicMock(config=folder.config, folder=folder, policy_version=100)
    with limited_files(100):
        Trainer.finish(trainer)
    assert "curves.png failed (OSError" in caplog.text
    assert (tmp_path / "curves.png").read_text() == "older"
    assert "results: " in trainer.view.say.call_args.args[0]
    with pytest.raises(UserError, match=r"curves.nothing: cannot be drawn .*; name a .png file"):
        draw_curves(folder.metrics(), tmp_path / "curves.nothing", "run")


def test_a_run_is_reported_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(config: RunConfig, spec: object, folder: RunFolder, *rest: object) -> None:
        folder.log(0, {"eval/greedy_success": 0.5})
        raise KeyboardInterrupt

    monkeypatch.setattr(train_module, "_run", interrupted)
    monkeypatch.setattr(train_module, "sweep_leftovers", lambda: None)
    for name, temporary in (("one", False), ("other", True)):
        overrides = [f"log.dir={tmp_path}", f"log.name={name}", "log.tensorboard=false"]
        with pytest.raises(KeyboardInterrupt):
            train_module.run_training(load_config(ROOT / "configs/tabletop.yaml", overrides), temporary=temporary)
    assert capsys.readouterr().out == f"report: {tmp_path / 'one/report.html'}\n"
    assert "stopped; it continues with" in (tmp_path / "one/report.html").read_text(), "its folder is free again"
    assert not (tmp_path / "other/report.html").exists()


def test_a_short_run_adds_nothing_to_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[RunConfig] = []
    monkeypatch.setattr(train_module, "run_training", lambda config, callbacks, temporary: trained.append(config))
    with pytest.raises(UserError), short_run(RunConfig.model_validate({"log": {"dataset": "data"}}), 1):
        pass
    assert [config.log.dataset for config in trained] == [None]


def test_a_run_ends_with_what_looks_wrong(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, {})
    for iteration in range(1, 31):
        folder.log(iteration, {"rollout/return": 0.0, "rollout/success": 0.0, "rollout/episodes": 16.0})
    trainer = MagicMock(config=folder.config, folder=folder, policy_version=30)
    Trainer.finish(trainer)
    said = [call.args[0] for call in trainer.view.say.call_args_list]
    assert said[-3].startswith("why: No episode has had a reward. All of 480 episodes")
    assert said[-1].startswith("results: ")


def test_a_run_that_has_logged_nothing_leaves_no_folder(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"log": {"dir": str(tmp_path), "name": "run", "tensorboard": False}})
    RunFolder.create(config, SPEC, ["vla-rl"]).close()
    assert not (tmp_path / "run").exists()
    stopped = RunFolder.create(config, SPEC, ["vla-rl"])  # before its first update, with a checkpoint to go on from
    (stopped.path / "checkpoints/000000").mkdir(parents=True)
    stopped.close()
    assert stopped.path.exists()
    shutil.rmtree(stopped.path)
    run = RunFolder.create(config, SPEC, ["vla-rl"])
    run.log(0, {})
    run.close()
    assert (tmp_path / "run/metrics.jsonl").exists()


# --- numbers that are not finite ------------------------------------------------------------------------------------


def test_metrics_are_json_whatever_their_values(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, {})
    folder.log(1, {"learner/policy_loss": float("nan"), "learner/grad_norm": float("inf"), "restarts": 2.0})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(line, parse_constant=refuse)["learner/policy_loss"] is None
    last = folder.metrics()[-1]
    assert last["restarts"] == 2.0
    assert not last.keys() & {"learner/policy_loss", "learner/grad_norm"}, "readers find no number where there is none"


def test_several_updates_in_a_row_that_are_not_finite_end_the_run_with_evidence(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run/checkpoints", keep=2)
    guard = DivergenceGuard(tmp_path / "run", 3, checkpoints)
    bad, good = {"learner/skipped_steps": 2, "learner/policy_loss": math.nan}, {"learner/skipped_steps": 0}
    for version, metrics in enumerate((good, bad, bad, good, bad, bad)):
        guard.observe(metrics, random_batch(policy_version=version))
    assert guard.in_a_row == 2
    batch = random_batch(policy_version=6)
    rewards = batch.rewards.copy()
    rewards[3, 1] = math.inf
    with pytest.raises(RunError) as caught:
        guard.observe(bad, replace(batch, rewards=rewards))
    for part in ("3 updates in a row", "iteration 7", "rewards in row 3", "no checkpoint to continue from"):
        assert part in str(caught.value)
    for iteration in (2, 4):
        with checkpoints.write(iteration):
            pass
    with pytest.raises(RunError, match=rf"--resume {tmp_path}/run@4 \(there are: 2, 4\)"):
        guard.observe(bad, random_batch(policy_version=7))
    evidence = tmp_path / "run/not_finite"
    assert sorted(path.name for path in evidence.glob("*.json")) == [f"{n:06d}.json" for n in (2, 3, 5, 6, 7, 8)]
    about = json.loads((evidence / "000007.json").read_text())
    assert about == {"metrics": {"learner/skipped_steps": 2, "learner/policy_loss": None}, "not_finite": {"rewards": 3}}
    dumps = sorted(evidence.glob("*.npz"))
    assert len(dumps) == 3, "they are large"
    with np.load(dumps[0]) as data:
        assert np.array_equal(data["record.tokens"], random_batch(policy_version=1).record["tokens"])


@pytest.mark.parametrize("ema", [None, 0.9])
def test_an_evaluation_is_of_the_average_and_training_goes_on_with_the_weights(
    ema: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a version, the average is published first: servers tell newer from older by the number of a publication."""
    trainer = MagicMock(config=RunConfig().with_values({"learner.ema": ema}), policy_version=4, diverges=False)
    trainer.stop.requested = False
    trainer.is_last.side_effect = [False, False, True]
    trainer.due.side_effect = lambda every: every == trainer.config.publish_every
    trainer.has_converged.return_value = trainer.propose_migration.return_value = False
    events: list[Any] = []
    trainer.cluster.publish.side_effect = lambda version, average: events.append(publication(version, average=average))
    trainer.ask_store.side_effect = lambda method, version: events.append((method, version))
    trainer.publish = partial(Trainer.publish, trainer)
    trainer.evaluate = partial(Trainer.evaluate, trainer)
    trainer.measure.return_value = {}
    monkeypatch.setattr(trainer_module, "run_evaluations", lambda *_, **__: events.append("evaluation") or [])
    main_loop(trainer)
    before = [9, ("advance", 4)]
    assert events == [*before, *([8, ("advance", 4), "evaluation", 9] if ema else [*before, "evaluation"])]


@pytest.mark.parametrize("diverges", [True, False])
def test_while_a_run_diverges_no_checkpoint_is_written(diverges: bool) -> None:
    trainer = MagicMock(config=RunConfig(), policy_version=1, diverges=diverges)
    trainer.stop.requested = False
    trainer.is_last.side_effect = [False, False, True]
    trainer.due.return_value = trainer.improved.return_value = True
    trainer.has_converged.return_value = trainer.propose_migration.return_value = False
    main_loop(trainer)
    assert trainer.checkpoint.call_count == (1 if diverges else 2), "the last one is the exception"


def test_metrics_for_which_the_disk_had_no_room_are_written_later(tmp_path):
    run = RunFolder(tmp_path, RunConfig.model_validate({"log": {"tensorboard": False}}))
    run.log(1, {"a": 1.0})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with limited_files(size + 10):
        for iteration in (2, 3):
            with pytest.raises(OSError, match="too large"):
                run.log(iteration, {"a": 1.0})
        assert (tmp_path / "metrics.jsonl").stat().st_size == size, "no part of a line"
    run.log(4, {"a": 1.0})
    assert [record["iteration"] for record in run.metrics()] == [1, 2, 3, 4]


class _Cluster:
    """One that has written what a test says."""

    deadlines, disks = Deadlines(), Disks(None)

    def __init__(self, *written: Written) -> None:
        self.written = list(written)

    def snapshot(self, folder, about):
        for part in self.written:
            for name in part.files:
                (folder / name).write_text("")
        return {"started": 0}, [Part(number, 0, folder) for number in range(len(self.written))]

    def has_answered(self, refs) -> bool:
        return refs == list(range(len(self.written)))

    def get(self, refs, what, timeout):
        return self.written


def test_a_changed_byte_of_large_weights_is_found(tmp_path):
    """Writers measure their own files: those are not read again when the checkpoint becomes complete."""
    checkpoints, measured, size = Checkpoints(tmp_path, 2), {}, 65 << 20
    with checkpoints.write(1, measured=measured) as folder:
        with (folder / "weights").open("wb") as file:
            file.truncate(size)
        write_json(folder / "state.json", {"policy_version": 1, "seconds": 0.0, "store": {}})
        measured |= {"weights": measure_file(folder / "weights")}
    path = tmp_path / "000001/weights"
    assert json.loads(path.with_name("files.json").read_text())["weights"] == {
        "bytes": size,
        "crc32": measured["weights"]["crc32"],
    }
    assert read_state(path.parent)["policy_version"] == 1
    with path.open("r+b") as file:
        file.seek(size - 1)
        file.write(b"1")
    with pytest.raises(UserError, match="weights is damaged or truncated"):
        read_state(path.parent)
    manifest = json.loads(path.with_name("files.json").read_text())
    del manifest["weights"]["crc32"]  # as earlier versions wrote it
    write_json(path.with_name("files.json"), manifest)
    assert read_state(path.parent)["policy_version"] == 1


def test_a_checkpoint_is_complete_when_all_have_written(tmp_path):
    run = RunFolder(tmp_path, RunConfig())
    state = {"policy_version": 3, "seconds": 1.0}
    whole = _Cluster(Written({"trajectories.npz": EMPTY}), Written())
    saving = Saving.begin(whole, run, 3, {}, state)
    assert saving.is_written()
    assert run.checkpoints.complete() == [], "not before"
    saving.complete()
    assert read_state(run.checkpoints.newest()) == state | {"store": {"started": 0}}
    full = Saving.begin(_Cluster(Written({"trajectories.npz": EMPTY}), Written(problem="no space")), run, 4, {}, state)
    with pytest.raises(OSError, match="no space"):
        full.complete()
    assert [path.name for path in run.checkpoints.folder.iterdir()] == ["000003"], "the one before is whole"


def test_processes_elsewhere_are_told_the_whole_path_of_a_checkpoint(tmp_path, monkeypatch):
    """They may have another working directory than the driver: ``log.dir`` is relative by default."""
    monkeypatch.chdir(tmp_path)
    cluster = MagicMock(deadlines=Deadlines())
    cluster.snapshot.return_value = {"started": 0}, []
    saving = Saving.begin(cluster, RunFolder(Path("runs/one"), RunConfig()), 1, {}, {"policy_version": 1})
    (told, _), _ = cluster.snapshot.call_args
    assert told.is_absolute()
    assert told.parent == tmp_path / "runs/one/checkpoints"
    cluster.get.return_value = []
    (told / "trajectories.npz").write_text("")
    saving.complete()
    assert (tmp_path / "runs/one/checkpoints/000001/state.json").is_file()


def test_training_does_not_wait_for_a_slow_disk() -> None:
    """After each update the trainer only asks whether a checkpoint is written; before the next one, it waits."""
    saving = MagicMock()
    trainer = MagicMock(_saving=saving, _saving_s=0.0, callbacks=[])
    saving.is_written.return_value = False
    Trainer.settle(trainer)
    saving.complete.assert_not_called()
    assert trainer._saving is saving
    Trainer.settle(trainer, wait=True)
    saving.complete.assert_called_once()
    assert trainer._saving is None


def test_a_run_that_was_killed_at_its_start_can_be_started_or_resumed(tmp_path):
    """Whatever a scheduler restarts after it: before config.yaml the command for a new run, then --resume."""
    config = RunConfig.model_validate({"log": {"dir": str(tmp_path), "name": "run", "tensorboard": False}})
    (tmp_path / "run").mkdir()
    (tmp_path / "run/lock").touch()
    run = RunFolder.create(config, SPEC, ["vla-rl"])
    run.log(1, {})
    run.close()
    with pytest.raises(UserError, match="continue that run with --resume"):
        RunFolder.create(config, SPEC, ["vla-rl"])
    resumed, checkpoint = RunFolder.reopen(tmp_path / "run", config)
    resumed.begin()
    assert checkpoint is None
    assert resumed.metrics() == [], "from the beginning"
    resumed.close()
