"""One action of an environment here is a chunk: the tokens of some control steps. One observation follows it.

observation   "image": uint8 [H, W, 3]; "numbers": float32 [P + 2], proprioception, elapsed time and task
action        the policy's tokens of a chunk, integers [K * A]
reward        1 at success, which ends the episode
"""

import json
from abc import abstractmethod
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envs.base import empty_observation
from envs.libero.bootstrap import import_libero
from envs.libero.protocol.conventions import NO_OP, pose, to_robosuite
from envs.libero.protocol.tasks import load_init_states, suite_tasks
from peers.setting import Setting
from vla_rl.core.records import EpisodeSpec
from vla_rl.policies.openvla_oft.action_codec import ActionCodec, Bounds

Seen = dict[str, np.ndarray]
NUM_BINS = 256


def chunk_env(setting: Setting, number: int) -> "ChunkEnv":
    """The ``number``-th environment. Its simulator is built at the first reset, in the process that plays it."""
    return (LiberoChunks if setting.libero else TabletopChunks)(setting, number)


def decode(setting: Setting, tokens: np.ndarray) -> np.ndarray:
    """float32 [K, A]: the actions of a chunk's tokens, in physical units."""
    codec = _codec(str(setting.config.policy.checkpoint))
    return codec.decode(np.asarray(tokens).astype(np.uint8).reshape(-1, codec.action_dim))


@cache
def _codec(checkpoint: str) -> ActionCodec:
    return ActionCodec(Bounds.from_dict(json.loads(Path(checkpoint, "statistics.json").read_text())["action"]))


class ChunkEnv(gymnasium.Env[Seen, np.ndarray]):
    """See the module."""

    def __init__(self, setting: Setting, number: int) -> None:
        self.setting, self._next, self._built = setting, number, False
        spec, size = setting.spec, setting.spec.image_size
        image = spaces.Box(0, 255, (size, size, 3), np.uint8)
        numbers = spaces.Box(-np.inf, np.inf, (spec.proprio_dim + 2,), np.float32)
        self.observation_space: Any = spaces.Dict({"image": image, "numbers": numbers})
        self.action_space = spaces.MultiDiscrete([NUM_BINS] * (setting.config.policy.chunk_size * spec.action_dim))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Seen, dict[str, Any]]:
        """The environment's next episode; all environments together take the initial states in turn."""
        if not self._built:
            self._build()
            self._built = True
        episode = self._next
        self._next += self.setting.environments
        return self._begin(episode), {}

    def step(self, action: np.ndarray) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
        seen, success, ended = self._play(action)
        return seen, float(success), success, ended and not success, {}

    @abstractmethod
    def _build(self) -> None: ...

    @abstractmethod
    def _begin(self, episode: int) -> Seen: ...

    @abstractmethod
    def _play(self, tokens: np.ndarray) -> tuple[Seen, bool, bool]:
        """The observation after a chunk, success, and whether the episode has ended."""


class TabletopChunks(ChunkEnv):
    """This project's tabletop."""

    def _build(self) -> None:
        from envs import make_env

        self._env = make_env(self.setting.env, 1)
        self._rows = empty_observation(self.setting.spec, 1)

    def _begin(self, episode: int) -> Seen:
        tasks, starts = len(self.setting.spec.instructions), self.setting.spec.init_states
        self._env.reset([0], [EpisodeSpec(episode, episode % tasks, episode, episode // tasks % starts)])
        return self._seen()

    def _play(self, tokens: np.ndarray) -> tuple[Seen, bool, bool]:
        result = self._env.step([0], decode(self.setting, tokens)[None])
        self.setting.count(int(result.num_steps[0]))
        return self._seen(), bool(result.success[0]), bool(result.terminated[0] or result.truncated[0])

    def _seen(self) -> Seen:
        self._env.observe([0], self._rows)
        rows = self._rows
        numbers = np.array([*rows.proprio[0], rows.elapsed[0], rows.task[0]], np.float32)
        return {"image": rows.images[0, 0].copy(), "numbers": numbers}


class LiberoChunks(ChunkEnv):
    """LIBERO's task, in hf-libero's simulator or in the drop-in for it."""

    def _build(self) -> None:
        config = self.setting.env
        self._task, self._settle = suite_tasks(config.suite)[config.tasks[0]], config.settle_steps
        size = config.image_size
        self._env = libero_class(self.setting)(
            bddl_file_name=str(self._task.bddl_file), camera_heights=size, camera_widths=size
        )

    def _begin(self, episode: int) -> Seen:
        states = load_init_states(self._task)
        self._env.seed(episode)
        self._env.reset()
        self._env.set_init_state(states[episode % len(states)])
        for _ in range(self._settle):
            seen, *_ = self._env.step(NO_OP)
        return self._seen(seen)

    def _play(self, tokens: np.ndarray) -> tuple[Seen, bool, bool]:
        seen, success, ended, _ = self._env.step(tokens)
        return self._seen(seen), bool(success), ended

    def _seen(self, obs: Seen) -> Seen:
        return {"image": obs["agentview_image"][::-1, ::-1].copy(), "numbers": obs["numbers"]}


def libero_class(setting: Setting) -> type:
    """``OffScreenRenderEnv``, hf-libero's or this project's, whose ``step`` takes a chunk's tokens, too.

    Whatever wraps an ``OffScreenRenderEnv`` can then play chunks. An observation has the key "numbers" besides.
    """
    import_libero(setting.env.assets)
    if setting.simulator == "ours":
        from envs.libero.dropin import OffScreenRenderEnv as Ours

        kind: Any = Ours
        given: dict[str, Any] = {"lazy_images": True, "joint_draws": "as_hf_libero"}  # one frame of a chunk is drawn
    else:
        from libero.libero.envs.env_wrapper import OffScreenRenderEnv as Theirs

        kind, given = Theirs, {}

    class ChunkedLibero(kind):
        _steps = 0
        action_spec = -np.ones(7), np.ones(7)  # as robosuite's environments say it

        def __init__(self, **arguments: Any) -> None:
            super().__init__(camera_names=["agentview"], **given, **arguments)

        def reset(self) -> Seen:
            return self._with_numbers(super().reset())

        def set_init_state(self, init_state: np.ndarray) -> Seen:
            self._steps = 0
            return self._with_numbers(super().set_init_state(init_state))

        def step(self, action: np.ndarray) -> tuple[Seen, float, bool, dict[str, Any]]:
            """A control step [7] that does not count, for settling; or a chunk [K * 7]."""
            if len(action) == len(NO_OP):
                obs, reward, done, info = super().step(action)
                return self._with_numbers(obs), reward, done, info
            commands = to_robosuite(decode(setting, action))
            for played, command in enumerate(commands, start=1):
                obs, reward, success, info = super().step(command)
                if success or self._steps + played == setting.spec.max_episode_steps:
                    break
            self._steps += played
            setting.count(played)
            ended = success or self._steps == setting.spec.max_episode_steps
            return self._with_numbers(obs), float(success), ended, info

        def _with_numbers(self, obs: Seen) -> Seen:
            parts = (obs["robot0_eef_pos"], obs["robot0_eef_quat"], obs["robot0_gripper_qpos"])
            elapsed = self._steps / setting.spec.max_episode_steps
            obs["numbers"] = np.array([*pose(*parts), elapsed, 0.0], np.float32)
            return obs

    return ChunkedLibero
