"""Optimizer steps: the gradients of the policy and of the value head are clipped apart, and some steps are left out.

One clip for both would let the one with the larger gradient shorten the steps of the other. A step whose gradient is
not finite leaves weights and moments as they are. So does, for the policy's weights, one in which only the value head
is trained.
"""

import math
from typing import Any

import torch
from torch import Tensor

from vla_rl.core.finite import FiniteWatch
from vla_rl.policies.base.policy import Policy

PARTS = "policy", "value"  # of the optimizer's groups
GRAD_NORMS = "grad_norm", "policy_grad_norm", "value_grad_norm"  # of both together, and of each


class OptimizerSteps:
    """The steps of a DeepSpeed engine.

    DeepSpeed clips all gradients together, and skips steps in some precisions and ZeRO stages only. Whatever wraps it,
    torch's optimizer makes every step in the end: on gradients in float32, averaged over the ranks, under ZeRO on this
    rank's part of them. A hook before it clips them, or drops them: it passes over parameters without a gradient.
    """

    def __init__(
        self, engine: Any, policy: Policy, world_size: int, device: torch.device, max_grad_norm: float
    ) -> None:
        """``max_grad_norm``: upper limit of the norm of each part's gradient."""
        self._engine, self._policy, self._world_size, self._device = engine, policy, world_size, device
        self._max_grad_norm = max_grad_norm
        self._stage = engine.zero_optimization_stage()
        self._watch = FiniteWatch(policy.trained_parameters().values(), device)
        self._norms: dict[str, Tensor] = {}  # of the step under way or the last one, by part
        self._skips = False
        self._moves_policy = True
        engine.basic_optimizer.register_step_pre_hook(self._clip_or_drop)

    def leave_out_policy(self) -> None:
        """Call before the backward passes of a step that reach the value head alone.

        Without ZeRO, DeepSpeed gives all other weights a gradient of 0 in their own dtype, which those in bfloat16 do
        not take (``make_engine``).
        """
        for weight in self._policy.trunk_parameters() if self._stage == 0 else ():
            weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)

    def step(self, moves_policy: bool = True) -> bool:
        """Step on the accumulated gradients; False if the step was skipped, on all ranks alike. Collective.

        Without ``moves_policy``, the weights of the policy and their moments stay as they are.
        """
        self._moves_policy = moves_policy
        self._skips = not self._all_ranks(self._watch.take())
        self._norms = self._norms_of_sub_groups() if self._stage == 3 else {}
        if not moves_policy:
            self._norms[PARTS[0]] = torch.zeros((), device=self._device)  # ZeRO-3 still has those of an earlier step
        self._engine.step()
        return not self._skips and bool(self._engine.was_step_applied())

    @property
    def grad_norms(self) -> dict[str, float]:
        """Norms of the gradients of the last step, before clipping; infinite if DeepSpeed made no step for that."""
        norms = [float(self._norms.get(part, math.inf)) for part in PARTS]
        return dict(zip(GRAD_NORMS, (math.hypot(*norms), *norms), strict=True))

    def _all_ranks(self, finite: bool) -> bool:
        if self._world_size == 1:
            return finite
        wrong = torch.tensor(float(not finite), device=self._device)
        torch.distributed.all_reduce(wrong)
        return not wrong.item()

    def _clip_or_drop(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = [group for group in optimizer.param_groups if group["params"]]
        for group in groups:  # under ZeRO, each has a step of its own
            if group["part"] not in self._norms:
                self._norms[group["part"]] = self._norm(group["params"])
        self._skips = self._skips or not all(bool(torch.isfinite(norm)) for norm in self._norms.values())
        for group in groups:
            if self._skips or (group["part"] == "policy" and not self._moves_policy):
                for parameter in group["params"]:
                    parameter.grad = None
            else:
                norm = self._norms[group["part"]]
                torch.nn.utils.clip_grads_with_norm_(group["params"], self._max_grad_norm, norm)

    def _norm(self, parameters: list[torch.nn.Parameter]) -> Tensor:
        """Of the gradient of a whole part, over all ranks; ``parameters`` are those of the optimizer."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self._stage == 0 or self._world_size == 1:
            return norm
        square = norm.to(self._device).square()
        torch.distributed.all_reduce(square)
        return square.sqrt()

    def _norms_of_sub_groups(self) -> dict[str, Tensor]:
        """ZeRO-3 divides a part's weights into groups of at most a billion, and steps on one after the other."""
        optimizer = self._engine.optimizer
        squares = {part: torch.zeros((), device=self._device) for part in PARTS}
        for number, norm in enumerate(optimizer._get_norm_groups()):  # -1: not finite
            part = optimizer.optimizer.param_groups[optimizer.sub_group_to_group_id[number]]["part"]
            norm = torch.as_tensor(norm, dtype=torch.float32, device=self._device)
            squares[part] += torch.where(norm < 0, math.inf, norm).square()
        return {part: square.sqrt() for part, square in squares.items()}
