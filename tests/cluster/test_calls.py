"""vla_rl.cluster.calls: waiting for remote calls, with Ray replaced by calls that have all ended."""

from typing import Any

import pytest

from vla_rl.cluster import calls


class Watched:
    """Its ``look`` waits for a call of its own, as the replacement of an inference server does."""

    def __init__(self) -> None:
        self.loops, self.ended, self._nested = ["loop"], list[str](), False

    def loop_ended(self, ref: Any) -> None:
        self.loops.remove(ref)
        self.ended.append(ref)

    def look(self) -> None:
        if not self._nested:
            self._nested = True
            calls.gather(["inner"], "the inner call", 5.0, self)


def test_a_loop_that_ends_while_two_calls_are_waited_for_is_seen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls.ray, "wait", lambda refs, **_: ([refs[-1]], refs[:-1]))  # the loop first, if it is open
    monkeypatch.setattr(calls.ray, "get", lambda refs: refs)
    watch = Watched()
    assert calls.gather(["outer"], "the outer call", 5.0, watch) == ["outer"]
    assert watch.ended == ["loop"]
