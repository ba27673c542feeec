"""vla_rl.cluster.stats, with Ray replaced by calls that end when the test says so."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from vla_rl.cluster import calls, stats
from vla_rl.cluster.stats import Inquiry, Stats


class Calls:
    """A call is a text, such as "env worker 0: 4"; that of a silent process does not end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.silent: set[str] = set()
        self.dead: set[str] = set()
        self.waited_for: list[set[str]] = []  # with patience
        for module in (calls, stats):
            monkeypatch.setattr(module.ray, "wait", self._wait)
            monkeypatch.setattr(module.ray, "get", self._get)

    def process(self, name: str, method: str) -> Any:
        def ask() -> str:
            self.asked.append(f"{name}: {len(self.asked) + 1}")
            return self.asked[-1]

        return SimpleNamespace(**{method: SimpleNamespace(remote=ask)})

    def _wait(self, refs: list[str], *, timeout: float, **_: int) -> tuple[list[str], list[str]]:
        if timeout:
            self.waited_for.append(set(refs))
        late = [ref for ref in refs if ref in self.silent]
        return [ref for ref in refs if ref not in late], late

    def _get(self, ref: str) -> Any:
        if ref in self.dead:
            raise RayActorError
        return {"calls": int(ref.split()[-1])}


def test_what_comes_late_comes_with_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Calls(monkeypatch)
    ray.silent, ray.dead = {"learner 0: 1"}, {"env worker 0: 4"}
    inquiry = Inquiry[str]("take_spans")
    processes = {name: ray.process(name, "take_spans") for name in ("learner 0", "env worker 0")}
    assert inquiry.ask(processes) == [("env worker 0", {"calls": 2})]
    ray.silent.clear()
    assert inquiry.ask(processes) == [("learner 0", {"calls": 1}), ("learner 0", {"calls": 3})]


def test_who_is_silent_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, totals = Calls(monkeypatch), Stats()
    workers = {i: ray.process(f"env worker {i}", "stats") for i in range(2)}
    assert totals.ask({"worker": workers}) == {"worker": {0: {"calls": 1}, 1: {"calls": 2}}}
    ray.silent = {"env worker 1: 4"}
    for call in (3, 5, 6):
        assert totals.ask({"worker": workers}) == {"worker": {0: {"calls": call}, 1: {"calls": 2}}}
    assert ray.waited_for[1:] == [{"env worker 0: 3", "env worker 1: 4"}, {"env worker 0: 5"}, {"env worker 0: 6"}]
    workers[1] = ray.process("env worker 1", "stats")  # replaced
    assert totals.ask({"worker": workers})["worker"][1] == {"calls": 8}
    assert totals.ask({}) == {}
