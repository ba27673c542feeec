"""GPUs of a Ray cluster that several runs share: Ray keeps count of which are taken.

The plan places a run's processes itself, so they reserve nothing. One idle actor of each node reserves for them all.
"""

from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError

from vla_rl.core.errors import UserError
from vla_rl.core.gpus import Gpu
from vla_rl.core.machine import Machine

_TIMEOUT_S = 30.0


class _Holder:
    def entries(self) -> list[str]:
        """What the node calls the GPUs that it has given to this actor."""
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    def gpus(self) -> tuple[Gpu, ...]:
        return Machine.detect().gpus  # Ray has set CUDA_VISIBLE_DEVICES


class GpuClaim:
    """GPUs of one node; they are free again when the run ends."""

    def __init__(self, holder: Any, entries: list[str]) -> None:
        self._holder, self.entries = holder, entries

    @classmethod
    def make(cls, placed: dict[str, Any], count: int) -> Self:
        """Claim ``count`` GPUs. ``placed``: options that name the node. Raises UserError if so many are not free."""
        remote: Any = ray.remote(_Holder)
        holder = remote.options(**placed | {"num_gpus": count}).remote()
        try:
            return cls(holder, ray.get(holder.entries.remote(), timeout=_TIMEOUT_S))
        except GetTimeoutError:
            ray.kill(holder)
            free = ray.available_resources().get("GPU", 0.0)
            raise UserError(
                f"placement.ray_address: the run needs {count} GPUs of each node, and the whole cluster has {free:.0f} "
                "that no other run has taken; wait for the others, or lower placement.devices"
            ) from None

    def gpus(self) -> tuple[Gpu, ...]:
        """In the order of the plan's devices."""
        found: tuple[Gpu, ...] = ray.get(self._holder.gpus.remote(), timeout=_TIMEOUT_S)
        return found
