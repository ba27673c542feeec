"""A learner's state is data: loading it runs no code, whoever wrote the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.learner.learner_tools import config, make_learner, parameters, random_batch
from vla_rl.core.errors import UserError
from vla_rl.learner.state_files import load_data


class _Harmful:
    """Unpickling creates a file, as it could do anything else."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"module": {"w": torch.zeros(2)}, "extra": _Harmful(tmp_path / "done")}, tmp_path / "state.pt")
    with pytest.raises(UserError, match=r"state\.pt is damaged, or holds more than data"):
        load_data(tmp_path / "state.pt")
    assert not (tmp_path / "done").exists()
    torch.load(tmp_path / "state.pt", weights_only=False)
    assert (tmp_path / "done").exists(), "the file is what it seems"


@pytest.mark.parametrize("kept", [0, 10, 900])
def test_a_truncated_file_is_one_clear_error(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "state.pt"
    torch.save({"w": torch.zeros(500)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"state\.pt is damaged.*RUN@ITERATION"):
        load_data(path)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_learner_under_zero_goes_on_from_data_alone(tmp_path: Path, stage: int, monkeypatch) -> None:
    policy = {"name": "openvla_oft", "chunk_size": 4, "size": "nano"}
    cfg = config(learner={"zero_stage": stage, "lr": 1e-3}, policy=policy)
    straight, resumed = make_learner(cfg), make_learner(cfg)
    straight.update(random_batch())
    straight.save(tmp_path)
    load = torch.load

    def restricted(*args: object, **options: object) -> object:
        assert options["weights_only"] is True
        return load(*args, **options)

    monkeypatch.setattr(torch, "load", restricted)
    resumed.load(tmp_path)
    for learner in (straight, resumed):
        learner.update(random_batch(1, policy_version=1))
    after = parameters(resumed)
    assert all(np.array_equal(value, after[name]) for name, value in parameters(straight).items())
