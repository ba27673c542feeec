"""OpenVLA-OFT with continuous actions: a regressed mean, and a Laplace distribution around it.

OpenVLA-OFT (arXiv:2502.19645) regresses chunks of normalized actions by an L1 loss, the likelihood of a Laplace
distribution of fixed scale. Reinforcement learning samples from that distribution, as RIPT-VLA does (arXiv:2505.17016);
its scale, one for each dimension of an action, is learned here.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_rl.core.records import Array, Record
from vla_rl.policies.base.policy import Decisions, PolicyInput, PolicyOutput
from vla_rl.policies.openvla_oft.architecture import REGRESSION_BLOCKS
from vla_rl.policies.openvla_oft.trunk import OpenVLA

_SMALLEST = 2.0**-25  # half the distance of float32 uniforms: keeps samples finite
NOISE_SCALE = 0.05


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.ffn(hidden)


class RegressionHead(nn.Module):
    """OpenVLA-OFT's head, with its names, and the logarithm of the noise's scale."""

    def __init__(self, width: int, action_dim: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(width * action_dim)
        self.fc1 = nn.Linear(width * action_dim, width)
        self.mlp_resnet_blocks = nn.ModuleList(_Block(width) for _ in range(REGRESSION_BLOCKS))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, action_dim)
        self.in_float32 = False  # whether to compute the means in float32, whatever the dtype of the weights
        self.log_noise = nn.Parameter(torch.full((action_dim,), math.log(NOISE_SCALE)))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """[N, K, A * width] -> means [N, K, A] and scales [A], float32."""
        hidden = F.relu(self.fc1(self.layer_norm1(states)))
        for block in self.mlp_resnet_blocks:
            hidden = block(hidden)
        hidden = self.layer_norm2(hidden)
        if self.in_float32:
            mean = F.linear(hidden.float(), self.fc2.weight.float(), self.fc2.bias.float())
        else:
            mean = self.fc2(hidden).float()
        return mean, self.log_noise.float().exp()


class OpenVLARegression(OpenVLA):
    """See ``Policy``. A record holds the actions: float32 [N, K, A], normalized, about -1 to 1."""

    action_head: RegressionHead

    def add_head(self) -> None:
        self.action_head = RegressionHead(self.architecture.llm.width, self.architecture.action_dim)

    def forward(
        self, seen: PolicyInput, record: Mapping[str, Tensor], temperature: float, detach_value: bool = True
    ) -> PolicyOutput:
        """See ``Policy.forward``. The record's actions: float32 [N, K, A]."""
        mean, scale, state = self.distribution(seen, temperature)
        values, features = self._values(state, seen, detach_value)
        entropy = (1 + (2 * scale).log()).expand_as(mean)
        return PolicyOutput(laplace_logprobs(mean, scale, record["actions"]), entropy, values, features, mean)

    @torch.no_grad()
    def act(self, seen: PolicyInput, draws: Mapping[str, Tensor], greedy: Tensor, temperature: float) -> Decisions:
        """See ``Policy.act``. The draws' uniforms: float32 [N, K, A]; greedy rows take the means."""
        mean, scale, state = self.distribution(seen, temperature)
        sampled = sample_laplace(mean, scale, draws["uniforms"])
        actions = torch.where(greedy[:, None, None], mean, sampled)
        values, _ = self._values(state, seen, detach_value=True)
        return Decisions({"actions": actions}, laplace_logprobs(mean, scale, actions), values)

    def imitation_loss(
        self, seen: PolicyInput, actions: Array, mask: Tensor, rng: np.random.Generator, smoothing: float
    ) -> Tensor:
        """See ``Policy.imitation_loss``: the mean distance of normalized actions; the scale is not trained."""
        mean, _, _ = self.distribution(seen, 1.0)
        wanted = torch.from_numpy(self.encode(actions, rng)["actions"]).to(mean.device)
        weights = mask.unsqueeze(-1).expand_as(mean).to(mean.dtype)
        return ((mean - wanted).abs() * weights).sum() / weights.sum()

    def encode(self, actions: Array, rng: np.random.Generator) -> Record:
        return {"actions": self.codec.bounds.normalize(actions).astype(np.float32)}

    def decode(self, record: Mapping[str, Array]) -> Array:
        return self.codec.bounds.denormalize(record["actions"])

    def normalized_actions(self, record: Mapping[str, Array]) -> Array:
        return record["actions"]

    def action_limits(self, ends: Array) -> Array | None:
        """Without the limits of ``encode``, which are those of demonstrations: ``decode`` has none."""
        scale, shift = self.codec.bounds.affine()
        return (ends * np.asarray(scale) + np.asarray(shift)).astype(np.float32)

    @property
    def has_reference(self) -> bool:
        """False, also with adapters: training overwrites the head."""
        return False

    @torch.no_grad()
    def start_noise(self, scale: float) -> None:
        """Set the scale of all dimensions; learning goes on from there."""
        self.action_head.log_noise.fill_(math.log(scale))

    @property
    def whole_parts(self) -> tuple[nn.Module, ...]:
        """See ``OpenVLA.whole_parts``; RIPT-VLA trains its action head in full, too."""
        return (*super().whole_parts, self.action_head)

    def compute_head_in_float32(self, enabled: bool) -> None:
        self.action_head.in_float32 = enabled

    def distribution(self, seen: PolicyInput, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Means [N, K, A], scales [A] times the temperature, and the state [N, width].

        The state is the hidden state of the last token of the prompt. Raises as ``forward``.
        """
        states = self._states(seen, temperature)
        mean, scale = self.action_head(self._chunk(states).flatten(2))
        return mean, scale * temperature, states[:, 0]


def laplace_logprobs(mean: Tensor, scale: Tensor, actions: Tensor) -> Tensor:
    """float32 [N, K, A]: log-density of each action number. Sampler and learner both use this function."""
    return -(actions.float() - mean).abs() / scale - (2 * scale).log()


def sample_laplace(mean: Tensor, scale: Tensor, uniforms: Tensor) -> Tensor:
    """float32 [N, K, A]: where the cumulative distribution equals the uniform number (inverse transform)."""
    from_middle = uniforms.clamp(_SMALLEST, 1 - 2.0**-24) - 0.5
    return mean - scale * from_middle.sign() * torch.log1p(-2 * from_middle.abs())
