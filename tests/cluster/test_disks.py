"""Files of a checkpoint move between nodes that share no disk, and stay where they are if the nodes share one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vla_rl.cluster import disks as disks_module
from vla_rl.cluster.disks import Disks, Part
from vla_rl.cluster.node import Node
from vla_rl.core.errors import RunError
from vla_rl.core.files import measure_file

FILES = {"learner/state/1-of-2.safetensors": bytes(range(256)) * 10, "learner/empty": b""}


class Session:
    """The driver's node, and another one, which sees the driver's disk or does not."""

    def __init__(self, is_shared: bool) -> None:
        self.nodes, self.is_shared = [Node(), Node()], is_shared

    def call(self, node: int, method: str, *args: Any) -> Any:
        if method == "stamp" and node and not self.is_shared:
            return None
        return getattr(self.nodes[node], method)(*args)


@pytest.fixture
def session(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setattr(disks_module, "_PART_BYTES", 1000)
    session = Session(request.param)
    yield session
    for node in session.nodes:
        node.close()


def fill(folder: Path) -> dict[str, dict[str, int]]:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return {name: measure_file(folder / name) for name in FILES}


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("session", [True], indirect=True)
def test_on_a_shared_disk_nothing_is_copied(session: Session, tmp_path: Path) -> None:
    disks = Disks(session)
    assert disks.place(tmp_path, 1) == tmp_path
    files = fill(tmp_path)
    disks.fetch(Part(None, 1, tmp_path), files, tmp_path)
    assert disks.send(tmp_path, 1) == tmp_path
    disks.discard(tmp_path, 1)
    assert content(tmp_path) == FILES


@pytest.mark.parametrize("session", [False], indirect=True)
def test_what_another_node_writes_comes_to_the_driver_and_back(session: Session, tmp_path: Path) -> None:
    disks = Disks(session)
    assert disks.place(tmp_path, 0) == tmp_path
    place = disks.place(tmp_path, 1)
    assert place != tmp_path
    part, files = Part(None, 1, place), fill(place)
    disks.fetch(part, files, tmp_path)
    assert content(tmp_path) == FILES
    copy = disks.send(tmp_path, 1)
    assert {name: data for name, data in content(copy).items() if name != "lock"} == FILES
    (place / "learner/empty").write_text("more")
    with pytest.raises(RunError, match="learner/empty is not what node 1 has written"):
        disks.fetch(part, files, tmp_path)
    disks.discard(place, 1)
    assert not place.exists()
    assert copy.exists()
    session.call(1, "begin")
    assert not copy.exists(), "whatever has not been removed is, before processes start again"
