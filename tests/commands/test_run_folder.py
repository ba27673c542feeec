"""The best iteration of a run: how it is found, kept, and what ends a run that no longer improves."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from vla_rl.commands.run_folder import RunFolder
from vla_rl.commands.train import main_loop
from vla_rl.commands.trainer import Trainer
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError


def run_folder(path: Path, evaluations: dict[int, float], **train: int) -> RunFolder:
    path.mkdir(exist_ok=True)
    folder = RunFolder(path, RunConfig.model_validate({"train": train, "log": {"tensorboard": False}}))
    for iteration in range(max(evaluations, default=0) + 1):
        metrics = {"eval/greedy_success": evaluations[iteration]} if iteration in evaluations else {}
        folder.log(iteration, metrics)
    return folder


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
    trainer = MagicMock(config=RunConfig(), policy_version=1)
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
