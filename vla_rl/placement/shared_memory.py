"""What a run keeps in shared memory on the machine of its driver, computed before anything is started."""

import math
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np

from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.ipc.shared_memory import enlarge, free_shared_memory, shared_root
from vla_rl.core.machine import GIB
from vla_rl.core.records import EnvSpec
from vla_rl.placement.plan import Plan, sharing_learner
from vla_rl.policies.build import policy_sizes

_LEAST_STORE = 200 << 20  # Ray's own objects, and small ones of the run
_RECORDED = 3  # episodes of an evaluation whose frames are kept for a video
_OF_OTHERS = 128 << 20  # NCCL, gloo and DeepSpeed


@dataclass(frozen=True, slots=True)
class SharedMemoryNeeds:
    """Bytes, at the longest episodes and with as much under way as the bound on staleness admits."""

    trajectories: int  # Ray's object store
    weights: int  # the two buffers of the weight sync, and frozen weights that processes on cores share
    observations: int  # requests to the inference servers
    others: int = _OF_OTHERS

    @classmethod
    def of(cls, config: RunConfig, spec: EnvSpec, plan: Plan) -> Self:
        """``plan``: without learners for an evaluation."""
        store = 0 if config.placement.ray_address else object_store_bytes(config, spec, training=bool(plan.learners))
        asked = [*plan.servers_by_worker(), *([0] if plan.world_model else [])]  # servers: requests lie on their nodes
        rows = sum(plan.servers[server].node == 0 for server in asked) * plan.envs_per_worker
        return cls(store, _weights(config, spec, plan), rows * row_bytes(config, spec))

    @property
    def total(self) -> int:
        return self.trajectories + self.weights + self.observations + self.others

    def describe(self) -> str:
        """Such as ``30.1 GiB (29.5 trajectories, 0.5 weights, 0.0 observations, 0.1 others)``."""
        parts = ", ".join(f"{nbytes / GIB:.1f} {name}" for name, nbytes in asdict(self).items())
        return f"{self.total / GIB:.1f} GiB ({parts})"

    def check(self) -> None:
        """Raise UserError if this machine has less than that free."""
        free = free_shared_memory()
        if free < self.total:
            raise UserError(
                f"the run needs {self.describe()} of shared memory, and {shared_root()} has {free / GIB:.1f} GiB free; "
                f"{enlarge(self.total)}, or lower train.batch_episodes, train.max_staleness or env.image_size"
            )


def object_store_bytes(config: RunConfig, spec: EnvSpec, *, training: bool = True) -> int:
    """Room for one super-batch, and for the trajectories that admission lets be under way or trained again.

    The store admits ``(max_staleness + 1) * batch_episodes`` of them (``ReplayStore.capacity``, and ``reuse``). What is
    imagined waits with them, and is part of one super-batch.
    """
    frames = 2 * _RECORDED * spec.max_episode_steps * spec.image_size**2 * 3
    if not training:
        return _LEAST_STORE + frames
    train = config.train
    branches = 0 if config.world_model is None else config.world_model.branches
    episodes = train.batch_episodes * ((config.max_staleness + 1) * (1 + branches) + train.reuse + branches)
    chunks = -(-spec.max_episode_steps // config.policy.chunk_size) + (config.algo.bootstrap_rule != "never")
    return _LEAST_STORE + int(1.05 * episodes * chunks * row_bytes(config, spec)) + frames * config.log.video


def row_bytes(config: RunConfig, spec: EnvSpec) -> int:
    """Of one row: the observation, the action chunk with its record and its random numbers, and 2 KiB of the rest."""
    policy = config.policy.spec(spec)
    arrays = sum(np.dtype(x.dtype).itemsize * math.prod(x.shape) for x in policy.record.values())
    arrays += sum(4 * math.prod(x.shape) for x in policy.draws.values())
    chunk = 2 * 4 * policy.chunk_size * policy.action_dim  # actions and log-probabilities
    return len(spec.views) * spec.image_size**2 * 3 + 4 * spec.proprio_dim + arrays + chunk + 2048


def _weights(config: RunConfig, spec: EnvSpec, plan: Plan) -> int:
    if config.placement.virtual is not None or not plan.learners:
        return 0
    itemsize = {"fp32": 4, "bf16": 2}[config.learner.precision]
    sizes = policy_sizes(config.policy, spec, itemsize)
    shared = any(s.kind == "cpu" and sharing_learner(config, plan, s) is not None for s in plan.servers)
    return itemsize * (2 * sizes.trained + (sizes.parameters if shared else 0))
