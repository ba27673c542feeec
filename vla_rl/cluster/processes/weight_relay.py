"""The process that brings weights to a node where the learner's first rank does not run."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from vla_rl.cluster.processes.common import CALL_TIMEOUT_S, PulseAddress, Vital
from vla_rl.core.errors import StallError
from vla_rl.placement.plan import Process

_BUCKETS_AHEAD = 2


def relay_source(number: int) -> int:
    """Where relay ``number`` >= 1 gets its buckets from: another relay, or the learner (0). None sends to more than
    two."""
    return (number - 1) // 2


class WeightRelayProcess(Vital):
    def __init__(self, process: Process, weights: Path) -> None:
        self._process, self._path = process, weights
        self._source: Any = None
        self._relay: Any = None

    def beat(self, pulse: PulseAddress) -> None:
        """Show that this process is not frozen."""
        pulse.open(self._process).beat()

    def connect(self, source: ActorHandle) -> None:
        """``source``: the learner, which has published its first weights, or a relay that is connected."""
        from vla_rl.core.ipc.weights import WeightRelay, create_weight_buffers

        nbytes: Any = ray.get(source.weights_nbytes.remote(), timeout=CALL_TIMEOUT_S)
        create_weight_buffers(self._path, nbytes)
        self._source, self._relay = source, WeightRelay(self._path)

    def pull(self, version: int) -> None:
        """Publish ``version`` on this node.

        Raises StallError if that is impossible: this node would act with old weights, and nobody would know.
        """
        if not self._relay.relay(version, self._buckets(version)):
            raise StallError(f"weights {version} were replaced at their source before this node had them")

    def weights_nbytes(self) -> int:
        """Bytes of one published version."""
        return self._relay.nbytes

    def bucket(self, version: int, number: int) -> np.ndarray | None:
        """A part of a version, for another relay, as soon as it is here. See ``WeightRelay.bucket``."""
        return self._relay.bucket(version, number, CALL_TIMEOUT_S)

    def _buckets(self, version: int) -> Iterator[np.ndarray | None]:
        """All buckets in order, with some requested ahead."""
        requested: deque[ray.ObjectRef] = deque()
        for number in range(self._relay.num_buckets):
            requested.append(self._source.bucket.remote(version, number))
            if len(requested) > _BUCKETS_AHEAD:
                yield ray.get(requested.popleft(), timeout=2 * CALL_TIMEOUT_S)
        for ref in requested:
            yield ray.get(ref, timeout=2 * CALL_TIMEOUT_S)
