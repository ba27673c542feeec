"""A critic, and the slower copy of it that aims are of."""

import copy
from collections.abc import Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from vla_rl.core.tensor_files import moments_of, set_moments

_Critic = TypeVar("_Critic", bound=nn.Module)


class CriticPair(Generic[_Critic]):
    """``online`` is trained by Adam, ``target`` follows it."""

    def __init__(self, online: _Critic, lr: float, *, fused: bool = False) -> None:
        self.online = online
        self.target = copy.deepcopy(online).requires_grad_(False)
        self._adam = torch.optim.Adam(online.parameters(), lr=lr, fused=fused)

    def step(self, loss: Tensor, target_rate: float) -> None:
        """An optimizer step; then the target moves towards the critic by this share of the distance."""
        self._adam.zero_grad()
        loss.backward()
        self._adam.step()
        with torch.no_grad():
            for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
                target.lerp_(online, target_rate)

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        parts = {
            "online": self.online.state_dict(),
            "target": self.target.state_dict(),
            "adam": moments_of(self._adam),
        }
        return {f"{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``state``; other names are left alone."""

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}

        self.online.load_state_dict(part("online."))
        self.target.load_state_dict(part("target."))
        set_moments(self._adam, part("adam."))
