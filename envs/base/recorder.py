"""Records whole episodes of any simulator as a LeRobot data set: every control step, failures included."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from envs.base.lerobot_writer import EpisodeData, save_episode
from envs.base.vector_env import VectorEnv, empty_observation
from envs.base.wrapper import EnvWrapper
from vla_rl.core.records import EpisodeSpec, StepResult


@dataclass(slots=True)
class _Tape:
    """What one environment's episode has shown so far, a row per control step."""

    episode: EpisodeSpec
    images: list[np.ndarray] = field(default_factory=list)
    proprio: list[np.ndarray] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


class RecordedEnv(EnvWrapper):
    """``env``, whose finished episodes are saved below ``folder`` (``lerobot_writer.save_episode``).

    A recorded episode executes its chunks step by step, and renders before each: what the simulator does is the same,
    and rendering costs as many times more as a chunk has steps. ``evaluations_only``: leave training episodes alone.
    """

    def __init__(self, env: VectorEnv, folder: Path, *, evaluations_only: bool = False) -> None:
        super().__init__(env)
        self._folder, self._evaluations_only = folder, evaluations_only
        self._tapes: dict[int, _Tape] = {}  # by env id, of running episodes that are recorded
        self._seen = empty_observation(env.spec, env.num_envs)

    def reset(self, env_ids: Sequence[int], episodes: Sequence[EpisodeSpec]) -> None:
        self._env.reset(env_ids, episodes)
        for env_id, episode in zip(env_ids, episodes, strict=True):
            self._tapes.pop(env_id, None)
            if episode.evaluation or not self._evaluations_only:
                self._tapes[env_id] = _Tape(episode)

    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> StepResult:
        if not any(env_id in self._tapes for env_id in env_ids):
            return self._env.step(env_ids, actions)
        n, chunk = actions.shape[:2]
        rewards, num_steps = np.zeros((n, chunk), np.float32), np.zeros(n, np.int32)
        terminated, truncated, success = np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, bool)
        active = np.arange(n)
        for k in range(chunk):
            ids = [env_ids[i] for i in active.tolist()]
            self._record(ids, actions[active, k])
            result = self._env.step(ids, actions[active, k : k + 1])
            rewards[active, k], num_steps[active] = result.rewards[:, 0], k + 1
            terminated[active], truncated[active] = result.terminated, result.truncated
            success[active] = result.success
            for env_id, reward in zip(ids, result.rewards[:, 0].tolist(), strict=True):
                if env_id in self._tapes:
                    self._tapes[env_id].rewards.append(reward)
            ended = result.terminated | result.truncated
            for i in active[ended].tolist():
                self._save(env_ids[i], bool(success[i]))
            active = active[~ended]
            if not len(active):
                break
        return StepResult(rewards, num_steps, terminated, truncated, success)

    def _record(self, env_ids: Sequence[int], actions: np.ndarray) -> None:
        recorded = [env_id for env_id in env_ids if env_id in self._tapes]
        self._env.observe(recorded, self._seen)
        for env_id, action in zip(env_ids, actions, strict=True):
            if (tape := self._tapes.get(env_id)) is not None:
                tape.images.append(self._seen.images[env_id].copy())
                tape.proprio.append(self._seen.proprio[env_id].copy())
                tape.actions.append(action.copy())

    def _save(self, env_id: int, success: bool) -> None:
        tape = self._tapes.pop(env_id, None)
        if tape is None:
            return
        instruction = self.spec.instructions[tape.episode.task]
        images, proprio, actions = np.stack(tape.images), np.stack(tape.proprio), np.stack(tape.actions)
        executed = self.spec.actions.clip(actions)
        rewards = np.array(tape.rewards, np.float32)
        episode = EpisodeData(instruction, images, proprio, executed, rewards, success)
        save_episode(self._folder, episode, self.spec)
