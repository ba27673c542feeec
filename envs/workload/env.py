"""Episodes of known length and known cost, for tests and benchmarks of the runtime itself.

Nothing is simulated: a control step and an observation take the time that the configuration says, slept. Every image
spells out the episode's id and the step it was taken at, with every byte of it, so that a test can tell whether what is
trained on is what the simulator wrote: ``decode_image`` finds torn, mixed and unwritten images.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from envs.base import EnvError, VectorEnv
from envs.workload.config import WorkloadConfig
from vla_rl.core.records import EnvSpec, Episode, Observation, StepResult

ACTION_DIM = 7
INSTRUCTIONS = ("wait for the bell", "wait for the light")
MIN_IMAGE_SIZE = 4  # 48 bytes; one copy of the message takes 32

_MESSAGE = np.dtype([("episode", "<i8"), ("step", "<i4"), ("checksum", "<u4")])
_LOWEST, _SPREAD = 15, 15  # half bytes 0..15 become the pixel values 15, 30, ..., 240: never 0


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """How an episode goes, whatever the actions."""

    length: int  # control steps
    success: bool
    truncated: bool  # never together with success


def plan_episode(config: WorkloadConfig, seed: int) -> EpisodePlan:
    """A pure function. Half of the seeds succeed, a quarter fail (terminated), a quarter run into a time limit.

    The time limit of a truncated episode is its own length, ``max_episode_steps`` * (1 - u * ``length_spread``) with u
    uniform in [0, 1) as for every other episode, so that lengths do not depend on outcomes.
    """
    u, coin = np.random.default_rng(np.random.SeedSequence(seed)).random(2)
    length = max(1, round(config.max_episode_steps * (1.0 - u * config.length_spread)))
    return EpisodePlan(length, success=bool(coin < 0.5), truncated=bool(coin >= 0.75))


def encode_image(episode: int, step: int, size: int) -> np.ndarray:
    """uint8 [size, size, 3]: id and step with a checksum, over and over, no byte of it 0."""
    message = np.zeros((), _MESSAGE)
    message["episode"], message["step"] = episode, step
    message["checksum"] = zlib.crc32(message.tobytes())
    data = np.frombuffer(message.tobytes(), np.uint8)
    pixels = np.stack([data >> 4, data & 15], axis=1).ravel() * np.uint8(_SPREAD) + np.uint8(_LOWEST)
    return np.resize(pixels, (size, size, 3))


def decode_image(image: np.ndarray) -> tuple[int, int]:
    """(episode id, step) of an image [H, W, 3] made by ``encode_image``.

    Raises ValueError where a single byte of it differs from what was written.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.size < 2 * _MESSAGE.itemsize:
        raise ValueError(f"not an image of the workload simulator: {image.dtype} {image.shape}")
    digits = (image.ravel()[: 2 * _MESSAGE.itemsize].astype(np.int64) - _LOWEST) // _SPREAD & 15
    data = (digits[0::2] << 4 | digits[1::2]).astype(np.uint8)
    message = np.frombuffer(data.tobytes(), _MESSAGE)[0]
    episode, step = int(message["episode"]), int(message["step"])
    if not np.array_equal(image, encode_image(episode, step, image.shape[0])):
        zeros = int((image == 0).sum())
        raise ValueError(f"image is not as the workload simulator wrote it ({zeros} of {image.size} bytes are 0)")
    return episode, step


def workload_spec(config: WorkloadConfig) -> EnvSpec:
    """The spec of ``WorkloadVectorEnv(config, ...)``. Raises EnvError where the image cannot hold its message."""
    if config.image_size < MIN_IMAGE_SIZE:
        raise EnvError(f"env.image_size={config.image_size} cannot hold an episode's id: use {MIN_IMAGE_SIZE} or more")
    return EnvSpec(
        name="workload",
        views=("message",),
        image_size=config.image_size,
        proprio_dim=1,
        action_dim=ACTION_DIM,
        max_episode_steps=config.max_episode_steps,
        instructions=INSTRUCTIONS,
    )


