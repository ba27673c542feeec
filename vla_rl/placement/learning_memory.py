"""What learning holds beside the policy: the critic of off-policy algorithms, and episodes that are kept.

    critic    on the learner's device: for each weight 4 bytes each of itself, its target, its gradient and two moments;
              what autograd saves of one batch
    kept      in main memory: at most what the memory may hold, and at most what the run plays

``tests/placement/test_learning_memory.py`` compares both with the critic, on meta tensors, and with stored episodes.
"""

import math

from algos.actor_critic import ClippedValueConfig
from algos.off_policy import CAMERA_WIDTH, CHANNELS, TASK_WIDTH, OffPolicyConfig
from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import GIB
from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.patches import PATCH, STRIDE

_EACH_WEIGHT = 20  # bytes


def critic_bytes(config: RunConfig, spec: EnvSpec, features: int) -> float:
    """At the peak of one of its steps; 0 without a critic. ``features``: numbers in a row of the policy's."""
    algo = config.algo
    if not isinstance(algo, OffPolicyConfig):
        return 0.0
    chunk = config.policy.chunk_size * spec.action_dim
    seen, inputs = _inputs(algo, spec, features, chunk)
    weights = critic_weights(algo, spec, seen, inputs, chunk)
    return _EACH_WEIGHT * weights + 4 * algo.batch * _saved(algo, spec, seen, inputs)


def critic_weights(algo: OffPolicyConfig, spec: EnvSpec, seen: int, inputs: int, chunk: int) -> int:
    """Of the critic (``vla_rl.learner.chunk_critic``), all members together. The last three: see ``_inputs``."""
    width = algo.critic_width
    body = 2 * width + (width + 1) * width + 2 * width
    member = (inputs + 1) * width + body + (width + 1) * algo.rating_outputs
    camera = (3 * PATCH**2 + 1) * CHANNELS + (4 * CHANNELS + 1) * 2 * CHANNELS
    camera += (2 * CHANNELS * (spec.image_size // STRIDE) ** 2 + 1) * CAMERA_WIDTH + 2 * CAMERA_WIDTH
    scale = 0 if algo.critic_reads == "state" else 2 * seen
    reads = len(spec.views) * camera if algo.critic_reads == "images" else 0
    of_states = (inputs - chunk + 1) * width + body + width + 1 if algo.rates_states else 0
    return algo.critics * member + of_states + scale + reads + len(spec.instructions) * TASK_WIDTH


def _inputs(algo: OffPolicyConfig, spec: EnvSpec, features: int, chunk: int) -> tuple[int, int]:
    """Numbers that the critic sees of a state, and all that a member reads. ``chunk``: numbers of a chunk's actions."""
    seen = {"images": CAMERA_WIDTH * len(spec.views), "features": features, "state": spec.state_dim}[algo.critic_reads]
    return seen, seen + spec.proprio_dim + 1 + TASK_WIDTH + chunk


def _saved(algo: OffPolicyConfig, spec: EnvSpec, seen: int, inputs: int) -> int:
    """Numbers of one chunk that autograd saves."""
    # inputs of norms, of their GELUs and of the next layers
    members = algo.critics * (6 * algo.critic_width + 3 + algo.rating_outputs)
    if algo.critic_reads != "images":
        return seen + inputs + members
    patches, cells = (spec.image_size // PATCH) ** 2, (spec.image_size // STRIDE) ** 2
    camera = 3 * spec.image_size**2 + 2 * CHANNELS * patches + 4 * CHANNELS * cells + 2 * CAMERA_WIDTH
    return len(spec.views) * camera + seen + inputs + members


def kept_bytes(config: RunConfig, spec: EnvSpec, features: int) -> float:
    """Of the replay memory, or of the value head's memory, when it is full; 0 without either.

    Demonstrations on which an off-policy algorithm trains as well come on top.
    """
    algo, chunk = config.algo, config.policy.chunk_size
    chunks, played = math.ceil(spec.max_episode_steps / chunk), config.train.iterations * config.train.batch_episodes
    if isinstance(algo, OffPolicyConfig):
        images = len(spec.views) * spec.image_size**2 * 3
        state = spec.state_dim if algo.reads_state else 0
        observed = images + 8 * (spec.proprio_dim + 1 + state)  # ``StoredEpisode.nbytes``: numbers are held twice
        done = 8 * (chunk * spec.action_dim + chunk + 1)
        return min(algo.memory_gib * GIB, played * ((chunks + 1) * observed + chunks * done))
    if isinstance(algo, ClippedValueConfig) and algo.value_memory:
        return min(algo.value_memory, played) * ((chunks + 1) * 4 * (features + 1) + 8 * chunks)
    return 0.0


def kept_by(config: RunConfig) -> str:
    """The key that bounds ``kept_bytes``."""
    return "algo.memory_gib" if isinstance(config.algo, OffPolicyConfig) else "algo.value_memory"
