"""What a world model imagines, as a lesson for the critic of off-policy learning.

    L = mean (Q(s, a_b) − mean_b Q(s, a_b) − A_b)²        b: chunks of the policy that were imagined in one state

``A_b`` is how much more the model expects of a chunk than of the mean of all of these. Only such differences are
given: the audit has corrected their size (``vla_rl.world_model.audit``), and what the model says of whole states is not
audited.
"""

import numpy as np
import torch
from torch import Tensor

from algos.advantages import episode_returns
from algos.td_losses import imagined_loss
from vla_rl.core.records import Array, Record, SuperBatch, chunk_number
from vla_rl.learner.chunk_critic import EnsembleCritic
from vla_rl.replay.memory import Transitions

# In the record of an off-policy run with a world model: B imagined chunks in the state, float32 [B, K, A], normalized,
# and A_b, float32 [B]; nan where nothing was imagined.
IMAGINED, GAINS = "imagined", "imagined_gains"


def nothing_imagined(chunks: int, branches: int, size: int, numbers: int) -> Record:
    """A record of that many chunks, of ``size`` steps of ``numbers`` action numbers, in whose states none are known."""
    return {
        IMAGINED: np.zeros((chunks, branches, size, numbers), np.float32),
        GAINS: np.full((chunks, branches), np.nan, np.float32),
    }


def imagined_record(batch: SuperBatch, actions: Array, branches: int) -> Record:
    """What was imagined in the states of the chunks of new episodes. ``actions`` [M, K, A]: normalized, of all chunks.

    Of imagined episodes that are longer, the first chunk counts, with what the whole episode is expected to earn.
    """
    lengths = np.diff(batch.offsets[: batch.new_episodes + 1])
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    numbers = chunk_number(np.repeat(batch.episode_id[: batch.new_episodes], lengths), within)
    record = nothing_imagined(len(numbers), branches, *actions.shape[1:])
    if batch.imagined_episodes:
        first = batch.num_episodes - batch.imagined_episodes
        row = {number: i for i, number in enumerate(numbers.tolist())}
        states = [row[number] for number in batch.seed[first::branches].tolist()]
        chunks = batch.offsets[first:-1].reshape(-1, branches)
        earned = episode_returns(batch.rewards, batch.num_steps, batch.offsets)[first:].reshape(-1, branches)
        record[IMAGINED][states] = actions[chunks]
        record[GAINS][states] = earned - earned.mean(axis=1, keepdims=True)
    return record


def practised(critic: EnsembleCritic, state: Tensor, t: Transitions) -> Tensor | None:
    """The loss on what was imagined in these states; None where nothing was.

    ``state`` [n, S]: of the critic. As many imagined chunks are rated as there are recorded ones, at most.
    """
    known = np.flatnonzero(np.isfinite(t.record[GAINS][:, 0]))
    branches = t.record[GAINS].shape[1]
    known = known[: max(1, len(t.actions) // branches)]
    if not len(known):
        return None
    chunks, gains = (torch.from_numpy(t.record[name][known]).to(state.device) for name in (IMAGINED, GAINS))
    rows = state[torch.from_numpy(known).to(state.device)].repeat_interleave(branches, dim=0)
    return imagined_loss(critic.rate(rows, chunks.flatten(0, 1)).unflatten(0, (-1, branches)), gains)
