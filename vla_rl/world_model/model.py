"""What an action chunk leads to: an ensemble of small networks on frozen features of the state.

    features ──► state ──► hand where the task is solved (hindsight)
    proprio ───┘   │            │
                   ▼            ▼
    chunk, its running sums, hand - goal, elapsed ──► trunk ──► event: success or failure at step k, or none   [2K + 1]
                                                          ├──► value to go, if nothing ended
                                                          └──► change of proprioception

A chunk's rating is what it earns in the end: ``Q = sum_k P(success at k) + gamma P(none) V``. The hindsight task (as in
hindsight relabelling, arXiv:1707.01495) makes the state's part find the place that matters from few episodes: a success
says where the hand had to be. Members are independent networks that learn from batches of their own; their disagreement
(arXiv:1805.12114) says where the ensemble has seen too little.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """n states and chunks, standardized; as tensors [n, ...], or [E, n, ...] where members differ."""

    features: Tensor  # [n, F]
    proprio: Tensor  # [n, P]
    elapsed: Tensor  # [n]
    actions: Tensor  # [n, K, A]


@dataclass(frozen=True, slots=True)
class ChunkOutcomes:
    """What came of the same chunks."""

    event: (
        Tensor  # int64 [n], 0 .. K-1: success at this step; K .. 2K-1: failure; 2K: the episode went on, or timed out
    )
    returns: Tensor  # [n], discounted return of the rest of the episode, counted from the chunk after this one
    next_proprio: Tensor  # [n, P], standardized
    goal: Tensor  # [n, P], standardized: proprioception when the task was solved
    solved: Tensor  # bool [n], whether it was; the others have no goal


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of E members for n chunks."""

    event: Tensor  # logits [E, n, 2K + 1]
    value: Tensor  # logits [E, n], of the value to go, 0..1
    next_proprio: Tensor  # [E, n, P]
    goal: Tensor  # [E, n, P]


@dataclass(frozen=True, slots=True)
class Rating:
    """What n chunks are expected to earn."""

    mean: Tensor  # [n], over the members
    deviation: Tensor  # [n], between the members
    success_at: Tensor  # [n, K], probability of success at each step, mean over the members
    continuation: Tensor  # [n], weight of what follows: the discount times the probability that nothing ends
    next_proprio: Tensor  # [n, P], standardized, mean over the members


class EnsembleLinear(nn.Module):
    """A linear layer of each member: [E, n, inputs] -> [E, n, outputs]."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class WorldModel(nn.Module):
    """See the module."""

    def __init__(self, features: int, proprio: int, chunk_size: int, action_dim: int, members: int, width: int) -> None:
        super().__init__()
        self.members, self.chunk_size = members, chunk_size

        def layer(inputs: int, outputs: int) -> EnsembleLinear:
            return EnsembleLinear(members, inputs, outputs)

        self.state = nn.Sequential(layer(features + proprio, width), nn.GELU(), layer(width, width))
        self.goal = layer(width, proprio)
        moves = 2 * chunk_size * action_dim
        self.trunk = nn.Sequential(
            layer(width + 2 * proprio + 1 + moves, 2 * width), nn.GELU(), layer(2 * width, width), nn.GELU()
        )
        self.event = layer(width, 2 * chunk_size + 1)
        self.value = layer(width, 1)
        self.change = layer(width, proprio)

    def forward(self, inputs: ChunkInputs) -> Prediction:
        """Raises ValueError for chunks of another length."""
        features, proprio, elapsed, actions = (
            self._of_members(x, dims)
            for x, dims in ((inputs.features, 2), (inputs.proprio, 2), (inputs.elapsed, 1), (inputs.actions, 3))
        )
        if actions.shape[2] != self.chunk_size:
            raise ValueError(f"chunks of {actions.shape[2]} actions, the model was made for {self.chunk_size}")
        state = self.state(torch.cat([features, proprio], dim=-1))
        goal = self.goal(state)
        sums = actions.cumsum(dim=2) * self.chunk_size**-0.5
        moves = torch.cat([actions.flatten(2), sums.flatten(2)], dim=-1)
        hidden = self.trunk(torch.cat([state, goal - proprio, proprio, elapsed.unsqueeze(-1), moves], dim=-1))
        return Prediction(
            event=self.event(hidden),
            value=self.value(hidden).squeeze(-1),
            next_proprio=proprio + self.change(hidden),
            goal=goal,
        )

    def _of_members(self, x: Tensor, dims: int) -> Tensor:
        return x if x.dim() > dims else x.expand(self.members, *x.shape)

    def loss(self, inputs: ChunkInputs, outcomes: ChunkOutcomes, hindsight: float) -> dict[str, Tensor]:
        """Losses, each the mean over chunks of the sum over members; every tensor with a dimension of members.

        The value to go is learned where the episode went on, by binary cross-entropy with the return.
        """
        predicted = self(inputs)
        went_on = (outcomes.event == 2 * self.chunk_size).float()
        event = F.cross_entropy(predicted.event.flatten(0, 1), outcomes.event.flatten(), reduction="none")
        value = F.binary_cross_entropy_with_logits(predicted.value, outcomes.returns, reduction="none") * went_on
        move = (predicted.next_proprio - outcomes.next_proprio).square().mean(-1)
        goal = (predicted.goal - outcomes.goal).square().mean(-1) * outcomes.solved
        count = outcomes.event.shape[-1]
        return {
            "event": event.sum() / count,
            "value": value.sum() / count,
            "proprio": move.sum() / count,
            "goal": hindsight * goal.sum() / count,
        }

    @torch.no_grad()
    def rate(self, inputs: ChunkInputs, discount: float) -> Rating:
        """What chunks are expected to earn, ``Q`` of the module's docstring; without gradients."""
        predicted = self(inputs)
        event = predicted.event.softmax(-1)
        success = event[..., : self.chunk_size]
        q = success.sum(-1) + discount * event[..., -1] * predicted.value.sigmoid()
        return Rating(
            mean=q.mean(0),
            deviation=q.std(0),
            success_at=success.mean(0),
            continuation=discount * event[..., -1].mean(0),
            next_proprio=predicted.next_proprio.mean(0),
        )
