"""The machines of a run: a list of nodes, each with its cores, devices, memory and link.

Alike nodes are a list of equal entries, and one machine is a list of one. A node without a device can only simulate:
its env workers ask inference servers of other nodes, over its link.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Self

from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import GIB, Machine

Kind = Literal["cuda", "cpu", "virtual"]
ENV_HOST = "vla_rl_env_host"  # Ray's resource of a node that only simulates, whatever it has


@dataclass(frozen=True, slots=True)
class Link:
    """A node's connection to the others, the same in both directions. The defaults are assumptions."""

    rate: float = 25e9 / 8  # bytes/s
    delay: float = 2e-4  # seconds from a process of one node to a process of another, besides the rate


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of a run."""

    cores: int
    devices: int
    memory: float = math.inf  # GiB of main memory
    link: Link = field(default_factory=Link)


@lru_cache(maxsize=64)
def homes(machines: tuple[Node, ...]) -> tuple[int, ...]:
    """The node of each device. Nodes take turns as long as they have some, so that each has its part of a range."""
    turns = range(max((m.devices for m in machines), default=0))
    return tuple(node for turn in turns for node, machine in enumerate(machines) if turn < machine.devices)


@dataclass(frozen=True, slots=True)
class Resources:
    """Cores and devices of all nodes together, and the machines that have them: by default ``nodes`` alike ones."""

    cores: int
    devices: int
    kind: Kind = "cpu"
    nodes: int = 1
    machines: tuple[Node, ...] = ()

    def __post_init__(self) -> None:
        if not self.machines:
            dealt = (self.cores, self.cores if self.kind == "cpu" else self.devices)  # there, each core is one
            cores, devices = (_shares(total, self.nodes) for total in dealt)
            object.__setattr__(self, "machines", tuple(map(Node, cores, devices)))

    @classmethod
    def on(cls, machines: tuple[Node, ...], kind: Kind) -> Self:
        """Of these machines, the first of which is the driver's."""
        return cls(sum(m.cores for m in machines), sum(m.devices for m in machines), kind, len(machines), machines)

    @classmethod
    def of(cls, machine: Machine, config: RunConfig) -> Self:
        """Without a GPU, the cores are the devices; ``placement.devices`` says how many virtual devices there are.

        ``machine``: one of the nodes with devices, which are alike. After them come those that only simulate, whose
        memory is not known: as many as may be there at a time.
        """
        placement, memory = config.placement, machine.memory / GIB
        if placement.virtual is not None:
            return cls.on((Node(placement.env_workers, placement.devices or 1, memory),), "virtual")
        node = Node(machine.cpus, len(machine.gpus) or machine.cpus, memory)
        host = Node(placement.env_host_cores or machine.cpus, 0)
        nodes = (node,) * placement.nodes + (host,) * placement.env_hosts.max
        return cls.on(nodes, "cuda" if machine.gpus else "cpu")


def _shares(total: int, nodes: int) -> list[int]:
    """How many of ``total`` things each node has if they are dealt."""
    return [(total + nodes - 1 - node) // nodes for node in range(nodes)]
