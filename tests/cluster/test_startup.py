"""How far a start is, as it is shown."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from vla_rl.cluster import startup
from vla_rl.cluster.startup import Startup


class _Ray:
    """Calls are names; those in ``ended`` have answers."""

    def __init__(self) -> None:
        self.ended: dict[str, Any] = {}

    def wait(self, refs: list[str], **_: object) -> tuple[list[str], list[str]]:
        return [ref for ref in refs if ref in self.ended], [ref for ref in refs if ref not in self.ended]

    def get(self, ref: str) -> Any:
        if isinstance(self.ended[ref], Exception):
            raise self.ended[ref]
        return self.ended[ref]


def _worker(name: str) -> Any:
    return SimpleNamespace(is_ready=SimpleNamespace(remote=lambda: name))


def test_what_is_not_ready_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _Ray()
    monkeypatch.setattr(startup, "ray", fake)
    monkeypatch.setattr("vla_rl.cluster.calls.ray", fake)
    workers, start = {0: _worker("a"), 5: _worker("b")}, Startup(envs_per_worker=2)
    start.expect("inference", ["server"])
    start.expect("learner", ["rank 0", "rank 1"])
    assert start.text(workers) == "simulators 0 of 4, inference 0 of 1, learner 0 of 2"
    fake.ended |= {"a": True, "b": False, "server": None, "rank 1": None}
    assert start.text(workers) == "simulators 2 of 4, learner 1 of 2"
    fake.ended["b"] = RayActorError()
    for _ in range(3):
        assert start.text(workers) == "simulators 2 of 4, learner 1 of 2"
    workers[0] = _worker("another")  # a replaces one that has died
    fake.ended |= {"b": True, "rank 0": None}
    for _ in range(2):
        last = start.text(workers)
    assert last == "simulators 2 of 4", "the other one is asked"
    fake.ended["another"] = True
    assert start.text(workers) == ""
