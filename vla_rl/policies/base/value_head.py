"""The value head of all policies."""

import torch
from torch import Tensor, nn

_VALUE_INIT_STD = 0.01  # so that values start near 0 for any features


class ValueHead(nn.Sequential):
    """A value from features of the state and the elapsed time.

    Time is an input because returns depend on what is left of it: without it, states before a time limit that ends the
    episode are not Markov (arXiv:1712.00378). The layers are those of RL4VLA's value head (arXiv:2505.19789).
    """

    def __init__(self, inputs: int, first: int, second: int) -> None:
        reads, rates = nn.Linear(inputs, first), nn.Linear(second, 1, bias=False)
        nn.init.normal_(rates.weight, std=_VALUE_INIT_STD)
        super().__init__(reads, nn.GELU(), nn.Linear(first, second), nn.GELU(), rates)
        self.time = nn.Parameter(torch.zeros(first))  # learned from 0

    def forward(self, state: Tensor, elapsed: Tensor) -> Tensor:  # type: ignore[override]
        """[N, inputs], [N] -> [N]."""
        first, *others = self
        hidden = first(state) + elapsed.to(state.dtype).unsqueeze(-1) * self.time
        for layer in others:
            hidden = layer(hidden)
        return hidden.squeeze(-1)
