"""The interface of every simulator, and the bookkeeping that all simulators share.

A ``VectorEnv`` has a fixed number of environments; each plays one episode at a time. The caller (an EnvWorker, or the
collector of demonstrations) decides which environments to reset, step and observe, so that none waits for another.
Actions and observations follow one convention; each simulator converts them to its own:

* actions as ``EnvSpec.actions`` declares them, in the simulator's own units;
* images upright RGB, uint8.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import numpy as np
from PIL import Image

from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec, EpisodeSpec, Observation, StepResult


class EnvError(UserError):
    """A simulator cannot be set up or cannot go on. The text names the cause and the remedy."""


class NothingPlayable(EnvError):
    """None of a suite's tasks can be played here."""


class VectorEnv(ABC):
    """``num_envs`` independent environments of one simulator in one process. ``env_ids`` name some of them, from 0."""

    spec: EnvSpec
    num_envs: int

    @classmethod
    def make_env(cls, config: Any, num_envs: int) -> Self:
        """``num_envs`` environments, as ``envs.make_env`` wants them of a class of another package.

        Such a class also has ``Config``, its keys, and a static method ``env_spec(config)``: the ``spec`` of its
        environments, without building a scene.
        """
        make: Any = cls
        env: Self = make(config, num_envs)
        return env

    @abstractmethod
    def reset(self, env_ids: Sequence[int], episodes: Sequence[EpisodeSpec]) -> None:
        """Start ``episodes[i]`` in ``env_ids[i]``, up to the point where the first observation can be read.

        Raises EnvError if the task or the initial state does not exist.
        """

    @abstractmethod
    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> StepResult:
        """Execute the action chunks ``actions[i]`` (float32 [n, K, A]) in ``env_ids[i]``.

        A chunk stops at the step where its episode ends. Raises ValueError if an environment has no running episode or
        is named twice, if the actions have another shape, and if they are not finite.
        """

    @abstractmethod
    def observe(self, env_ids: Sequence[int], out: Observation) -> None:
        """Write the current observation of each environment e into row e of ``out`` (leading dimension ``num_envs``).

        Rendering happens here and nowhere else, so frames that nobody reads cost nothing.
        """

    @abstractmethod
    def frames(self, env_id: int) -> list[np.ndarray]:
        """Frames of the episode, uint8 [H, W, 3], one per control step; empty unless it asked to ``record``."""

    @abstractmethod
    def expert_action(self, env_id: int) -> np.ndarray:
        """float32 [A]: the next action of the scripted expert, which reads privileged state.

        Raises EnvError if there is no expert for the task.
        """

    @abstractmethod
    def potential(self, env_ids: Sequence[int]) -> np.ndarray:
        """float32 [n], 0..1: how near each state is to success, also at the end of an episode (see ``shaping``).

        Raises EnvError if the simulator does not know.
        """

    def state(self, env_ids: Sequence[int]) -> np.ndarray:
        """float32 [n, S], S = ``spec.state_dim``: what the simulator knows of its scene, for critics in training.

        Raises EnvError if it is not given.
        """
        raise EnvError(f"env.name={self.spec.name} does not give its state: use algo.critic_reads=images or features")

    def bare_seconds(self, env_id: int) -> dict[str, float]:
        """What no faster implementation of the running episode would save, as far as that is known, in seconds.

        "simulate": the physics engine's own part of one control step; "render": filling the pixels of one observation.
        """
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release everything; safe to call twice."""


@dataclass(slots=True)
class EnvInstance:
    """The episode that one environment plays, or has played last."""

    episode: EpisodeSpec
    steps: int = field(default=0, kw_only=True)  # executed control steps
    running: bool = field(default=True, kw_only=True)
    frames: list[np.ndarray] = field(default_factory=list, kw_only=True)


Instance = TypeVar("Instance", bound=EnvInstance)


class SimulatorEnv(VectorEnv, Generic[Instance]):
    """Base class of the simulators: keeps the episode of each environment and checks what the caller asks for.

    Raises ValueError if ``num_envs`` is not positive.
    """

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs={num_envs}: a simulator needs at least one environment")
        self.spec, self.num_envs = spec, num_envs
        self._instances: list[Instance | None] = [None] * num_envs

    def reset(self, env_ids: Sequence[int], episodes: Sequence[EpisodeSpec]) -> None:
        tasks, states = len(self.spec.instructions), self.spec.init_states
        for env_id, episode in zip(env_ids, episodes, strict=True):
            if not 0 <= episode.task < tasks:
                raise EnvError(
                    f"episode {episode.id} asks for task {episode.task}: "
                    f"{self.spec.name} is configured with the tasks 0..{tasks - 1}"
                )
            if episode.init_state is not None and not 0 <= episode.init_state < states:
                raise EnvError(
                    f"episode {episode.id} asks for initial state {episode.init_state} of task {episode.task}: "
                    f"{self.spec.name} has the initial states 0..{states - 1}"
                )
            previous, self._instances[env_id] = self._instances[env_id], None
            self._instances[env_id] = self._start(env_id, episode, previous)

    @abstractmethod
    def _start(self, env_id: int, episode: EpisodeSpec, previous: Instance | None) -> Instance:
        """Start an episode. ``previous`` is what the environment played before; its resources may be used again."""

    def instance(self, env_id: int) -> Instance:
        """The environment's episode, running or ended. Raises ValueError if it was never reset."""
        instance = self._instances[env_id]
        if instance is None:
            raise ValueError(f"env {env_id} holds no episode: reset it first")
        return instance

    def _running_instances(self, env_ids: Sequence[int], actions: np.ndarray) -> list[Instance]:
        """The episodes that these actions advance. Raises ValueError as ``step`` says."""
        n, dim = len(env_ids), self.spec.action_dim
        if actions.ndim != 3 or actions.shape[0] != n or actions.shape[1] < 1 or actions.shape[2] != dim:
            raise ValueError(f"actions of shape {actions.shape} for {n} environments: need [{n}, K, {dim}]")
        if len(set(env_ids)) != n:
            raise ValueError(f"env_ids={list(env_ids)} name an environment twice")
        if not np.isfinite(actions).all():
            raise ValueError(f"actions are not finite: they hold {actions[~np.isfinite(actions)][0]}")
        instances = [self.instance(env_id) for env_id in env_ids]
        for env_id, instance in zip(env_ids, instances, strict=True):
            if not instance.running:
                raise ValueError(f"env {env_id}: episode {instance.episode.id} has ended: reset it first")
        return instances

    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> StepResult:
        instances = self._running_instances(env_ids, actions)
        before = [instance.steps for instance in instances]
        result = self._step(env_ids, instances, actions)
        for row, instance in enumerate(instances):
            instance.steps = before[row] + int(result.num_steps[row])
            instance.running = not (result.terminated[row] or result.truncated[row])
        return result

    @abstractmethod
    def _step(self, env_ids: Sequence[int], instances: list[Instance], actions: np.ndarray) -> StepResult:
        """Execute the chunks, as ``step`` does, in these running episodes.

        The steps and the end of each episode are noted from what this returns; it may also note them while it steps.
        """

    def observe(self, env_ids: Sequence[int], out: Observation) -> None:
        for env_id in env_ids:
            instance = self.instance(env_id)
            out.task[env_id] = instance.episode.task
            out.elapsed[env_id] = instance.steps / self.spec.max_episode_steps
        self._sense(env_ids, out)

    @abstractmethod
    def _sense(self, env_ids: Sequence[int], out: Observation) -> None:
        """Write images and proprioception, as ``observe`` does."""

    def frames(self, env_id: int) -> list[np.ndarray]:
        return self.instance(env_id).frames

    def close(self) -> None:
        self._instances = [None] * self.num_envs


def empty_observation(spec: EnvSpec, rows: int) -> Observation:
    """Zeroed arrays of the right shapes, for tests and single-process loops."""
    size = spec.image_size
    return Observation(
        images=np.zeros((rows, len(spec.views), size, size, 3), np.uint8),
        proprio=np.zeros((rows, spec.proprio_dim), np.float32),
        task=np.zeros((rows,), np.int32),
        elapsed=np.zeros((rows,), np.float32),
    )


def resized(images: np.ndarray, size: int) -> np.ndarray:
    """uint8 [n, size, size, 3] of uint8 [n, H, W, 3], by Lanczos resampling."""
    if images.shape[1:3] == (size, size):
        return np.ascontiguousarray(images)
    frames = [Image.fromarray(np.ascontiguousarray(image)) for image in images]
    return np.stack([np.asarray(frame.resize((size, size), Image.Resampling.LANCZOS)) for frame in frames])
