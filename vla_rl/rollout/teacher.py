"""The simulator's scripted expert as a teacher: it takes over for whole chunks, and what it did is recorded."""

from dataclasses import dataclass

import numpy as np

from envs.base import EnvError, VectorEnv
from vla_rl.core.records import EpisodeSpec, StepResult, TeacherRule

_STREAM = 8  # separates its draws from those of actions


@dataclass(frozen=True, slots=True)
class Taught:
    """A chunk that the expert has played."""

    outcome: StepResult  # n = 1
    actions: np.ndarray  # float32 [K, A], in physical units; 0 after the last executed step


class Teacher:
    """Decides whose chunk is executed, and plays the expert's, which looks at every control step."""

    def __init__(self, rule: TeacherRule, env: VectorEnv, chunk_size: int) -> None:
        self._rule, self._env, self._chunk_size = rule, env, chunk_size
        self._knows = False  # whether the expert has ever known what to do

    def takes_over(self, episode: EpisodeSpec, chunk: int, policy_version: int) -> bool:
        """Whether the expert plays this chunk; a function of its arguments and the rule alone."""
        if episode.evaluation:
            return False
        draw = np.random.default_rng((episode.seed, episode.member, chunk, _STREAM)).random()
        return bool(draw < self._rule.share_at(policy_version))

    def play(self, env_id: int) -> Taught | None:
        """The expert's next chunk in one environment.

        None if the expert does not know what to do in this state: nothing was executed then. Raises EnvError if it has
        never known: the simulator has no expert.
        """
        actions = np.zeros((self._chunk_size, self._env.spec.action_dim), np.float32)
        rewards = np.zeros((1, self._chunk_size), np.float32)
        step = 0
        while step < self._chunk_size:
            try:
                actions[step] = self._env.expert_action(env_id)
            except EnvError:
                if not self._knows:
                    raise
                if step == 0:
                    return None
                break
            self._knows = True
            one = self._env.step([env_id], actions[None, step : step + 1])
            rewards[0, step] = one.rewards[0, 0]
            step += 1
            if one.terminated[0] or one.truncated[0]:
                break
        outcome = StepResult(rewards, np.array([step], np.int32), one.terminated, one.truncated, one.success)
        return Taught(outcome, actions)