class WorkloadVectorEnv(VectorEnv):
    """See the module. Proprioception is (executed steps + 1) / max_episode_steps, never 0. Actions change nothing."""

    def __init__(self, config: WorkloadConfig, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots={num_slots}: a vectorized environment needs at least one slot")
        self.spec = workload_spec(config)
        self.num_slots = num_slots
        self._config = config
        self._episodes: list[Episode | None] = [None] * num_slots
        self._plans = [EpisodePlan(0, success=False, truncated=False)] * num_slots
        self._steps = np.zeros(num_slots, np.int64)
        self._frames: list[list[np.ndarray]] = [[] for _ in range(num_slots)]

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        for slot, episode in zip(slots, episodes, strict=True):
            if not 0 <= episode.task < len(INSTRUCTIONS):
                raise EnvError(
                    f"episode {episode.id} asks for task {episode.task}: "
                    f"workload has the tasks 0..{len(INSTRUCTIONS) - 1}"
                )
            if episode.init_state is not None and not 0 <= episode.init_state < self.spec.init_states:
                raise EnvError(
                    f"episode {episode.id} asks for initial state {episode.init_state}: "
                    f"workload has the states 0..{self.spec.init_states - 1}"
                )
            self._episodes[slot] = episode
            self._plans[slot] = plan_episode(self._config, episode.seed)
            self._steps[slot] = 0
            self._frames[slot] = []
        _sleep(self._config.reset_ms * len(slots))

    def step(self, slots: Sequence[int], actions: np.ndarray) -> StepResult:
        """See VectorEnv. Sleeps ``step_ms`` for every executed control step of every slot: they share one core."""
        n = len(slots)
        if actions.ndim != 3 or actions.shape[0] != n or actions.shape[1] < 1 or actions.shape[2] != ACTION_DIM:
            raise ValueError(f"actions of shape {actions.shape} for {n} slots: need [{n}, K, {ACTION_DIM}]")
        if len(set(slots)) != n:
            raise ValueError(f"slots {list(slots)} name a slot twice")
        plans = [self._plans[s] for s in slots]
        left = np.array([plan.length for plan in plans], np.int64) - self._steps[list(slots)]
        if (left <= 0).any():
            over = [s for s, steps in zip(slots, left, strict=True) if steps <= 0]
            raise ValueError(f"slots {over} run no episode: reset them before stepping them")
        num_steps = np.minimum(left, actions.shape[1]).astype(np.int32)
        ended = num_steps == left
        success = ended & np.array([plan.success for plan in plans])
        truncated = ended & np.array([plan.truncated for plan in plans])
        rewards = np.zeros(actions.shape[:2], np.float32)
        rewards[np.arange(n), num_steps - 1] = success
        for slot, steps in zip(slots, num_steps.tolist(), strict=True):
            self._advance(slot, steps)
        _sleep(self._config.step_call_ms + self._config.step_ms * int(num_steps.sum()))
        return StepResult(rewards, num_steps, ended & ~truncated, truncated, success)

    def _advance(self, slot: int, steps: int) -> None:
        episode = self._episodes[slot]
        assert episode is not None
        for _ in range(steps):
            self._steps[slot] += 1
            if episode.record:
                self._frames[slot].append(encode_image(episode.id, int(self._steps[slot]), self._config.image_size))

    def observe(self, slots: Sequence[int], out: Observation) -> None:
        """See VectorEnv. Sleeps ``render_ms`` for every slot."""
        for slot in slots:
            episode = self._episodes[slot]
            if episode is None:
                raise ValueError(f"slot {slot} runs no episode: reset it before observing it")
            step = int(self._steps[slot])
            out.images[slot, 0] = encode_image(episode.id, step, self._config.image_size)
            out.proprio[slot] = (step + 1) / self._config.max_episode_steps
            out.task[slot] = episode.task
        _sleep(self._config.render_call_ms + self._config.render_ms * len(slots))

    def frames(self, slot: int) -> list[np.ndarray]:
        return self._frames[slot]

    def potential(self, slots: Sequence[int]) -> np.ndarray:
        """The executed share of the episode."""
        return np.array([self._steps[s] / self._plans[s].length for s in slots], np.float32)

    def expert_action(self, slot: int) -> np.ndarray:
        raise EnvError("the workload simulator has no expert: its episodes end as their seed says, whatever is done")

    def close(self) -> None:
        self._frames = [[] for _ in range(self.num_slots)]


def _sleep(milliseconds: float) -> None:
    if milliseconds > 0.0:
        time.sleep(milliseconds * 1e-3)
