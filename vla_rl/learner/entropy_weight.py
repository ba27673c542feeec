"""The coefficient of the actor's entropy (SAC's α): fixed, or tuned. A tuned one is part of the learner's state."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from algos.off_policy import EntropyRule
from algos.td_losses import alpha_loss
from vla_rl.core.tensor_files import moments_of, set_moments

_LOG = "log"


class EntropyWeight:
    """See the module. It is on the host: one number."""

    def __init__(self, rule: EntropyRule) -> None:
        self._rule = rule
        self._tuned = rule.target is not None
        self._log = torch.tensor(math.log(rule.alpha) if self._tuned else 0.0, requires_grad=True)
        self._adam = torch.optim.Adam([self._log], lr=rule.lr)

    @property
    def alpha(self) -> float:
        return math.exp(self._log.item()) if self._tuned else self._rule.alpha

    def step(self, entropy: float) -> None:
        """Move towards the target, by what the entropy of an action number was; if one is set."""
        if self._rule.target is None or not math.isfinite(entropy):
            return
        self._adam.zero_grad()
        alpha_loss(self._log, entropy, self._rule.target).backward()
        self._adam.step()

    def state(self) -> dict[str, Tensor]:
        return {_LOG: self._log.detach(), **moments_of(self._adam)} if self._tuned else {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``state``; from the rule's own coefficient if that is empty, or if none is tuned now."""
        if not self._tuned or not state:
            return
        with torch.no_grad():
            self._log.copy_(state[_LOG])
        set_moments(self._adam, {name: x.cpu() for name, x in state.items() if name != _LOG})
