"""How far an update moves the policy: the KL divergence between its weights before and after, on some of its chunks."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from algos.losses import log_ratio, token_mask
from vla_rl.core.devices.lock import DeviceLease
from vla_rl.core.records import SuperBatch
from vla_rl.learner.forward_passes import ForwardPasses

CHUNKS = 32  # of each rank, whose probabilities are computed once more


class UpdateProbe:
    """KL(before, after) on the first chunks of the update's first optimizer step.

    Their probabilities under the weights before it come from that step's own forward pass.
    """

    def __init__(self, passes: ForwardPasses, batch: SuperBatch, condition: np.ndarray, lease: DeviceLease) -> None:
        """``condition`` [M]: under which each chunk is trained."""
        self._passes, self._batch, self._condition, self._lease = passes, batch, condition, lease
        self._parts: list[tuple[np.ndarray, bool, Tensor]] = []

    def observe(self, part: np.ndarray, padding: bool, logprobs: Tensor) -> None:
        """Keep chunks while the weights are those before the update. Call it equally often on every rank."""
        if sum(len(rows) for rows, *_ in self._parts) < CHUNKS:
            self._parts.append((part[:CHUNKS], padding, logprobs[:CHUNKS].detach()))

    @torch.no_grad()
    def sums(self, model: Any) -> dict[str, Tensor]:
        """Sum of the k3 estimate in nats, and number of actions, of this rank's chunks under the weights now."""
        found = {"update_k3": torch.zeros((), dtype=torch.float64), "update_actions": torch.zeros(())}
        for rows, padding, before in self._parts:
            with self._lease():
                after = self._passes.of_chunks(model, self._batch, rows, self._condition[rows]).logprobs
                tokens = token_mask(self._passes.tensor(self._batch.num_steps[rows] * (not padding)), *after.shape[1:])
                log_r = log_ratio(after, before, tokens, "action").double()
                found["update_k3"] = found["update_k3"] + (torch.expm1(log_r) - log_r).sum()
                found["update_actions"] = found["update_actions"] + tokens[:, :, 0].sum()
                self._passes.finish_on_device()
        return found
