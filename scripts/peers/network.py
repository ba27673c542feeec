"""The policy of ``vla-rl train`` as a peer uses it: a torch module, without any other part of the runtime."""

from typing import Any

import torch
from torch import Tensor, nn

from peers.setting import Setting
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.build import build_policy


class Network(nn.Module):
    """Actor and critic in one pass. Images [N, H, W, 3] or [N, 3, H, W], numbers [N, P + 2], tokens [N, K * A]."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        policy = setting.config.policy
        self.policy: Any = build_policy(policy, setting.spec, setting.config.seed)
        self._temperature, self._detach = policy.temperature, policy.detach_value
        self._chunk = policy.chunk_size, setting.spec.action_dim

    @torch.no_grad()
    def act(self, image: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, int64; their log-probability [N], and values [N]."""
        draws, greedy = torch.rand(len(numbers), *self._chunk), torch.zeros(len(numbers), dtype=torch.bool)
        chosen = self.policy.act(_seen(image, numbers), {"uniforms": draws}, greedy, self._temperature)
        return chosen.record["tokens"].flatten(1).long(), chosen.logprobs.sum((1, 2)), chosen.values

    def rate(self, image: Tensor, numbers: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of the chunk, its entropy, and the value, [N] each, with gradients."""
        record = {"tokens": tokens.to(torch.uint8).unflatten(1, self._chunk)}
        rated = self.policy(_seen(image, numbers), record, self._temperature, self._detach)
        return rated.logprobs.sum((1, 2)), rated.entropy.sum((1, 2)), rated.values

    def distribution(self, image: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the tokens, [N, K * A, 256], and values [N], with gradients."""
        seen = _seen(image, numbers)
        logits, trunk = self.policy.distribution(seen, self._temperature)
        return logits.flatten(1, 2), self.policy._values(trunk, seen, self._detach)[0]

    @torch.no_grad()
    def value(self, image: Tensor, numbers: Tensor) -> Tensor:
        """[N], without gradients."""
        return self.distribution(image, numbers)[1]


def _seen(image: Tensor, numbers: Tensor) -> PolicyInput:
    image = image if image.shape[-1] == 3 else image.permute(0, 2, 3, 1)
    return PolicyInput(image.to(torch.uint8)[:, None], numbers[:, :-2], numbers[:, -1].long(), numbers[:, -2])
