"""A ``VectorEnv`` of this project in gymnasium's form: one environment, or a vector of them.

    observation   each view by its name, uint8 [H, W, 3], upright RGB; "state": float32 [P], where there is one
    action        float32 [A], within the limits that the simulator declares; a gripper's are 0 = closed to 1 = open
    reward        1 at success
    info          "success", "task" (its number), "instruction"

``reset(seed=...)`` makes the placement a function of the seed. ``options`` may have "task", and "init_state", the
number of a benchmark's initial state. Without them, tasks take turns, and the simulator draws placements.
``start_states="benchmark"`` takes the benchmark's initial states in turn instead, as evaluations do.
"""

from collections.abc import Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from pydantic import TypeAdapter, ValidationError

from envs import EnvConfig, make_env
from envs.base import EnvError, VectorEnv, empty_observation
from vla_rl.core.records import EnvSpec, EpisodeSpec, Observation

Values = dict[str, np.ndarray]
StartStates = Literal["sampled", "benchmark"]
_CONFIGS: TypeAdapter[Any] = TypeAdapter(EnvConfig)
_FPS = 20


class UnexpectedArgument(EnvError, TypeError):
    """A key that the simulator does not have: to other libraries, an argument that a function does not have."""


class SimulatorGym(gymnasium.Env[Any, np.ndarray]):
    """One environment. ``config`` and further arguments are the keys of the simulator's config.

    Raises EnvError as ``envs.make_env``, and for keys that the simulator does not have.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": _FPS}  # noqa: RUF012

    def __init__(
        self,
        config: Mapping[str, Any],
        render_mode: str | None = None,
        start_states: StartStates = "sampled",
        **keys: Any,
    ) -> None:
        self._env = _make(config, keys, 1)
        self.max_episode_steps = self._env.spec.max_episode_steps
        self.render_mode = render_mode
        seen, self.action_space = _spaces(self._env.spec)
        self.observation_space: spaces.Space[Any] = seen
        self._episodes = _Episodes(self._env.spec, 1, start_states)
        self._rows = empty_observation(self._env.spec, 1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Values, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._episodes.restart()
        episode = self._episodes.next(0, self.np_random, options or {})
        self._env.reset([0], [episode])
        return self._observe(), {"success": False} | self._episodes.about(0)

    def step(self, action: np.ndarray) -> tuple[Values, float, bool, bool, dict[str, Any]]:
        result = self._env.step([0], np.asarray(action, np.float32)[None, None])
        success, reward = bool(result.success[0]), float(result.rewards[0, 0])
        info = {"success": success} | self._episodes.about(0)
        return self._observe(), reward, bool(result.terminated[0]), bool(result.truncated[0]), info

    def render(self) -> np.ndarray:  # type: ignore[override]
        """uint8 [H, W, 3]: the main view."""
        self._env.observe([0], self._rows)
        image: np.ndarray = self._rows.images[0, 0].copy()
        return image

    def close(self) -> None:
        self._env.close()

    def _observe(self) -> Values:
        self._env.observe([0], self._rows)
        return {name: array[0].copy() for name, array in _values(self._env.spec, self._rows).items()}


class SimulatorVectorGym(gymnasium.vector.VectorEnv[Values, np.ndarray, np.ndarray]):
    """``num_envs`` environments in one process, which share models and renderers. Autoreset happens at the next step.

    Arguments and errors as ``SimulatorGym``.
    """

    def __init__(
        self,
        num_envs: int,
        config: Mapping[str, Any],
        render_mode: str | None = None,
        start_states: StartStates = "sampled",
        **keys: Any,
    ) -> None:
        self._env = _make(config, keys, num_envs)
        self.num_envs, self.render_mode = num_envs, render_mode
        self.metadata = SimulatorGym.metadata | {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space, self.single_action_space = _spaces(self._env.spec)
        batched = gymnasium.vector.utils.batch_space
        self.observation_space = batched(self.single_observation_space, num_envs)
        self.action_space = batched(self.single_action_space, num_envs)
        self._episodes = _Episodes(self._env.spec, num_envs, start_states)
        self._rows = empty_observation(self._env.spec, num_envs)
        self._ended = np.ones(num_envs, bool)
        self._generators: list[np.random.Generator] = []

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Values, dict[str, Any]]:
        rows = range(self.num_envs)
        seeds = seed if isinstance(seed, list) else [None if seed is None else seed + row for row in rows]
        if not self._generators or any(one is not None for one in seeds):
            self._generators = [np.random.default_rng(one) for one in seeds]
            self._episodes.restart()
        given = dict(options or {})
        mask = given.pop("reset_mask", np.ones(self.num_envs, bool))
        self._start(np.flatnonzero(mask).tolist(), given)
        return self._observe(), self._info(np.zeros(self.num_envs, bool))

    def step(self, actions: np.ndarray) -> tuple[Values, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """As gymnasium's vector environments: where an episode has ended, this starts the next one, with reward 0."""
        new, rows = np.flatnonzero(self._ended).tolist(), np.flatnonzero(~self._ended).tolist()
        rewards = np.zeros(self.num_envs, np.float64)
        terminated, truncated, success = (np.zeros(self.num_envs, bool) for _ in range(3))
        if rows:
            result = self._env.step(rows, np.asarray(actions, np.float32)[rows, None])
            rewards[rows], success[rows] = result.rewards[:, 0], result.success
            terminated[rows], truncated[rows] = result.terminated, result.truncated
        self._start(new, {})
        self._ended = terminated | truncated
        return self._observe(), rewards, terminated, truncated, self._info(success)

    def render(self) -> tuple[np.ndarray, ...]:
        """uint8 [H, W, 3] each: the main views."""
        self._env.observe(range(self.num_envs), self._rows)
        return tuple(self._rows.images[:, 0].copy())

    def close_extras(self, **kwargs: Any) -> None:
        self._env.close()

    def _start(self, rows: list[int], options: Mapping[str, Any]) -> None:
        if rows:
            self._env.reset(rows, [self._episodes.next(row, self._generators[row], options) for row in rows])
        self._ended[rows] = False

    def _observe(self) -> Values:
        self._env.observe(range(self.num_envs), self._rows)
        return {name: array.copy() for name, array in _values(self._env.spec, self._rows).items()}

    def _info(self, success: np.ndarray) -> dict[str, Any]:
        """As gymnasium's vector environments give it: an array for each key, and a mask of who has it."""
        about = [self._episodes.about(row) for row in range(self.num_envs)]
        found: dict[str, Any] = {"success": success, "task": np.array([one["task"] for one in about])}
        found["instruction"] = np.array([one["instruction"] for one in about], object)
        return found | {f"_{name}": np.ones(self.num_envs, bool) for name in found}


