"""Files that are written later hold what there was when they were asked for."""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path

import torch

from tests.runtime_fakes import limited_files
from vla_rl.core.postponed import Writes, are_postponed, postponed, write
from vla_rl.learner.state_files import load_data, on_host, save_data
from vla_rl.policies.base.checkpoint_folder import Tensors, read_weights, write_checkpoint


def test_what_is_written_later_is_a_copy(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    state = {"module": {"w": weight}, "groups": [{"lr": 1.0, "moments": (weight, None)}]}
    with postponed() as writes:
        save_data(state, tmp_path / "learner/state.pt")
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
    assert set(written.files) == {"learner/state.pt", "policy/model.safetensors", "policy/about.json"}
    found = load_data(tmp_path / "learner/state.pt")
    assert torch.equal(found["module"]["w"], torch.zeros(3))
    assert torch.equal(found["groups"][0]["moments"][0], torch.zeros(3))
    assert torch.equal(read_weights(tmp_path / "policy", {"w": weight}, fits="a test")["w"], torch.zeros(3))
    assert not writes.run(tmp_path).files, "once"


def test_copies_share_nothing_with_what_they_copy() -> None:
    base = torch.arange(6.0)
    copy = on_host({"part": base[:2], "list": [base]})
    base.zero_()
    assert copy["part"].tolist() == [0.0, 1.0]
    assert copy["part"].untyped_storage().nbytes() == 8, "of a view, no more than itself"
    assert copy["list"][0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


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
