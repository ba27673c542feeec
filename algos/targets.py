"""What the chunks of a super-batch are trained towards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vla_rl.core.records import Array

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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
    num_steps: Tensor  # int64 [n]; 0 marks a row of padding, which does not count


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of all M chunks of a super-batch, in the order of its rows.

    Attributes:
        advantages: float32 [M].
        returns: float32 [M], what the value function learns.
        proximal_logprobs: float32 [M, K, A], under the policy that ratios are relative to.
        behaviour_logprobs: float32 [M, K, A], under the policy that acted.
        old_values: float32 [M], predictions at the start of the update.
        staleness: float32 [M], updates since the policy that acted.
        episode_log_weights: float32 [M], log(pi_prox / pi_behaviour) of the whole episode, or None.
        reference_logprobs: float32 [M, K, A], under the initial policy, or None.
        num_steps: int32 [M], executed steps.
    """

    advantages: Array
    returns: Array
    proximal_logprobs: Array
    behaviour_logprobs: Array
    old_values: Array
    staleness: Array
    episode_log_weights: Array | None
    reference_logprobs: Array | None
    num_steps: Array

    def rows(self, index: Array | slice, device: torch.device | str = "cpu") -> RowTargets:
        """The given rows (an int array, a bool array or a slice) as tensors."""
        import torch

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
