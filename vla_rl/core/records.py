"""Records that flow between the boxes of the system (see docs/architecture.md).

Plain numpy, frozen and slotted: they cross process borders, so they hold no torch tensor, no Ray handle and no
behaviour beyond what can be derived from their fields.

Shape letters used everywhere in this project:
    N  rows of a batch            K  actions in a chunk        A  action dimensions (7)
    V  camera views               P  proprioception numbers    T  chunks of one episode
    M  chunks of a super-batch    B  episodes of a super-batch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """What a simulator offers; fixed for the whole run."""

    name: str  # "libero", "tabletop", ...
    views: tuple[str, ...]  # camera names, the main one first; V = len(views)
    image_size: int  # images are square: H = W = image_size pixels
    proprio_dim: int  # P; 0 where the policy sees images only
    action_dim: int  # A
    max_episode_steps: int  # control steps until an episode is truncated
    instructions: tuple[str, ...]  # the task id of an Episode indexes this
    init_states: int = 50  # benchmark initial states a task has; Episode.init_state counts through them
    assets: str = "none"  # where meshes and textures came from, e.g. "stand-ins"; part of every result


@dataclass(frozen=True, slots=True)
class Episode:
    """An order to run one episode. Its id is unique in a run and settles all of its randomness."""

    id: int
    task: int  # index into EnvSpec.instructions
    seed: int  # of the placement (where the simulator samples it) and of the action sampling
    init_state: int | None = None  # index of a benchmark initial state; None: the simulator samples placements
    group: int = -1  # episodes of one group share task, seed and init_state; -1: an evaluation
    member: int = 0  # position within the group; with the seed it settles the action sampling
    evaluation: bool = False  # never trained on
    greedy: bool = False  # most likely action instead of a sampled one
    record: bool = False  # keep a frame of every control step, for a video


FinalValues = Literal["truncated", "never", "always"]  # which episodes keep their final observation and its value


@dataclass(frozen=True, slots=True)
class GroupRules:
    """Which training episodes share a task and placement, and which of these groups are trained on."""

    size: int = 1  # G
    success_low: float = 0.0  # a group whose success rate lies outside these two is filtered out,
    success_high: float = 1.0  # and another is played in its place (dynamic sampling, arXiv:2503.14476)
    max_filtered: int = 0  # filtered out in a row, after which any group will do until a better one comes


@dataclass(frozen=True, slots=True)
class Observation:
    """What a policy sees, for N slots or rows."""

    images: Array  # uint8 [N, V, H, W, 3], upright, as the policy was trained to see them
    proprio: Array  # float32 [N, P]
    task: Array  # int32 [N]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What happened while the n given slots executed one action chunk each."""

    rewards: Array  # float32 [n, K]; 0 after the last executed step
    num_steps: Array  # int32 [n]; executed control steps, 1..K: a chunk stops where its episode ends
    terminated: Array  # bool [n]; the task itself ended (success, or a failure that the simulator declares)
    truncated: Array  # bool [n]; a time limit cut the episode; never true together with terminated
    success: Array  # bool [n]


@dataclass(frozen=True, slots=True)
class ActionBatch:
    """A policy's answer for N rows."""

    actions: Array  # float32 [N, K, A], in physical units, gripper 0 = closed .. 1 = open
    tokens: Array  # uint8 [N, K, A], bin index of each action dimension
    logprobs: Array  # float32 [N, K, A], of the tokens under the sampling distribution
    values: Array  # float32 [N]
    version: int  # of the weights that computed all of the above


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode, recorded at chunk boundaries."""

    episode: Episode
    images: Array  # uint8 [T or T + 1, V, H, W, 3]; the extra row is the final observation, where its value counts
    proprio: Array  # float32 [T or T + 1, P]
    tokens: Array  # uint8 [T, K, A]
    logprobs: Array  # float32 [T, K, A]
    values: Array  # float32 [T]
    versions: Array  # int32 [T], the weights that chose each chunk
    rewards: Array  # float32 [T, K]
    num_steps: Array  # int32 [T]
    final_value: float  # the acting policy's value of the final observation where there is one, else 0
    terminated: bool
    truncated: bool
    success: bool
    worker: int = -1  # which EnvWorker ran it
    seconds: float = 0.0  # wall-clock from first observation to end

    @property
    def num_chunks(self) -> int:
        return len(self.tokens)

    @property
    def steps(self) -> int:
        """Executed control steps."""
        return int(self.num_steps.sum())

    @property
    def oldest_version(self) -> int:
        return int(self.versions.min())

    @property
    def total_reward(self) -> float:
        return float(self.rewards.sum())


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """What is kept of an evaluation episode."""

    episode: Episode
    success: bool
    steps: int  # executed control steps
    total_reward: float
    oldest_version: int
    newest_version: int  # equal to oldest_version where one policy played the whole episode
    seconds: float
    frames: tuple[Array, ...] = ()  # uint8 [H, W, 3] each, where the episode asked for them


@dataclass(frozen=True, slots=True)
class SuperBatch:
    """Whole episodes, collated for one learner update: ragged, flattened over chunks, never padded.

    Rows of episode b are ``offsets[b]:offsets[b + 1]`` of every [M, ...] array.
    """

    version: int  # the policy version that this batch will update (it produces version + 1)
    images: Array  # uint8 [O, V, H, W, 3]; O = M + number of episodes with a final observation
    proprio: Array  # float32 [O, P]
    obs_row: Array  # int32 [M], each chunk's row in images and proprio
    final_row: Array  # int32 [B], row of an episode's final observation, -1 where it has none
    task: Array  # int32 [M]
    tokens: Array  # uint8 [M, K, A]
    logprobs: Array  # float32 [M, K, A], recorded at sampling
    values: Array  # float32 [M], recorded at sampling
    versions: Array  # int32 [M]
    rewards: Array  # float32 [M, K]
    num_steps: Array  # int32 [M]
    offsets: Array  # int32 [B + 1]
    final_value: Array  # float32 [B]
    terminated: Array  # bool [B]
    truncated: Array  # bool [B]
    success: Array  # bool [B]
    group: Array  # int32 [B]
    episode_id: Array  # int64 [B]

    @property
    def num_chunks(self) -> int:
        return len(self.tokens)

    @property
    def num_episodes(self) -> int:
        return len(self.success)

    @property
    def step_mask(self) -> Array:
        """bool [M, K]: which steps of each chunk were executed."""
        return np.arange(self.rewards.shape[1])[None, :] < self.num_steps[:, None]

    @property
    def ages(self) -> Array:
        """int32 [M]: updates between the weights that chose a chunk and the weights that train on it."""
        return self.version - self.versions
