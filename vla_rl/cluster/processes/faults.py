"""Where faults of `vla-rl chaos` happen inside processes; without it, none of this is in the way."""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from envs.base import VectorEnv
from envs.base.wrapper import EnvWrapper
from vla_rl.core.faults import VARIABLE, strikes
from vla_rl.core.records import Observation, StepResult, SuperBatch

log = logging.getLogger(__name__)


class Crash(Exception):
    """A simulator that fails because chaos wants it to."""


def unreliable(env: VectorEnv) -> VectorEnv:
    """``env`` with the faults ``exception`` and ``nan_observation``; ``env`` itself without chaos."""
    return _UnreliableEnv(env) if VARIABLE in os.environ else env


def unreliable_batch(batch: SuperBatch) -> SuperBatch:
    """``batch``; with the fault ``nan_loss``, one whose loss is not finite."""
    if not strikes("nan_loss"):
        return batch
    return replace(batch, logprobs=np.full_like(batch.logprobs, np.nan))


class _UnreliableEnv(EnvWrapper):
    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> StepResult:
        if strikes("exception"):
            log.warning("it is about to fail, by chaos")
            raise Crash("an exception in a simulator, by chaos")
        return self._env.step(env_ids, actions)

    def observe(self, env_ids: Sequence[int], out: Observation) -> None:
        self._env.observe(env_ids, out)
        if strikes("nan_observation"):
            out.proprio[env_ids[0]] = np.nan
