"""Any ``gymnasium.Env`` or ``VectorEnv`` with images and Box actions as a simulator; see ``config``.

Each environment is one of gymnasium's, played in this process. An episode is a reset with the episode's seed;
benchmark initial state i is the reset with seed i. Wrappers of the registration stay.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np

from envs.base import EnvError, EnvInstance, Outcome, SequentialEnv
from envs.gymnasium.config import GymnasiumConfig
from envs.gymnasium.spaces import RENDER, action_space, as_view, image_keys, part, state_keys, state_size
from envs.gymnasium.vector_of_one import VectorOfOne
from vla_rl.core.records import EnvSpec, EpisodeSpec

_SUCCESS = ("is_success", "success")
_SEEDS = 1_000_000_007  # training's seeds come after those of the initial states


def env_spec(config: GymnasiumConfig) -> EnvSpec:
    """See ``envs.env_spec``; makes one environment to read its spaces, and closes it. Raises EnvError."""
    env = _make(config)
    try:
        return _spec(config, env)
    finally:
        env.close()


@dataclass
class _Instance(EnvInstance):
    env: gymnasium.Env
    observation: Any


class GymnasiumVectorEnv(SequentialEnv[_Instance]):
    """See the module. Raises EnvError if the environment does not exist, or is not one that policies can act in."""

    def __init__(self, config: GymnasiumConfig, num_envs: int) -> None:
        first = _make(config)
        super().__init__(_spec(config, first), num_envs)
        self._config, self._idle = config, [first]
        self._images_of, self._state_of = image_keys(first, config.image), state_keys(first, config.state)

    def _start(self, env_id: int, episode: EpisodeSpec, previous: _Instance | None) -> _Instance:
        if previous is not None:
            env = previous.env
        else:
            env = self._idle.pop() if self._idle else _make(self._config)
        seed = episode.seed % _SEEDS + self.spec.init_states if episode.init_state is None else episode.init_state
        observation, _ = env.reset(seed=seed)
        return _Instance(episode, env=env, observation=observation)

    def _advance(self, instance: _Instance, action: np.ndarray) -> Outcome:
        command = self.spec.actions.clip(np.asarray(action, np.float64)).astype(instance.env.action_space.dtype)
        instance.observation, reward, terminated, truncated, info = instance.env.step(command)
        success = self._success(info, bool(terminated), float(reward))
        late = bool(truncated) or instance.steps + 1 >= self.spec.max_episode_steps
        ended = bool(terminated) or (success and (self._config.ends_on_success or late))
        paid = float(reward) if self._config.reward == "env" else float(success and ended)
        return Outcome(paid, terminated=ended, success=success and ended, truncated=bool(truncated))

    def _success(self, info: dict[str, Any], terminated: bool, reward: float) -> bool:
        key = self._config.success
        if key is not None and key not in info:
            raise EnvError(f"env.success={key}: the info of a step of {self._config.id} has only {sorted(info)}")
        found = next((name for name in (key, *_SUCCESS) if name in info), None)
        return terminated and reward > 0 if found is None else bool(info[found])

    def _images(self, instance: _Instance) -> np.ndarray:
        size = self.spec.image_size
        return np.stack([as_view(self._view(instance, key), size) for key in self._images_of])

    def _view(self, instance: _Instance, key: str) -> np.ndarray:
        if key != RENDER:
            return part(instance.observation, key)
        image: Any = instance.env.render()
        if not isinstance(image, np.ndarray):
            raise EnvError(f"{self._config.id}: render() gives no image but {type(image).__name__}; set env.image")
        return image

    def _proprio(self, instance: _Instance) -> np.ndarray:
        return np.concatenate([part(instance.observation, key).ravel() for key in self._state_of])

    def close(self) -> None:
        envs = [*self._idle, *(instance.env for instance in self._instances if instance is not None)]
        super().close()
        self._idle = []
        for env in envs:
            env.close()


make_env = GymnasiumVectorEnv


def _make(config: GymnasiumConfig) -> gymnasium.Env:
    """One environment. Raises EnvError."""
    from envs.gymnasium.registration import register

    register()
    options: dict[str, Any] = dict(config.options)
    if config.image is None or RENDER in config.image:
        options.setdefault("render_mode", "rgb_array")
    try:
        return _make_one(config.id, options)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError, AssertionError) as error:
        raise EnvError(
            f"env.id={config.id} with {options}: gymnasium cannot make it ({str(error)[:300]}); install its package, "
            "and write MODULE:ID if a module has to be imported first"
        ) from error


def _make_one(name: str, options: dict[str, Any]) -> gymnasium.Env:
    module, _, plain = name.rpartition(":")
    if module:
        import_module(module)
    registered = gymnasium.registry.get(plain)
    if registered is not None and registered.entry_point is None and registered.vector_entry_point is not None:
        vector = gymnasium.make_vec(plain, num_envs=1, vectorization_mode="vector_entry_point", **options)
        return VectorOfOne(vector)
    env: gymnasium.Env = gymnasium.make(plain, disable_env_checker=True, **options)
    return env


def _spec(config: GymnasiumConfig, env: gymnasium.Env) -> EnvSpec:
    images, state = image_keys(env, config.image), state_keys(env, config.state)
    registered = env.spec.max_episode_steps if env.spec is not None else None
    steps = config.max_episode_steps or registered or getattr(env.unwrapped, "max_episode_steps", None)
    if steps is None:
        raise EnvError(f"{config.id} has no time limit: set env.max_episode_steps")
    name = config.id.rpartition(":")[2]
    words = name.rpartition("/")[2].rpartition("-v")[0] or name
    try:
        actions = action_space(env, config)
    except EnvError as error:
        raise EnvError(f"env.id={config.id}: {error}") from None
    return EnvSpec(
        name=name,
        views=images,
        image_size=config.image_size,
        proprio_dim=state_size(env, state),
        actions=actions,
        max_episode_steps=steps,
        instructions=(config.instruction or words.replace("_", " "),),
        init_states=config.start_states,
    )
