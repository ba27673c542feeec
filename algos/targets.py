"""What the chunks of a super-batch are trained towards."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vla_rl.core.records import Array

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowTargets:
    """Some rows of ``Targets`` as tensors on the device of the loss, without gradient.

    Fields and shapes are those of ``Targets``, with n rows for M, and ``num_steps`` int64: 0 marks padding.
    """

    advantages: Tensor
    returns: Tensor
    proximal_logprobs: Tensor
    behaviour_logprobs: Tensor
    old_values: Tensor
    staleness: Tensor
    episode_log_weights: Tensor | None
    reference_logprobs: Tensor | None
    num_steps: Tensor
    weights: Tensor
    condition: Tensor
    trains_value: Tensor
    judges_values: Tensor


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of all M chunks of a super-batch, in the order of its rows."""

    advantages: Array  # float32 [M]
    returns: Array  # float32 [M], what the value function learns
    proximal_logprobs: Array  # float32 [M, K, A], under the policy that ratios are relative to
    behaviour_logprobs: Array  # float32 [M, K, A], under the policy that acted
    old_values: Array  # float32 [M], predictions when acting, or recomputed at the start of the update
    staleness: Array  # float32 [M], updates since the policy that acted
    episode_log_weights: Array | None  # float32 [M], log(pi_prox / pi_behaviour) of the whole episode
    reference_logprobs: Array | None  # float32 [M, K, A], under the initial policy
    num_steps: Array  # int32 [M], executed steps
    weights: Array  # float32 [M], weight of each of a chunk's elements in the averages of the policy's terms
    condition: Array  # int64 [M], the condition under which each chunk is trained (``AlgorithmConfig.conditions``)
    trains_value: Array  # bool [M], false for imagined returns and where the condition tells too much
    judges_values: Array  # bool [M], real chunks that no earlier update has trained on, if their returns differ

    def rows(self, index: Array | slice, device: torch.device | str = "cpu") -> RowTargets:
        """The given rows (an int array, a bool array or a slice) as tensors; an array in two fields is copied once."""
        import torch

        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        copies = {id(a): torch.tensor(a[index], device=device) for a in arrays.values() if a is not None}
        tensors: dict[str, Any] = {name: copies.get(id(a)) for name, a in arrays.items()}
        return RowTargets(**tensors | {"num_steps": tensors["num_steps"].long()})
