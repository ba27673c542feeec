"""What the meters of all processes say."""

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from vla_rl.cluster.calls import failure_of

_TIMEOUT_S = 5.0


class Stats:
    """Meter totals of processes that started together."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], dict[str, float]] = {}  # answers, by group and index

    def ask(self, groups: Mapping[str, Sequence[ActorHandle]]) -> dict[str, list[dict[str, float]]]:
        """Totals of every process of each group; of one that does not answer in time, those of its last answer."""
        calls: dict[Any, tuple[str, int]] = {
            process.stats.remote(): (name, i) for name, group in groups.items() for i, process in enumerate(group)
        }
        answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_TIMEOUT_S)
        for ref in answered:
            if failure_of(ref) is None:
                self._last[calls[ref]] = ray.get(ref)
        return {name: [self._last.get((name, i), {}) for i in range(len(group))] for name, group in groups.items()}
