"""How long the parts of a run may take: what they cost on slow hardware, so that only what hangs takes longer."""

from dataclasses import dataclass
from typing import Self

from vla_rl.config.run_config import RunConfig
from vla_rl.core.records import EnvSpec
from vla_rl.placement.memory import average_bytes
from vla_rl.policies.build import policy_sizes

_LEAST_S = 600.0  # building simulators, starting libraries
_DISK_BYTES_PER_S = 20e6  # a network disk that others use, too
_NETWORK_BYTES_PER_S = 50e6  # of 1 Gbit/s, when a node sends to two others
_STATE_BYTES = 12  # of a trained weight: its master and both moments; its average comes on top


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds."""

    setup: float = _LEAST_S  # reading the weights, and the learner's state
    checkpoint: float = _LEAST_S  # writing both
    publish: float = _LEAST_S  # to all nodes; also loading and offloading the learner
    update: float = 3600.0  # the first one; later ones are known (``update_after``)

    @classmethod
    def of(cls, config: RunConfig, spec: EnvSpec) -> Self:
        """Of a run's policy."""
        if config.placement.virtual is not None:
            return cls()
        itemsize = {"fp32": 4, "bf16": 2}[config.learner.precision]
        sizes = policy_sizes(config.policy, spec, itemsize)
        each = _STATE_BYTES + average_bytes(config.learner)
        nbytes = sizes.parameters * itemsize + sizes.trained * each
        disk = _LEAST_S + nbytes / _DISK_BYTES_PER_S
        network = _LEAST_S + sizes.trained * itemsize / _NETWORK_BYTES_PER_S
        return cls(setup=disk, checkpoint=disk, publish=network)

    def update_after(self, longest: float) -> float:
        """Of an update, after the ``longest`` one so far, in seconds; 0 before the first."""
        return max(_LEAST_S, 20 * longest) if longest else self.update
