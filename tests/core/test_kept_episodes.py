"""Episodes that are kept: which ones, and their file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from vla_rl.core.errors import UserError
from vla_rl.core.kept_episodes import KeptEpisodes
from vla_rl.core.records import Array, Record


@dataclass(frozen=True, slots=True)
class Played:
    """An episode of n chunks."""

    frames: Array  # [n + 1, 2]
    rewards: Array  # [n]
    task: int
    success: bool
    record: Record = field(default_factory=dict)


def played(number: int, chunks: int, **record: Array) -> Played:
    frames = np.full((chunks + 1, 2), number, np.uint8)
    return Played(frames, np.arange(chunks) / 7, number, number % 2 == 0, record)


def test_the_newest_stay_and_the_last_one_always() -> None:
    kept = KeptEpisodes(Played, 2)
    assert [kept.add([played(0, 1), played(1, 2)]), kept.add([]), kept.add([played(2, 3)])] == [0, 0, 1]
    assert ([e.task for e in kept.episodes], kept.forgotten, kept.taken) == ([1, 2], 1, 2)
    assert kept.lengths("frames").tolist() == [3, 4]
    assert kept.column("frames")[:, 0].tolist() == [1] * 3 + [2] * 4
    by_size = KeptEpisodes(Played, 10, lambda e: len(e.rewards))
    assert by_size.add([played(0, 4), played(1, 4), played(2, 30)]) == 2
    assert (by_size.taken, len(by_size)) == (30, 1)


@pytest.mark.parametrize("names", [(), ("tokens", "noise")])
def test_the_file_holds_every_field(tmp_path: Path, names: tuple[str, ...]) -> None:
    kept, again = KeptEpisodes(Played, 2), KeptEpisodes(Played, 2)
    for number, chunks in enumerate((2, 3, 1)):
        kept.add([played(number, chunks, **{name: np.full((chunks, 1), number, np.int32) for name in names})])
    kept.save(tmp_path / "kept.npz", scale=np.array([0.5, 2.0]))
    again.add([played(9, 1)])
    assert again.load(tmp_path / "kept.npz")["scale"].tolist() == [0.5, 2.0]
    assert (again.forgotten, again.taken) == (kept.forgotten, kept.taken) == (1, 2)
    for one, other in zip(kept.episodes, again.episodes, strict=True):
        assert (one.task, one.success) == (other.task, other.success)
        assert type(other.success) is bool
        assert one.record.keys() == other.record.keys() == set(names)
        pairs = [(one.frames, other.frames), (one.rewards, other.rewards)]
        for x, y in [*pairs, *((one.record[name], other.record[name]) for name in names)]:
            assert x.dtype == y.dtype
            assert np.array_equal(x, y)


def test_nothing_is_kept_and_read_back_as_nothing(tmp_path: Path) -> None:
    kept = KeptEpisodes(Played, 2)
    kept.save(tmp_path / "kept.npz")
    assert kept.load(tmp_path / "kept.npz") == {}
    assert len(kept) == 0


def test_a_file_of_an_earlier_version_is_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "kept.npz", forgotten=np.array(0), task=np.array([1]), frames=np.zeros((2, 2)))
    with pytest.raises(UserError, match=r"kept\.npz was written by another version .*=RUN/checkpoints"):
        KeptEpisodes(Played, 2).load(tmp_path / "kept.npz")


@pytest.mark.parametrize("damage", ["cut", "a border", "an episode", "missing"])
def test_a_damaged_file_is_told(tmp_path: Path, damage: str) -> None:
    kept, path = KeptEpisodes(Played, 2), tmp_path / "kept.npz"
    kept.add([played(0, 2), played(1, 2)])
    kept.save(path)
    with np.load(path) as file:
        data = dict(file)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:200])
    elif damage == "missing":
        path.unlink()
    else:
        data |= {"task": data["task"][:1]} if damage == "an episode" else {}
        np.savez(path, **{name: x for name, x in data.items() if damage != "a border" or name != "frames.border"})
    with pytest.raises(UserError, match=r"kept\.npz is missing or damaged .*resume an earlier checkpoint"):
        kept.load(path)
    assert len(kept) == 2, "what was there is still there"
