"""The protocol that every simulator speaks.

A ``VectorEnv`` owns a fixed number of slots; each slot runs one episode at a time. Whoever drives it (an EnvWorker, a
demonstration collector) decides which slots to reset, step and observe, so that no slot waits for another.
Actions and observations follow one convention for all simulators; each simulator maps them to its own:

* actions ``[dx, dy, dz, droll, dpitch, dyaw, gripper]`` in the simulator's own units, gripper 0 = closed .. 1 = open
  (the convention of the OpenVLA data sets);
* images upright RGB, uint8.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec, Episode, Observation, StepResult


class EnvError(UserError):
    """A simulator cannot be set up or cannot go on. The text names the cause and the remedy."""


class VectorEnv(ABC):
    """``num_slots`` independent episodes of one simulator in one process."""

    spec: EnvSpec
    num_slots: int

    @abstractmethod
    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """Start ``episodes[i]`` in ``slots[i]``, up to the point where the first observation can be read.

        Raises EnvError where the task or the initial state does not exist.
        """

    @abstractmethod
    def step(self, slots: Sequence[int], actions: np.ndarray) -> StepResult:
        """Execute ``actions[i]`` (float32 [n, K, A]) in ``slots[i]``, each stopping at the step where its episode ends.

        Stepping a slot whose episode has ended is a caller's error (ValueError).
        """

    @abstractmethod
    def observe(self, slots: Sequence[int], out: Observation) -> None:
        """Write the current observation of each slot s into row s of ``out`` (leading dimension ``num_slots``).

        Rendering happens here and only here, so frames that nobody reads cost nothing.
        """

    @abstractmethod
    def frames(self, slot: int) -> list[np.ndarray]:
        """Frames (uint8 [H, W, 3], one a control step) of a slot whose episode asked for ``record``; else empty."""

    @abstractmethod
    def expert_action(self, slot: int) -> np.ndarray:
        """float32 [A]: the next action of the scripted expert, which reads privileged state.

        Raises EnvError where no expert exists for the slot's task.
        """

    @abstractmethod
    def potential(self, slots: Sequence[int]) -> np.ndarray:
        """float32 [n], 0..1: how near to success each slot's state is, also at an episode's end.

        See ``envs.base.shaping``.

        Raises EnvError where that is not known.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; safe to call twice."""


def empty_observation(spec: EnvSpec, rows: int) -> Observation:
    """Zeroed arrays of the right shapes, for tests and single-process loops."""
    size = spec.image_size
    return Observation(
        images=np.zeros((rows, len(spec.views), size, size, 3), np.uint8),
        proprio=np.zeros((rows, spec.proprio_dim), np.float32),
        task=np.zeros((rows,), np.int32),
    )
