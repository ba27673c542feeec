"""What runs where: a pure function from resources and configuration to a plan."""

from __future__ import annotations

from dataclasses import dataclass

from vla_rl.config import ManiSkillConfig, RunConfig


@dataclass(frozen=True, slots=True)
class Resources:
    """Of the machine or cluster."""

    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the plan."""

    role: str  # "env worker", "inference server" or "learner"
    index: int
    device: str  # "cpu" or "cuda"
    gpu_share: float  # of one device, for Ray's bookkeeping
    threads: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes beside the driver and the replay store."""

    workers: tuple[Process, ...]
    servers: tuple[Process, ...]
    learners: tuple[Process, ...]
    slots: int  # of one env worker
    stages: int  # groups of slots that advance independently

    def server_of(self, worker: int) -> int:
        """The inference server that an env worker asks."""
        return worker % len(self.servers)

    def workers_of(self, server: int) -> list[int]:
        return [w.index for w in self.workers if self.server_of(w.index) == server]


def make_plan(config: RunConfig, resources: Resources, *, training: bool = True) -> Plan:
    """Collocated: learner and inference share the devices, simulators own the cores.

    In sync mode a worker's slots form one stage, so that simulation and inference take turns as well. So they do where
    the simulator steps all slots in one call on a GPU, of which it then gets a share.
    """
    p = config.placement
    gpu = resources.gpus > 0
    device = "cuda" if gpu else "cpu"
    batched = gpu and isinstance(config.env, ManiSkillConfig) and config.env.wants_gpu
    simulator, server, learner = (0.2, 0.3, 0.5) if batched else (0.0, 0.4, 0.6) if gpu else (0.0, 0.0, 0.0)
    ranks = config.learner.ranks if training else 0
    servers = min(p.inference_servers, p.env_workers)
    return Plan(
        workers=tuple(
            Process("env worker", i, "cuda" if batched else "cpu", simulator / p.env_workers, 1)
            for i in range(p.env_workers)
        ),
        servers=tuple(Process("inference server", i, device, server, p.inference_threads) for i in range(servers)),
        learners=tuple(Process("learner", i, device, learner, config.learner.threads) for i in range(ranks)),
        slots=p.slots_per_worker,
        stages=1 if batched or config.mode == "sync" else p.slots_per_worker,
    )
