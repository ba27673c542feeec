"""What a policy update trains on."""

from dataclasses import dataclass, fields

import numpy as np

from vla_rl.core.records import Array, Record, take_rows


@dataclass(frozen=True, slots=True)
class SuperBatch:
    """Whole episodes for one policy update: ragged, flattened over chunks, never padded.

    The chunks of episode b are rows ``offsets[b]:offsets[b + 1]`` of every [M, ...] array. Observations are stored
    once: O = M + the number of episodes with a final observation.

    Attributes:
        policy_version: version of the policy that this batch updates; the update produces version + 1.
        max_episode_steps: the time limit, in control steps.
        new_episodes: how many of the episodes, the first ones, are real and have not been trained before.
        images: uint8 [O, V, H, W, 3].
        proprio: float32 [O, P].
        elapsed: float32 [O].
        obs_row: int32 [M], each chunk's row in images, proprio and elapsed.
        final_obs_row: int32 [B], row of an episode's final observation, -1 where it has none.
        task: int32 [M].
        record: of all M decisions.
        logprobs: float32 [M, K, A], as recorded when the chunk was sampled.
        values: float32 [M], likewise.
        policy_versions: int32 [M], version of the weights that chose each chunk.
        rewards: float32 [M, K].
        num_steps: int32 [M].
        offsets: int32 [B + 1].
        bootstrap_value: float32 [B].
        terminated, truncated, success: bool [B].
        group: int32 [B].
        episode_id, seed: int64 [B], see ``EpisodeSpec``.
        model_version: int32 [B], version of the world model that imagined it; -1 for real episodes, which come first.
    """

    policy_version: int
    max_episode_steps: int
    new_episodes: int
    images: Array
    proprio: Array
    elapsed: Array
    obs_row: Array
    final_obs_row: Array
    task: Array
    record: Record
    logprobs: Array
    values: Array
    policy_versions: Array
    rewards: Array
    num_steps: Array
    offsets: Array
    bootstrap_value: Array
    terminated: Array
    truncated: Array
    success: Array
    group: Array
    episode_id: Array
    seed: Array
    model_version: Array

    @property
    def num_chunks(self) -> int:
        return len(self.logprobs)

    @property
    def num_episodes(self) -> int:
        return len(self.success)

    @property
    def imagined_episodes(self) -> int:
        """How many of the episodes, the last ones, a world model imagined."""
        return int((self.model_version >= 0).sum())

    @property
    def real_chunks(self) -> int:
        """Number of chunks, the first ones, that a simulator executed."""
        return int(self.offsets[self.num_episodes - self.imagined_episodes])

    def real(self) -> "SuperBatch":
        """The real episodes; their arrays are views. Observations are those of the whole batch."""
        episodes, chunks = self.num_episodes - self.imagined_episodes, self.real_chunks
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {name: values[name][:chunks] for name in _OF_CHUNKS} | {n: values[n][:episodes] for n in _OF_EPISODES}
        record, offsets = take_rows(self.record, slice(chunks)), self.offsets[: episodes + 1]
        return SuperBatch(**values | {"record": record, "offsets": offsets})

    @property
    def step_mask(self) -> Array:
        """bool [M, K]: which steps of each chunk were executed."""
        return np.arange(self.rewards.shape[1])[None, :] < self.num_steps[:, None]

    @property
    def staleness(self) -> Array:
        """int32 [M]: policy updates between the weights that chose a chunk and the weights that train on it."""
        return self.policy_version - self.policy_versions


_OF_CHUNKS = ("obs_row", "task", "logprobs", "values", "policy_versions", "rewards", "num_steps")


_OF_EPISODES = (
    "final_obs_row",
    "bootstrap_value",
    "terminated",
    "truncated",
    "success",
    "group",
    "episode_id",
    "seed",
    "model_version",
)
