"""Files that are written later hold what there was when they were asked for."""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path

import torch

from tests.runtime_fakes import limited_files
from vla_rl.core.postponed import Writes, are_postponed, postponed, write
from vla_rl.core.tensor_files import load_tensors, save_tensors
from vla_rl.policies.base.checkpoint_folder import Tensors, read_weights, write_checkpoint


def test_what_is_written_later_is_a_copy(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    with postponed() as writes:
        save_tensors({"w": weight}, tmp_path / "learner/critic.safetensors")
        write_checkpoint(tmp_path / "policy", {"model.safetensors": Tensors({"w": weight})}, {"about.json": {"a": 1}})
    assert not list(tmp_path.iterdir()), "nothing yet"
    weight += 1  # training goes on
    (tmp_path / "learner").mkdir()
    written = writes.run(tmp_path)
    assert written.problem is None
    about = tmp_path / "policy/about.json"
    assert written.files["policy/about.json"] == {
        "bytes": about.stat().st_size,
        "crc32": zlib.crc32(about.read_bytes()),
    }
    assert set(written.files) == {"learner/critic.safetensors", "policy/model.safetensors", "policy/about.json"}
    assert torch.equal(load_tensors(tmp_path / "learner/critic.safetensors")["w"], torch.zeros(3))
    assert torch.equal(read_weights(tmp_path / "policy", {"w": weight}, fits="a test")["w"], torch.zeros(3))
    assert not writes.run(tmp_path).files, "once"


def test_outside_of_the_block_everything_is_written_at_once(tmp_path: Path) -> None:
    assert not are_postponed()
    write(tmp_path / "a", partial((tmp_path / "a").write_text, "now"))
    assert (tmp_path / "a").read_text() == "now"


def test_a_full_disk_is_a_problem_and_no_error(tmp_path: Path) -> None:
    writes = Writes()
    writes.add(tmp_path / "state.pt", partial(torch.save, torch.zeros(100_000), tmp_path / "state.pt"))
    with limited_files(1000):
        written = writes.run(tmp_path)
    assert written.problem is not None
    assert not written.files
