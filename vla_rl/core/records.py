"""The records that flow between the boxes of the system: plain numpy, frozen, without behaviour of their own.

    EpisodeSpec ──▶ EnvWorker ──Observation──▶ InferenceServer ──ActionBatch──▶ EnvWorker
                    EnvWorker ──Trajectory──▶ ReplayStore ──SuperBatch──▶ Learner

They cross process borders, so they hold no torch tensor and no Ray handle.

What a policy needs to know of a decision, in order to rate it again, is its *record*: arrays by name, as ``PolicySpec``
declares them. For a policy of action tokens these are the tokens.

Shape letters, used everywhere in this project:
    N  rows of a batch            K  actions in a chunk        A  action dimensions
    V  camera views               P  proprioception numbers    T  chunks of one episode
    M  chunks of a super-batch    B  episodes of a super-batch
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeVar

import numpy as np

from vla_rl.core.actions import ActionSpace

Array = np.ndarray
Record = dict[str, Array]  # of n decisions: [n, ...] each, by the names of ``PolicySpec.record``


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """What a simulator offers; fixed for the whole run.

    Attributes:
        name: "libero", "tabletop", ...
        views: camera names, the main one first; V = len(views).
        image_size: height and width of the square images, in pixels.
        proprio_dim: P; 0 where the policy sees images only.
        actions: what the A numbers of an action are.
        max_episode_steps: control steps after which an episode is truncated.
        instructions: one text for each task; a task id indexes this tuple.
        init_states: number of benchmark initial states of a task.
        engine: what computes physics and images, with versions; part of every result.
        assets: origin of meshes and textures, such as "placeholder"; part of every result.
        suite: group of tasks with a data set of their own, such as "libero_spatial"; empty where there are none.
        robot: what moves, for data sets.
        fps: control steps a second, for data sets and videos.
        proprio_range: P pairs of limits between which proprioception usually lies; empty: -1 and 1.
        notes: what people should know before they trust a result, one sentence or list each.
        left_out: tasks that cannot be played here, one line with the reason each.
        state_dim: S, numbers of ``VectorEnv.state``; 0 where the simulator does not give its state.
    """

    name: str
    views: tuple[str, ...]
    image_size: int
    proprio_dim: int
    actions: ActionSpace
    max_episode_steps: int
    instructions: tuple[str, ...]
    init_states: int = 50
    engine: str = ""
    assets: str = "none"
    suite: str = ""
    robot: str = "unknown"
    fps: int = 20
    proprio_range: tuple[tuple[float, float], ...] = ()
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    state_dim: int = 0

    @property
    def action_dim(self) -> int:
        """A."""
        return len(self.actions)

    @property
    def proprio_limits(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The low and the high ends of ``proprio_range``, P numbers each."""
        pairs = self.proprio_range or ((-1.0, 1.0),) * self.proprio_dim
        return tuple(low for low, _ in pairs), tuple(high for _, high in pairs)


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """One decision's part of an array: its dtype, in numpy's notation, and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RandomNumbers:
    """Random numbers that one decision uses: float32, uniform in [0, 1) or standard normal."""

    shape: tuple[int, ...]
    distribution: Literal["uniform", "normal"] = "uniform"

    def draw(self, rng: np.random.Generator) -> Array:
        if self.distribution == "uniform":
            return rng.random(self.shape, dtype=np.float32)
        return rng.standard_normal(self.shape, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """What a policy exchanges with the rest of the system; fixed for the whole run.

    Attributes:
        chunk_size: K.
        action_dim: A.
        record: what is kept of a decision, so that the learner can compute its log-probability.
        draws: the random numbers that settle a sample, in the order in which they are drawn.
    """

    chunk_size: int
    action_dim: int
    record: Mapping[str, ArrayLayout]
    draws: Mapping[str, RandomNumbers]


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to play. All of its randomness follows from these fields.

    Attributes:
        id: unique within a run.
        task: index into ``EnvSpec.instructions``.
        seed: of the object placement (where the simulator samples it) and of the action sampling. Of imagined episodes,
            the ``chunk_number`` of the real chunk in whose state they begin.
        init_state: index of a benchmark initial state; None lets the simulator sample a placement.
        group: episodes with the same number share task, seed and init_state; -1 for evaluations.
        member: position within the group; together with the seed it determines the sampled actions.
        evaluation: True if the episode is never trained on.
        greedy: take the most likely action instead of sampling.
        record: keep a frame of every control step, for a video.
    """

    id: int
    task: int
    seed: int
    init_state: int | None = None
    group: int = -1
    member: int = 0
    evaluation: bool = False
    greedy: bool = False
    record: bool = False


_Numbers = TypeVar("_Numbers", int, Array)
_CHUNK_BITS = 20  # chunks of one episode are fewer than 2 to this power


def chunk_number(episode_id: _Numbers, chunk: _Numbers) -> _Numbers:
    """The number of a chunk within the run: it names the state in which an imagined episode begins."""
    return (episode_id << _CHUNK_BITS) + chunk


def chunk_of(number: int) -> tuple[int, int]:
    """Episode id and chunk of a ``chunk_number``."""
    return number >> _CHUNK_BITS, number & ((1 << _CHUNK_BITS) - 1)


BootstrapRule = Literal["truncated", "never", "always"]  # which episodes end with the value of their final observation


# In the record of a run with a teacher: the expert's actions in physical units, float32 [K, A], and how many of them
# were executed, int32; 0 where the policy acted.
EXPERT, EXPERT_STEPS = "expert", "expert_steps"


