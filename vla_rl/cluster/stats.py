"""What the meters of all processes say, what they did when, and what they warn of."""

from collections.abc import Hashable, Mapping
from typing import Any, Generic, TypeVar

import ray
from ray.actor import ActorHandle

from vla_rl.cluster.calls import failure_of

_TIMEOUT_S = 5.0
Name = TypeVar("Name", bound=Hashable)


class Inquiry(Generic[Name]):
    """Asks processes the same again and again. Who is silent is waited for once, and not asked again before it has
    answered: a host that is cut off does not hold up each iteration."""

    def __init__(self, method: str, timeout_s: float = _TIMEOUT_S) -> None:
        self._method, self._timeout_s = method, timeout_s
        self._open: dict[Any, tuple[Name, ActorHandle]] = {}  # by call

    def ask(self, processes: Mapping[Name, ActorHandle]) -> list[tuple[Name, Any]]:
        """Names and answers, older answers of a process first; also those that come late, of an earlier call."""
        found = self._answers()
        silent = {id(process) for _, process in self._open.values()}
        asked = {name: process for name, process in processes.items() if id(process) not in silent}
        calls = {getattr(process, self._method).remote(): (name, process) for name, process in asked.items()}
        self._open |= calls
        if calls:
            ray.wait(list(calls), num_returns=len(calls), timeout=self._timeout_s)
        return found + self._answers()

    def _answers(self) -> list[tuple[Name, Any]]:
        if not self._open:
            return []
        ended, _ = ray.wait(list(self._open), num_returns=len(self._open), timeout=0.0)
        named = [(self._open.pop(ref)[0], ref) for ref in ended]
        return [(name, ray.get(ref)) for name, ref in named if failure_of(ref) is None]


class Stats:
    """Meter totals of processes that started together."""

    def __init__(self) -> None:
        self._inquiry = Inquiry[tuple[str, int]]("stats")
        self._last: dict[tuple[str, int], dict[str, float]] = {}  # answers, by group and index

    def ask(self, groups: Mapping[str, Mapping[int, ActorHandle]]) -> dict[str, dict[int, dict[str, float]]]:
        """Totals of every process of each group, by index; of one that does not answer in time, those of its last
        answer."""
        named = {(name, i): process for name, group in groups.items() for i, process in group.items()}
        self._last |= dict(self._inquiry.ask(named))
        return {name: {i: self._last.get((name, i), {}) for i in group} for name, group in groups.items()}
