"""A policy that can act, and nothing else. The record of a decision is its actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from torch import Tensor, nn

from vla_rl.core.records import Array, Record
from vla_rl.policies.base.policy import Policy, PolicyOutput


class EvaluatedPolicy(Policy):
    """Subclasses have ``act``, whose record is ``{"actions": ...}``: float32 [N, K, A], in physical units."""

    def set_instructions(self, instructions: Sequence[str]) -> None:
        if not instructions:
            raise ValueError("a policy needs at least one instruction")
        self.instructions = tuple(instructions)

    def decode(self, record: Mapping[str, Array]) -> Array:
        return np.asarray(record["actions"], np.float32)

    def normalized_actions(self, record: Mapping[str, Array]) -> Array:
        return self.decode(record)

    def value_parameters(self) -> Iterator[nn.Parameter]:
        return iter(())

    def forward(self, *_: Any, **__: Any) -> PolicyOutput:
        return self._refuse()

    def imitation_loss(self, *_: Any) -> Tensor:
        return self._refuse()

    def set_statistics(self, *_: Any) -> None:
        self._refuse()

    def encode(self, *_: Any) -> Record:
        return self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError(f"{type(self).__name__} has no log-probabilities: it can be evaluated only")
