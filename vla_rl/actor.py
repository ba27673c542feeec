"""The policy as an inference server uses it: torch on one side, plain numpy on the other."""

from __future__ import annotations

import time

import numpy as np
import torch

from vla_rl.policies import OpenVLAOFT
from vla_rl.types import ActionBatch, Observation
from vla_rl.weights import WeightReader


class PolicyActor:
    """Acts with the newest published weights; ``weights=None`` keeps those that the policy came with (version 0)."""

    def __init__(
        self, policy: OpenVLAOFT, temperature: float, weights: WeightReader | None, device: str, latency_s: float = 0.0
    ) -> None:
        """``latency_s``: simulated extra cost of one batch, slept (benchmarks of the runtime)."""
        self.policy = policy.to(device).eval()
        self.temperature = temperature
        self._latency_s = latency_s
        self._device = torch.device(device)
        self._weights = weights
        self._parameters = policy.trained_parameters()

    def refresh(self) -> int:
        if self._weights is None:
            return 0
        self._weights.refresh(self._parameters)
        return self._weights.version

    def act(self, observation: Observation, uniforms: np.ndarray, greedy: np.ndarray) -> ActionBatch:
        time.sleep(self._latency_s)
        arrays = (observation.images, observation.proprio, observation.task, uniforms, greedy)
        images, proprio, task, draws, most_likely = (torch.from_numpy(a).to(self._device) for a in arrays)
        tokens, logprobs, values = self.policy.act(images, proprio, task, draws, most_likely, self.temperature)
        tokens_np = tokens.cpu().numpy()
        return ActionBatch(
            actions=self.policy.codec.decode(tokens_np),
            tokens=tokens_np,
            logprobs=logprobs.float().cpu().numpy(),
            values=values.float().cpu().numpy(),
            version=0 if self._weights is None else self._weights.version,
        )
