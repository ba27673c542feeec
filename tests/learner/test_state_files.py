"""A learner's state is data: loading it runs no code, whoever wrote the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.learner.learner_tools import config, make_learner, parameters, random_batch
from vla_rl.core.errors import UserError
from vla_rl.core.tensor_files import load_tensors, save_tensors


class _Harmful:
    """Unpickling creates a file, as it could do anything else."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save({"w": torch.zeros(2), "extra": _Harmful(tmp_path / "done")}, path)
    with pytest.raises(UserError, match=r"state\.pt is damaged"):
        load_tensors(path)
    assert not (tmp_path / "done").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "done").exists(), "the file is what it seems"


@pytest.mark.parametrize("kept", [0, 10, 900])
def test_a_truncated_file_is_one_clear_error(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "critic.safetensors"
    save_tensors({"w": torch.zeros(500)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"critic\.safetensors is damaged.*RUN@ITERATION"):
        load_tensors(path)


NANO = {"name": "openvla_oft", "chunk_size": 4, "size": "nano"}
SETTINGS = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "zero 1": {"zero_stage": 1},
    "zero 2, offloaded": {"zero_stage": 2, "offload_optimizer": "cpu"},
    "zero 3": {"zero_stage": 3},
    "zero 3, bf16": {"zero_stage": 3, "precision": "bf16"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A state after an update without ZeRO, and the weights after one more."""
    folder = tmp_path_factory.mktemp("saved")
    learner = make_learner(config(policy=NANO))
    learner.update(random_batch())
    learner.save(folder)
    learner.update(random_batch(1, policy_version=1))
    return folder, parameters(learner)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_learner_goes_on_to_the_bit_and_from_any_other_setting(
    name: str, tmp_path: Path, saved: tuple[Path, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "load", None)  # no pickle is read
    cfg = config(learner=SETTINGS[name], policy=NANO)
    straight, resumed, other = (make_learner(cfg) for _ in range(3))
    straight.update(random_batch())
    straight.save(tmp_path)
    resumed.load(tmp_path)
    other.load(saved[0])
    for learner in (straight, resumed, other):
        learner.update(random_batch(1, policy_version=1))
    after = parameters(resumed)
    assert all(np.array_equal(value, after[n]) for n, value in parameters(straight).items())
    low = SETTINGS[name].get("precision") == "bf16"
    for n, value in parameters(other).items():
        assert np.abs(value - saved[1][n]).max() < (0.01 if low else 2e-4), n


def test_what_is_missing_or_of_another_policy_is_one_clear_error(tmp_path: Path) -> None:
    learner = make_learner(config(policy=NANO))
    learner.save(tmp_path)
    (tmp_path / "state/0-of-1.safetensors").rename(tmp_path / "state/0-of-2.safetensors")
    with pytest.raises(UserError, match=r"1-of-2\.safetensors is missing"):
        learner.load(tmp_path)
    (tmp_path / "state/1-of-2.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match=r"1-of-2\.safetensors is damaged .*RUN@ITERATION"):
        learner.load(tmp_path)
