"""Episodes of known length and known cost, for tests and benchmarks of the runtime itself.

Nothing is simulated: a control step and an observation sleep for the configured time. All bytes of an image encode the
episode's id and its step, so that a test can check that the learner trains on what the simulator wrote:
``decode_image`` finds torn, mixed and unwritten images.
"""

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from envs.base import EnvError, SimulatorEnv
from envs.base.vector_env import EnvInstance
from envs.workload.config import WorkloadConfig
from vla_rl.core.actions import end_effector
from vla_rl.core.records import EnvSpec, EpisodeSpec, Observation, StepResult

INSTRUCTIONS = ("wait for the bell", "wait for the light")
MIN_IMAGE_SIZE = 4  # 48 bytes; one copy of the message takes 32

_MESSAGE = np.dtype([("episode", "<i8"), ("step", "<i4"), ("checksum", "<u4")])
_LOWEST, _SPREAD = 15, 15  # half bytes 0..15 become the pixel values 15, 30, ..., 240: never 0


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """Length and outcome of an episode, independent of its actions."""

    length: int  # control steps
    success: bool
    truncated: bool  # never together with success


def plan_episode(config: WorkloadConfig, seed: int) -> EpisodePlan:
    """A pure function of its arguments. Half of the seeds succeed, a quarter fail, a quarter reach a time limit.

    The length is ``max_episode_steps`` * (1 - u * ``length_spread``) with u uniform in [0, 1), whatever the outcome:
    the time limit of a truncated episode is its own length.
    """
    u, coin = np.random.default_rng(np.random.SeedSequence(seed)).random(2)
    length = max(1, round(config.max_episode_steps * (1.0 - u * config.length_spread)))
    return EpisodePlan(length, success=bool(coin < 0.5), truncated=bool(coin >= 0.75))


def encode_image(episode: int, step: int, size: int) -> np.ndarray:
    """uint8 [size, size, 3]: id and step with a checksum, repeated; no byte is 0."""
    message = np.zeros((), _MESSAGE)
    message["episode"], message["step"] = episode, step
    message["checksum"] = zlib.crc32(message.tobytes())
    data = np.frombuffer(message.tobytes(), np.uint8)
    pixels = np.stack([data >> 4, data & 15], axis=1).ravel() * np.uint8(_SPREAD) + np.uint8(_LOWEST)
    return np.resize(pixels, (size, size, 3))


def decode_image(image: np.ndarray) -> tuple[int, int]:
    """(episode id, step) of an image [H, W, 3] made by ``encode_image``.

    Raises ValueError if a single byte differs from what was written.
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


def env_spec(config: WorkloadConfig) -> EnvSpec:
    """See ``envs.env_spec``. Raises EnvError if the image cannot hold its message."""
    if config.image_size < MIN_IMAGE_SIZE:
        raise EnvError(f"env.image_size={config.image_size} cannot hold an episode's id: use {MIN_IMAGE_SIZE} or more")
    return EnvSpec(
        name="workload",
        views=("message",),
        image_size=config.image_size,
        proprio_dim=1,
        actions=end_effector(),
        max_episode_steps=config.max_episode_steps,
        instructions=INSTRUCTIONS,
    )


@dataclass(slots=True)
class _Instance(EnvInstance):
    plan: EpisodePlan


class WorkloadVectorEnv(SimulatorEnv[_Instance]):
    """See the module. Proprioception is (executed steps + 1) / max_episode_steps, never 0. Actions change nothing."""

    def __init__(self, config: WorkloadConfig, num_envs: int) -> None:
        super().__init__(env_spec(config), num_envs)
        self._config = config

    def reset(self, env_ids: Sequence[int], episodes: Sequence[EpisodeSpec]) -> None:
        """See VectorEnv. Sleeps ``reset_ms`` per environment."""
        super().reset(env_ids, episodes)
        _sleep(self._config.reset_ms * len(env_ids))

    def _start(self, env_id: int, episode: EpisodeSpec, previous: _Instance | None) -> _Instance:
        return _Instance(episode, plan_episode(self._config, episode.seed))

    def _step(self, env_ids: Sequence[int], instances: list[_Instance], actions: np.ndarray) -> StepResult:
        """Sleeps ``step_ms`` per executed control step of each environment: they share one core."""
        n, chunk = actions.shape[:2]
        left = np.array([instance.plan.length - instance.steps for instance in instances], np.int64)
        num_steps = np.minimum(left, chunk).astype(np.int32)
        ended = num_steps == left
        success = ended & np.array([instance.plan.success for instance in instances])
        truncated = ended & np.array([instance.plan.truncated for instance in instances])
        rewards = np.zeros((n, chunk), np.float32)
        rewards[np.arange(n), num_steps - 1] = success
        for instance, steps in zip(instances, num_steps.tolist(), strict=True):
            self._advance(instance, steps)
        _sleep(self._config.step_call_ms + self._config.step_ms * int(num_steps.sum()))
        return StepResult(rewards, num_steps, ended & ~truncated, truncated, success)

    def _advance(self, instance: _Instance, steps: int) -> None:
        for _ in range(steps):
            instance.steps += 1
            if instance.episode.record:
                instance.frames.append(encode_image(instance.episode.id, instance.steps, self._config.image_size))

    def _sense(self, env_ids: Sequence[int], out: Observation) -> None:
        """Sleeps ``render_ms`` per environment."""
        for env_id in env_ids:
            instance = self.instance(env_id)
            out.images[env_id, 0] = encode_image(instance.episode.id, instance.steps, self._config.image_size)
            out.proprio[env_id] = (instance.steps + 1) / self._config.max_episode_steps
        _sleep(self._config.render_call_ms + self._config.render_ms * len(env_ids))

    def potential(self, env_ids: Sequence[int]) -> np.ndarray:
        """The executed share of the episode."""
        instances = map(self.instance, env_ids)
        return np.array([instance.steps / instance.plan.length for instance in instances], np.float32)

    def expert_action(self, env_id: int) -> np.ndarray:
        raise EnvError("the workload simulator has no expert: the seed alone decides how its episodes end")


make_env = WorkloadVectorEnv


def _sleep(milliseconds: float) -> None:
    if milliseconds > 0.0:
        time.sleep(milliseconds * 1e-3)
