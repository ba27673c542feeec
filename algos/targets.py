"""What an algorithm is to the learner: targets of a super-batch, and a loss that adds up.

    collate ──▶ targets(super-batch) ──▶ Targets ──rows──▶ loss(micro-batch) ──▶ share of the step's loss
                     ▲                                        ▲
       what the weights at the update's start,         counts(optimizer step)
       and the run's first ones, say of the batch
       (only where needs_recompute, needs_reference)

An algorithm knows neither processes nor devices. ``targets`` sees the whole super-batch, so every statistic in it is
global; ``loss`` sees any subset of rows, and its results add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vla_rl.core.records import Array


@dataclass(frozen=True, slots=True)
class RowTargets:
    """Some rows of ``Targets`` as tensors on the device of the loss, without gradient."""

    advantages: Tensor  # float32 [n]
    returns: Tensor  # float32 [n]
    proximal_logprobs: Tensor  # float32 [n, K, A]
    behaviour_logprobs: Tensor  # float32 [n, K, A]
    old_values: Tensor  # float32 [n]
    staleness: Tensor  # float32 [n]
    episode_log_weights: Tensor | None  # float32 [n]
    reference_logprobs: Tensor | None  # float32 [n, K, A]
    num_steps: Tensor  # int64 [n]; 0 marks a row of padding, which counts nowhere


@dataclass(frozen=True, slots=True)
class Targets:
    """What a super-batch's chunks are trained towards, in the order of its rows."""

    advantages: Array  # float32 [M]
    returns: Array  # float32 [M]
    proximal_logprobs: Array  # float32 [M, K, A], of the policy that the clip stays near
    behaviour_logprobs: Array  # float32 [M, K, A], of the policy that acted
    old_values: Array  # float32 [M], predictions from which the update starts
    staleness: Array  # float32 [M], updates since the policy that acted
    episode_log_weights: Array | None  # float32 [M], log of pi_prox / pi_behaviour of the whole episode
    reference_logprobs: Array | None  # float32 [M, K, A], of the policy that the run began with
    num_steps: Array  # int32 [M], executed steps

    def rows(self, index: Array | slice, device: torch.device | str = "cpu") -> RowTargets:
        """The given rows (an int array, a bool array or a slice) as tensors."""

        def tensor(array: Array) -> Tensor:
            return torch.tensor(array[index], device=device)

        behaviour = tensor(self.behaviour_logprobs)
        shared = self.proximal_logprobs is self.behaviour_logprobs
        return RowTargets(
            advantages=tensor(self.advantages),
            returns=tensor(self.returns),
            proximal_logprobs=behaviour if shared else tensor(self.proximal_logprobs),
            behaviour_logprobs=behaviour,
            old_values=tensor(self.old_values),
            staleness=tensor(self.staleness),
            episode_log_weights=None if self.episode_log_weights is None else tensor(self.episode_log_weights),
            reference_logprobs=None if self.reference_logprobs is None else tensor(self.reference_logprobs),
            num_steps=tensor(self.num_steps).long(),
        )