# In the record of a run whose critic reads the simulator's state: before each chunk and after it, float32 [S].
STATE, STATE_AFTER = "state", "state_after"


@dataclass(frozen=True, slots=True)
class TeacherRule:
    """How often the simulator's expert plays a training chunk in the policy's place.

    Attributes:
        share: of the chunks, at the start.
        decay: policy versions over which it falls to 0, linearly; None: it stays.
    """

    share: float
    decay: int | None = None

    def share_at(self, policy_version: int) -> float:
        return self.share * (1.0 if self.decay is None else max(0.0, 1.0 - policy_version / self.decay))


@dataclass(frozen=True, slots=True)
class GroupRules:
    """How training episodes are grouped, and which groups are trained on (dynamic sampling, arXiv:2503.14476).

    Attributes:
        size: episodes that share a task and a start, G.
        success_low, success_high: a group whose success rate lies outside is filtered out and replaced, as is one whose
            episodes all have the same return.
        max_filtered: after this many filtered groups in a row, the next group is accepted in any case.
    """

    size: int = 1
    success_low: float = 0.0
    success_high: float = 1.0
    max_filtered: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """What a policy sees, for N environments or rows.

    Attributes:
        images: uint8 [N, V, H, W, 3], upright, as the policy was trained to see them.
        proprio: float32 [N, P].
        task: int32 [N].
        elapsed: float32 [N], share of the time limit that has passed, 0..1. Only value functions read it.
    """

    images: Array
    proprio: Array
    task: Array
    elapsed: Array


@dataclass(frozen=True, slots=True)
class StepResult:
    """What happened while n environments executed one action chunk each.

    Attributes:
        rewards: float32 [n, K]; 0 after the last executed step.
        num_steps: int32 [n], executed control steps, 1..K; a chunk stops where its episode ends.
        terminated: bool [n], the task itself ended: success, or a failure that the simulator declares.
        truncated: bool [n], a time limit ended the episode; never true together with terminated.
        success: bool [n].
    """

    rewards: Array
    num_steps: Array
    terminated: Array
    truncated: Array
    success: Array


@dataclass(frozen=True, slots=True)
class ActionBatch:
    """A policy's answer for N rows.

    Attributes:
        actions: float32 [N, K, A], as ``EnvSpec.actions`` declares them.
        record: of these decisions.
        logprobs: float32 [N, K, A], of the record under the sampling distribution.
        values: float32 [N].
        policy_version: version of the weights that computed all of this.
    """

    actions: Array
    record: Record
    logprobs: Array
    values: Array
    policy_version: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished training episode of T chunks.

    Attributes:
        episode: what was played.
        images: uint8 [T or T + 1, V, H, W, 3]; the extra row is the final observation, where its value is needed.
        proprio: float32 [T or T + 1, P].
        elapsed: float32 [T or T + 1].
        record: of its T decisions.
        logprobs: float32 [T, K, A].
        values: float32 [T].
        policy_versions: int32 [T], version of the weights that chose each chunk.
        rewards: float32 [T, K].
        num_steps: int32 [T].
        bootstrap_value: the acting policy's value of the final observation, 0 where there is none.
        terminated, truncated: exactly one of them is true.
        success: whether the task was solved.
        worker: index of the env worker that played it.
        seconds: wall-clock time from first observation to end.
        model_version: version of the world model that imagined it; -1 for a real episode, which a simulator played.
    """

    episode: EpisodeSpec
    images: Array
    proprio: Array
    elapsed: Array
    record: Record
    logprobs: Array
    values: Array
    policy_versions: Array
    rewards: Array
    num_steps: Array
    bootstrap_value: float
    terminated: bool
    truncated: bool
    success: bool
    worker: int = -1
    seconds: float = 0.0
    model_version: int = -1

    @property
    def num_chunks(self) -> int:
        return len(self.logprobs)

    @property
    def steps(self) -> int:
        """Executed control steps."""
        return int(self.num_steps.sum())

    @property
    def oldest_policy_version(self) -> int:
        return int(self.policy_versions.min())

    @property
    def total_reward(self) -> float:
        return float(self.rewards.sum())


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """What is kept of an evaluation episode.

    Attributes:
        episode: what was played.
        success: whether the task was solved.
        steps: executed control steps.
        total_reward: sum of all rewards.
        oldest_policy_version, newest_policy_version: equal if one policy played the whole episode.
        seconds: wall-clock time from first observation to end.
        frames: uint8 [H, W, 3] each, if the episode asked for them.
        terminated: the task itself ended the episode, not the time limit.
        best_progress, final_progress: share of the way from the start to the simulator's full potential that was behind
            after a chunk, 0..1; NaN where it has none.
        set_aside: it was not played to its end: the processes that played it died each time.
        values: with ``frames``, the acting policy's value of the chunk that led to each; empty if it learns none.
    """

    episode: EpisodeSpec
    success: bool
    steps: int
    total_reward: float
    oldest_policy_version: int
    newest_policy_version: int
    seconds: float
    frames: tuple[Array, ...] = ()
    terminated: bool = False
    best_progress: float = float("nan")
    final_progress: float = float("nan")
    set_aside: bool = False
    values: tuple[float, ...] = ()


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


def take_rows(record: Mapping[str, Array], index: Array | slice | int) -> Record:
    """Some decisions of a record."""
    return {name: array[index] for name, array in record.items()}


def join_records(records: Sequence[Mapping[str, Array]]) -> Record:
    """The decisions of several records, one after the other."""
    return {name: np.concatenate([record[name] for record in records]) for name in records[0]}
