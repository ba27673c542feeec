"""Optimizer steps that may be skipped: one whose gradient is not finite leaves weights and moments as they are.

So does, for the policy's weights, one in which only the value head is trained.
"""

import math
from typing import Any

import torch

from vla_rl.core.finite import FiniteWatch
from vla_rl.policies.base.policy import Policy


class OptimizerSteps:
    """The steps of a DeepSpeed engine.

    DeepSpeed itself skips such a step in some precisions and ZeRO stages only. Whatever wraps it, torch's optimizer
    makes every step in the end, and passes over parameters without a gradient.
    """

    def __init__(self, engine: Any, policy: Policy, world_size: int, device: torch.device) -> None:
        self.grad_norm = 0.0  # of the last step, before clipping
        self._engine, self._policy, self._world_size, self._device = engine, policy, world_size, device
        self._wraps = engine.zero_optimization_stage() > 0 or engine.bfloat16_enabled()  # then it measures the norm
        self._watch = FiniteWatch(policy.trained_parameters().values(), device)
        self._skips = False
        self._moves_policy = True
        engine.basic_optimizer.register_step_pre_hook(self._drop_gradients)

    def step(self, moves_policy: bool = True) -> bool:
        """Step on the accumulated gradients; False if the step was skipped, on all ranks alike. Collective.

        Without ``moves_policy``, the weights of the policy and their moments stay as they are.
        """
        self._moves_policy = moves_policy
        finite = self._watch.take()
        if not self._wraps:
            gradients = [p.grad for p in self._policy.parameters() if p.grad is not None]
            self.grad_norm = float(torch.nn.utils.get_total_norm(gradients))
            finite = finite and math.isfinite(self.grad_norm)
        self._skips = not self._all_ranks(finite)
        self._engine.step()
        applied = not self._skips and self._engine.was_step_applied()
        self._skips = False
        if self._wraps:
            self.grad_norm = float(self._engine.get_global_grad_norm() or 0.0)
        return applied

    def _all_ranks(self, finite: bool) -> bool:
        if self._world_size == 1:
            return finite
        wrong = torch.tensor(float(not finite), device=self._device)
        torch.distributed.all_reduce(wrong)
        return not wrong.item()

    def _drop_gradients(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:  # some of DeepSpeed's optimizers step on one group at a time
            if self._skips or (group["part"] == "policy" and not self._moves_policy):
                for parameter in group["params"]:
                    parameter.grad = None
