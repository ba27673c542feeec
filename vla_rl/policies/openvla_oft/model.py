"""OpenVLA and OpenVLA-OFT with discrete actions.

The action numbers are bins, the last 256 ids of the vocabulary. Log-probabilities are over these ids alone, at the
sampling temperature, as in SimpleVLA-RL (arXiv:2509.09674).
"""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_rl.core.records import Array, Record
from vla_rl.policies.base.policy import Decisions, PolicyInput, PolicyOutput
from vla_rl.policies.openvla_oft.architecture import NUM_BINS, Architecture
from vla_rl.policies.openvla_oft.tokens import sample_tokens, smoothed_cross_entropy, token_entropy, token_logprobs
from vla_rl.policies.openvla_oft.trunk import OpenVLA


class ActionHead(nn.Linear):
    """``lm_head`` with the weights of the whole vocabulary; ``forward`` computes the logits of the action ids only.

    The slice is inside ``forward``, so that wrappers which gather parameters (ZeRO-3) see the access.
    """

    def __init__(self, architecture: Architecture, in_features: int) -> None:
        super().__init__(in_features, architecture.padded_vocab_size, bias=False)
        self.first, self.last = architecture.text_vocab_size, architecture.vocab_size
        self.in_float32 = False  # whether to compute in float32, whatever the dtype of the weights
        nn.init.normal_(self.weight, std=architecture.llm.initializer_range)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., in_features] -> [..., 256]; ids descend with the action, bins ascend."""
        weight = self.weight[self.first : self.last].flip(0)
        return F.linear(hidden.float(), weight.float()) if self.in_float32 else F.linear(hidden, weight)


class OpenVLAOFT(OpenVLA):
    """See ``Policy``. A record holds the tokens of the chunk: uint8 [N, K, A], the bin of each action number."""

    lm_head: ActionHead

    def add_head(self) -> None:
        self.lm_head = ActionHead(self.architecture, self.architecture.llm.width)

    def forward(
        self, seen: PolicyInput, record: Mapping[str, Tensor], temperature: float, detach_value: bool = True
    ) -> PolicyOutput:
        """See ``Policy.forward``. The record's tokens: uint8 [N, K, A]."""
        logits, state = self.distribution(seen, temperature, record["tokens"])
        values, features = self._values(state, seen, detach_value)
        return PolicyOutput(token_logprobs(logits, record["tokens"]), token_entropy(logits), values, features)

    @torch.no_grad()
    def act(self, seen: PolicyInput, draws: Mapping[str, Tensor], greedy: Tensor, temperature: float) -> Decisions:
        """See ``Policy.act``. The draws' uniforms: float32 [N, K, A]; greedy rows take the most likely bins."""
        prefix, uniforms = self._prefix(seen, temperature), draws["uniforms"].flatten(1)
        logits: list[Tensor] = []

        def choose(states: Tensor, part: slice) -> Tensor:
            logits.append(self._logits(states, temperature))
            sampled = sample_tokens(logits[-1], uniforms[:, part])
            return torch.where(greedy[:, None], logits[-1].argmax(-1), sampled)

        tokens, state = self.decoding.generate(self.language_model, prefix, choose)
        values, _ = self._values(state, seen, detach_value=True)
        logprobs = token_logprobs(torch.cat(logits, dim=1), tokens)
        return Decisions({"tokens": self._chunk(tokens).to(torch.uint8)}, self._chunk(logprobs), values)

    def imitation_loss(
        self, seen: PolicyInput, actions: Array, mask: Tensor, rng: np.random.Generator, smoothing: float
    ) -> Tensor:
        """See ``Policy.imitation_loss``: cross-entropy with the demonstrated bins, at temperature 1."""
        tokens = torch.from_numpy(self.codec.encode(actions)).to(seen.images.device)
        logits, _ = self.distribution(seen, 1.0, tokens)
        return smoothed_cross_entropy(logits, tokens, mask, smoothing)

    def encode(self, actions: Array, rng: np.random.Generator) -> Record:
        return {"tokens": self.codec.encode(actions)}

    def decode(self, record: Mapping[str, Array]) -> Array:
        return self.codec.decode(record["tokens"])

    def normalized_actions(self, record: Mapping[str, Array]) -> Array:
        return (record["tokens"].astype(np.float32) + 0.5) / (NUM_BINS / 2) - 1

    def compute_head_in_float32(self, enabled: bool) -> None:
        self.lm_head.in_float32 = enabled

    def distribution(
        self, seen: PolicyInput, temperature: float, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits over the bins, float32 [N, K, A, 256], divided by the temperature, and the state [N, width].

        Bins ascend with the action. The state is the hidden state that predicts the first action number.

        Args:
            tokens: uint8 [N, K, A], the chunk's bins. Autoregressive decoding needs them: an action number's
                distribution depends on those before it.

        Raises as ``forward``.
        """
        states = self._states(seen, temperature, None if tokens is None else tokens.flatten(1).long())
        return self._chunk(self._logits(states, temperature)), states[:, 0]

    def _logits(self, states: Tensor, temperature: float) -> Tensor:
        """[..., width] -> float32 [..., 256]."""
        return self.lm_head(states).float() / temperature
