"""Files and folders that are complete or absent, also after a power failure."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import pytest

from vla_rl.core.file_lock import FileLock
from vla_rl.core.files import new_folder, remove_partial, replacing


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what has reached the disk, in order."""
    names: list[str] = []
    sync = os.fsync

    def note(fd: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        sync(fd)

    monkeypatch.setattr(os, "fsync", note)
    return names


def test_a_folder_reaches_the_disk_before_it_gets_its_name(tmp_path: Path, synced: list[str]) -> None:
    path = tmp_path / "checkpoint"
    for version in ("old", "new"):
        synced.clear()
        with replacing(path) as partial:
            (partial / "inner").mkdir(parents=True)
            (partial / "inner/weights").write_text(version)
        assert synced == ["weights", "inner", partial.name, tmp_path.name]
        assert (path / "inner/weights").read_text() == version
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_an_error_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")

    def write_half() -> None:
        with replacing(path) as partial:
            partial.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_what_killed_processes_have_left_can_be_removed(tmp_path: Path) -> None:
    for name in (".a.1.partial", "inner/.b.2.old"):
        (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / "inner/.c.json.3.partial").write_text("half")
    (tmp_path / "kept.partial").write_text("not one of ours")
    remove_partial(tmp_path)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["inner", "kept.partial"]


def test_a_lock_has_one_owner_and_tells_who(tmp_path: Path) -> None:
    lock = FileLock.acquire(tmp_path / "lock")
    assert lock is not None
    assert f"process {os.getpid()} on " in (tmp_path / "lock").read_text()
    assert FileLock.acquire(tmp_path / "lock") is None
    lock.release()
    lock.release()
    assert not (tmp_path / "lock").exists(), "as before"
    (tmp_path / "lock").write_text("process 1 on another host, which was killed")
    again = FileLock.acquire(tmp_path / "lock")
    assert again is not None
    again.release()
    assert (tmp_path / "lock").read_text() == "process 1 on another host, which was killed"


def test_of_many_that_want_a_lock_one_at_a_time_has_it(tmp_path: Path) -> None:
    """Its file comes and goes with each owner."""
    path, owners, most = tmp_path / "lock", [], []

    def want(number: int) -> None:
        for _ in range(300):
            if (lock := FileLock.acquire(path)) is not None:
                owners.append(number)
                most.append(len(owners))
                owners.remove(number)
                lock.release()

    threads = [Thread(target=want, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}


def test_folders_of_one_second_are_numbered(tmp_path: Path) -> None:
    assert [new_folder(tmp_path / "runs", "ppo").name for _ in range(3)] == ["ppo", "ppo-2", "ppo-3"]