class _Episodes:
    """Which episode an environment plays next."""

    def __init__(self, spec: EnvSpec, rows: int, start_states: StartStates) -> None:
        self._spec, self._rows, self._benchmark = spec, rows, start_states == "benchmark"
        self._tasks = [0] * rows
        self.restart()

    def restart(self) -> None:
        """Begin with the first task, so that what follows is a function of the seed."""
        self._played = [0] * self._rows

    def next(self, row: int, generator: np.random.Generator, options: Mapping[str, Any]) -> EpisodeSpec:
        number = self._played[row] * self._rows + row
        self._played[row] += 1
        tasks, states = len(self._spec.instructions), self._spec.init_states
        turn = number // tasks % states if self._benchmark else None
        self._tasks[row] = int(options.get("task", number % tasks))
        seed = int(generator.integers(2**31))
        return EpisodeSpec(number, self._tasks[row], seed, options.get("init_state", turn))

    def about(self, row: int) -> dict[str, Any]:
        task = self._tasks[row]
        return {"task": task, "instruction": self._spec.instructions[task]}


def _make(config: Mapping[str, Any], keys: Mapping[str, Any], num_envs: int) -> VectorEnv:
    try:
        return make_env(_CONFIGS.validate_python({**config, **keys}), num_envs)
    except ValidationError as error:
        found = [(".".join(map(str, e["loc"][1:])), e) for e in error.errors(include_url=False)]
        unknown = [f"got an unexpected keyword argument '{key}'" for key, e in found if e["type"] == "extra_forbidden"]
        problems = "; ".join([*unknown, *(f"{key}: {e['msg']}" for key, e in found if e["type"] != "extra_forbidden")])
        kind = UnexpectedArgument if unknown else EnvError
        raise kind(f"{config.get('name')} cannot be made with {dict(keys)}: {problems}") from None


def _spaces(spec: EnvSpec) -> tuple[spaces.Dict, spaces.Box]:
    size = spec.image_size
    seen: dict[str, spaces.Space] = {view: spaces.Box(0, 255, (size, size, 3), np.uint8) for view in spec.views}
    if spec.proprio_dim:
        seen["state"] = spaces.Box(-np.inf, np.inf, (spec.proprio_dim,), np.float32)
    low, high = spec.actions.low.astype(np.float32), spec.actions.high.astype(np.float32)
    return spaces.Dict(seen), spaces.Box(low, high, dtype=np.float32)


def _values(spec: EnvSpec, rows: Observation) -> Values:
    views = {view: rows.images[:, number] for number, view in enumerate(spec.views)}
    return views | ({"state": rows.proprio} if spec.proprio_dim else {})
