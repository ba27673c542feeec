"""The contract of a simulator, checked by playing it: for the tests of simulators here and in other packages."""

from contextlib import suppress
from dataclasses import astuple

import numpy as np

from envs.base.vector_env import VectorEnv, empty_observation
from vla_rl.core.records import EpisodeSpec, Observation, StepResult

_CHUNK = 3
_KINDS = [f"float32[1, {_CHUNK}]", "int32[1]", *["bool[1]"] * 3]  # of a StepResult
_TRUNCATION = "an episode is truncated at max_episode_steps, only there, and never with terminated"


class ContractError(AssertionError):
    """A simulator breaks a rule of ``VectorEnv``. The text names the rule and what was found."""


def check_simulator(env: VectorEnv) -> None:
    """Play two episodes of the first environment to their ends, with the middles of all actions, and close ``env``.

    Give it at least two environments, and a small ``max_episode_steps``. Raises ContractError.
    """
    spec, seen = env.spec, empty_observation(env.spec, env.num_envs)
    chunk = np.tile(((spec.actions.low + spec.actions.high) / 2).astype(np.float32), (1, _CHUNK, 1))
    last = EpisodeSpec(1, len(spec.instructions) - 1, 6, init_state=spec.init_states - 1, record=True)
    for episode in (EpisodeSpec(0, 0, 5), last):
        env.reset([0], [episode])
        steps, ended = 0, False
        _check_observation(env, seen, episode, steps)
        while not ended:
            result = env.step([0], chunk)
            ended, steps = _ends(result), steps + int(result.num_steps[0])
            late = steps >= spec.max_episode_steps and not result.terminated[0]
            _require(result.truncated[0] == late and steps <= spec.max_episode_steps, _TRUNCATION, (steps, result))
            _require(ended or result.num_steps[0] == _CHUNK, "a chunk stops early only at an episode's end", result)
            _check_observation(env, seen, episode, steps)
        rule = f"frames() has one for each of {steps} steps if the episode records ({episode.record})"
        _require(len(env.frames(0)) == steps * episode.record, rule, len(env.frames(0)))
        with suppress(ValueError):
            env.step([0], chunk)
            _require(False, "an environment whose episode has ended refuses step() with ValueError", "none")
    env.close()
    env.close()  # which is safe


def _ends(result: StepResult) -> bool:
    """Whether the episode has ended, in a result for one environment that keeps the rules."""
    rewards, executed, terminated = result.rewards, int(result.num_steps[0]), bool(result.terminated[0])
    kinds = [f"{array.dtype}{list(array.shape)}" for array in astuple(result)]
    _require(kinds == _KINDS, "rewards are float32 [n, K], num_steps int32 [n], all others bool [n]", kinds)
    _require(1 <= executed <= _CHUNK, "num_steps lies between 1 and K", executed)
    _require(not rewards[0, executed:].any(), "rewards are 0 after the last executed step", rewards)
    _require(terminated or not result.success[0], "success comes with terminated", result)
    return terminated or bool(result.truncated[0])


def _check_observation(env: VectorEnv, seen: Observation, episode: EpisodeSpec, steps: int) -> None:
    for before in (7, 201):  # what is not written keeps it
        images, elapsed = seen.images[0].copy(), steps / env.spec.max_episode_steps
        seen.images[:], seen.proprio[:], seen.elapsed[:], seen.task[:] = before, np.nan, np.nan, -1
        env.observe([0], seen)
        _require((seen.images[1:] == before).all(), "observe() writes no rows but those that it is asked for", "others")
    _require((images == seen.images[0]).all(), "observe() writes whole images, the same each time", "other pixels")
    _require(np.isfinite(seen.proprio[0]).all(), "observe() writes finite proprio", seen.proprio[0])
    _require(seen.task[0] == episode.task, "observe() writes the task", seen.task[0])
    _require(np.isclose(seen.elapsed[0], elapsed), f"elapsed is steps / max_episode_steps, {elapsed}", seen.elapsed[0])


def _require(holds: object, rule: str, found: object) -> None:
    if not holds:
        raise ContractError(f"{rule}; found {found}")
