"""vla_rl.cluster.stats, with Ray replaced by calls that end when the test says so."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from vla_rl.cluster import calls, stats
from vla_rl.cluster.stats import SpanCollector


def test_spans_that_come_late_come_with_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    late, dead = {"learner 0: 1"}, {"env worker 0: 4"}

    def process(name: str) -> Any:
        def ask() -> str:
            asked.append(f"{name}: {len(asked) + 1}")
            return asked[-1]

        return SimpleNamespace(take_spans=SimpleNamespace(remote=ask))

    def get(ref: str) -> bytes:
        if ref in dead:
            raise RayActorError
        return ref.encode()

    for module in (calls, stats):
        monkeypatch.setattr(module.ray, "wait", lambda refs, **_: ([r for r in refs if r not in late], list(late)))
        monkeypatch.setattr(module.ray, "get", get)
    collector, processes = SpanCollector(), {name: process(name) for name in ("learner 0", "env worker 0")}
    assert collector.ask(processes) == [("env worker 0", b"env worker 0: 2")]
    late.clear()
    assert collector.ask(processes) == [("learner 0", b"learner 0: 1"), ("learner 0", b"learner 0: 3")]
