"""What the meters of all processes say, and what they did when."""

from collections.abc import Mapping
from typing import Any

import ray
from ray.actor import ActorHandle

from vla_rl.cluster.calls import failure_of

_TIMEOUT_S = 5.0
_SPANS_TIMEOUT_S = 1.0


class Stats:
    """Meter totals of processes that started together."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], dict[str, float]] = {}  # answers, by group and index

    def ask(self, groups: Mapping[str, Mapping[int, ActorHandle]]) -> dict[str, dict[int, dict[str, float]]]:
        """Totals of every process of each group, by index; of one that does not answer in time, those of its last
        answer."""
        calls: dict[Any, tuple[str, int]] = {
            process.stats.remote(): (name, i) for name, group in groups.items() for i, process in group.items()
        }
        answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_TIMEOUT_S)
        for ref in answered:
            if failure_of(ref) is None:
                self._last[calls[ref]] = ray.get(ref)
        return {name: {i: self._last.get((name, i), {}) for i in group} for name, group in groups.items()}


class SpanCollector:
    """What processes record (``log.trace``). An answer that comes late is part of the next call's."""

    def __init__(self) -> None:
        self._asked: dict[Any, str] = {}

    def ask(self, processes: Mapping[str, ActorHandle]) -> list[tuple[str, bytes]]:
        """Names of processes, and parts of their files (``SpanLog.take``)."""
        self._asked |= {process.take_spans.remote(): name for name, process in processes.items()}
        answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=_SPANS_TIMEOUT_S)
        named = [(self._asked.pop(ref), ref) for ref in answered]
        return [(name, ray.get(ref)) for name, ref in named if failure_of(ref) is None]
