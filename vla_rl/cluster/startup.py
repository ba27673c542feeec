"""How far the processes of a cluster are with what they load and build."""

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from vla_rl.cluster.calls import failure_of


class Startup:
    """Counts what is ready. Learners and servers have been told to build, by calls that end; env workers are asked."""

    def __init__(self, envs_per_worker: int) -> None:
        self._envs = envs_per_worker
        self._calls: dict[str, tuple[int, list[Any]]] = {}  # how many there were, and the open ones
        self._asked: dict[int, tuple[ActorHandle, Any]] = {}  # open questions, by env worker
        self._ready: dict[int, ActorHandle] = {}  # env workers that play

    def expect(self, what: str, calls: Sequence[ray.ObjectRef]) -> None:
        """``calls`` end when ``what`` is built."""
        self._calls[what] = len(calls), list(calls)

    def text(self, workers: Mapping[int, ActorHandle]) -> str:
        """Such as "simulators 2 of 4, learner 0 of 1": what is not complete; empty if all is ready. Waits for nothing.

        ``workers``: the env workers there are now, by index; one that was replaced has to be ready again.
        """
        parts = []
        ready = self._envs * sum(self._is_ready(i, worker) for i, worker in workers.items())
        if ready < self._envs * len(workers):
            parts.append(f"simulators {ready} of {self._envs * len(workers)}")
        for what, (count, calls) in self._calls.items():
            if calls:
                calls[:] = ray.wait(calls, num_returns=len(calls), timeout=0.0)[1]
            if calls:
                parts.append(f"{what} {count - len(calls)} of {count}")
        return ", ".join(parts)

    def _is_ready(self, index: int, worker: ActorHandle) -> bool:
        if self._ready.get(index) is worker:
            return True
        asked = self._asked.get(index)
        if asked is not None and asked[0] is worker and ray.wait([asked[1]], timeout=0.0)[0]:
            asked = None  # asked again, unless it is ready
            _, answer = self._asked.pop(index)
            if failure_of(answer) is None and ray.get(answer):
                self._ready[index] = worker
                return True
        if asked is None or asked[0] is not worker:
            self._asked[index] = worker, worker.is_ready.remote()
        return False
