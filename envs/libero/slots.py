"""Episodes in slots that are stepped in turn: what both LIBERO environments share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from envs.base import EnvError, VectorEnv
from envs.libero.bootstrap import import_libero
from envs.libero.config import LiberoConfig
from envs.libero.protocol.conventions import to_robosuite
from envs.libero.protocol.tasks import load_init_states, select_tasks
from envs.libero.spec import libero_spec
from vla_rl.core.records import Episode, StepResult


@dataclass(slots=True)
class Slot:
    """An episode under way."""

    episode: Episode
    steps: int = field(default=0, kw_only=True)
    running: bool = field(default=True, kw_only=True)
    frames: list[np.ndarray] = field(default_factory=list, kw_only=True)


AnySlot = TypeVar("AnySlot", bound=Slot)


class SlotwiseEnv(VectorEnv, Generic[AnySlot]):
    """``num_slots`` episodes of LIBERO tasks in one process, stepped in turn.

    Raises EnvError where LIBERO, its GL library or a configured task is missing, ValueError where ``num_slots`` is not
    positive.
    """

    def __init__(self, config: LiberoConfig, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots={num_slots}: a vectorized environment needs at least one slot")
        self.assets = import_libero(config.assets)
        self.config = config
        self.num_slots = num_slots
        self.spec = libero_spec(config)
        self.tasks = select_tasks(config.suite, config.tasks)
        self.slots: list[AnySlot | None] = [None] * num_slots

    @abstractmethod
    def _advance(self, slot: AnySlot, command: np.ndarray) -> bool:
        """One control step, float64 [7] in robosuite's convention; whether the goal holds after it."""

    @abstractmethod
    def _frame(self, slot: AnySlot) -> np.ndarray:
        """uint8 [H, W, 3]: the main view, for a recording."""

    def step(self, slots: Sequence[int], actions: np.ndarray) -> StepResult:
        """See ``VectorEnv.step``. Raises ValueError for a slot without a running episode and for NaN or infinity."""
        count, chunk = actions.shape[:2]
        rewards, num_steps = np.zeros((count, chunk), np.float32), np.zeros(count, np.int32)
        success, truncated = np.zeros(count, bool), np.zeros(count, bool)
        for row, index in enumerate(slots):
            slot = self.occupied(index)
            if not slot.running:
                raise ValueError(f"slot {index}: episode {slot.episode.id} has ended: reset it first")
            for command in to_robosuite(actions[row]):
                success[row] = self._advance(slot, command)
                slot.steps += 1
                num_steps[row] += 1
                if slot.episode.record:
                    slot.frames.append(self._frame(slot))
                truncated[row] = not success[row] and slot.steps >= self.spec.max_episode_steps
                slot.running = not (success[row] or truncated[row])
                if not slot.running:
                    break
            rewards[row, num_steps[row] - 1] = success[row]
        return StepResult(rewards, num_steps, terminated=success, truncated=truncated, success=success.copy())

    def frames(self, slot: int) -> list[np.ndarray]:
        """See ``VectorEnv.frames``: the main view after each control step."""
        return self.occupied(slot).frames

    def occupied(self, index: int) -> AnySlot:
        """The slot's episode, running or ended. Raises ValueError where there is none."""
        slot = self.slots[index]
        if slot is None:
            raise ValueError(f"slot {index} holds no episode: reset it first")
        return slot

    def init_state(self, episode: Episode) -> np.ndarray | None:
        """float64 [1 + nq + nv]; None: LIBERO's samplers place things. Raises EnvError where there is no such state."""
        if not 0 <= episode.task < len(self.tasks):
            raise EnvError(f"episode {episode.id} asks for task {episode.task}: there are {len(self.tasks)} (from 0)")
        if episode.init_state is None:
            return None
        task = self.tasks[episode.task]
        states = load_init_states(task)
        if not 0 <= episode.init_state < len(states):
            raise EnvError(
                f"episode {episode.id} asks for initial state {episode.init_state}: {task} has 0..{len(states) - 1}"
            )
        return states[episode.init_state]
