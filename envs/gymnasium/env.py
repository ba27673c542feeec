"""Any ``gymnasium.Env`` or ``VectorEnv`` with images and Box actions as a simulator; see ``config``.

Each environment is one of gymnasium's, played in this process. An episode is a reset with the episode's seed;
benchmark initial state i is the reset with seed i. Wrappers of the registration stay.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.base import EnvError, EnvInstance, Outcome, SequentialEnv
from envs.gymnasium.config import GymnasiumConfig
from envs.gymnasium.played import Played, naming
from envs.gymnasium.probe import probe
from envs.gymnasium.sight import Sight
from envs.gymnasium.spaces import action_space
from envs.gymnasium.success import Success
from vla_rl.core.records import EnvSpec, EpisodeSpec

Infos = list[dict[str, Any]]  # of the steps of a probe
_SEEDS = 1_000_000_007  # training's seeds come after those of the initial states


def env_spec(config: GymnasiumConfig) -> EnvSpec:
    """See ``envs.env_spec``; makes one environment, plays it for a moment, and closes it.

    Raises EnvError, also where only some later step would: if nothing says what success is.
    """
    env, spec, _, success, infos = _examined(config)
    env.close()
    with naming(config.id):
        success.check(infos)
    return spec


@dataclass
class _Instance(EnvInstance):
    env: Played
    observation: Any


class GymnasiumVectorEnv(SequentialEnv[_Instance]):
    """See the module. Raises EnvError if the environment does not exist, or is not one that policies can act in.

    Its ``spec`` is that of ``env_spec``, found in the same way. Where an environment differs from one time to the next,
    so do the ranges of its state: policies use those of the process that has started the run.
    """

    def __init__(self, config: GymnasiumConfig, num_envs: int) -> None:
        first, spec, self._sight, self._success, _ = _examined(config)
        super().__init__(spec, num_envs)
        self._config, self._idle = config, [first]

    def _start(self, env_id: int, episode: EpisodeSpec, previous: _Instance | None) -> _Instance:
        if previous is not None and previous.env.is_open:
            env = previous.env
        else:
            env = self._idle.pop() if self._idle else Played(self._config)
        seed = episode.seed % _SEEDS + self.spec.init_states if episode.init_state is None else episode.init_state
        observation, _ = env.reset(seed=seed)
        return _Instance(episode, env=env, observation=observation)

    def _advance(self, instance: _Instance, action: np.ndarray) -> Outcome:
        command = self.spec.actions.clip(np.asarray(action, np.float64))
        with naming(self._config.id):
            instance.observation, reward, terminated, truncated, info = instance.env.step(command)
            success = self._success.of(info, terminated, reward)
        late = truncated or instance.steps + 1 >= self.spec.max_episode_steps
        ended = terminated or (success and (self._config.ends_on_success or late))
        paid = reward if self._config.reward == "env" else float(success and ended)
        return Outcome(paid, terminated=ended, success=success and ended, truncated=truncated)

    def _images(self, instance: _Instance) -> np.ndarray:
        with naming(self._config.id):
            return self._sight.images(instance.observation, instance.env.render, self.spec.image_size)

    def _proprio(self, instance: _Instance) -> np.ndarray:
        with naming(self._config.id):
            return self._sight.numbers(instance.observation)

    def close(self) -> None:
        envs = [*self._idle, *(instance.env for instance in self._instances if instance is not None)]
        super().close()
        self._idle = []
        for env in envs:
            env.close()


make_env = GymnasiumVectorEnv


def _examined(config: GymnasiumConfig) -> tuple[Played, EnvSpec, Sight, Success, Infos]:
    """An environment, and what its spaces and a probe say of it. Raises EnvError."""
    env = Played(config)
    try:
        with naming(config.id):
            return env, *_examine(config, env)
    except BaseException:
        env.close()
        raise


def _examine(config: GymnasiumConfig, env: Played) -> tuple[EnvSpec, Sight, Success, Infos]:
    registered = env.env.spec.max_episode_steps if env.env.spec is not None else None
    limit = config.max_episode_steps or registered or getattr(env.unwrapped, "max_episode_steps", None)
    if limit is None:
        raise EnvError("it has no time limit: set env.max_episode_steps")
    sight, actions = Sight.choose(env.observation_space, config), action_space(env, config)
    found = probe(env, sight, actions, limit)
    success = Success.choose(config.success, found.infos)
    name = config.id.rpartition(":")[2]
    words = name.rpartition("/")[2].rpartition("-v")[0] or name
    spec = EnvSpec(
        name=name,
        views=tuple(sight.views),
        image_size=config.image_size,
        proprio_dim=len(sight.bounds()),
        proprio_range=found.ranges,
        actions=actions,
        max_episode_steps=limit,
        instructions=(config.instruction or words.replace("_", " "),),
        init_states=config.start_states,
        notes=(*sight.notes, success.note, *found.notes),
    )
    return spec, sight, success, found.infos
