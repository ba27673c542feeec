"""The critic of off-policy algorithms: rates a chunk in a state, from the policy's own features.

It is small, and features are computed once in an update, so many optimizer steps cost little. It belongs to the learner
and not to the policy: inference never asks it, and no checkpoint of the policy holds it. Every rank trains the same
critic on all chunks of the super-batch. Its few megabytes stay on the device when the learner is offloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from algos.advantages import chunk_rewards
from vla_rl.core.records import SuperBatch
from vla_rl.core.tensor_files import load_tensors, save_tensors
from vla_rl.learner.critic_pair import CriticPair

if TYPE_CHECKING:
    from algos.critic import CriticAlgorithm

_WIDTH = 256
_STREAM = 4  # separates the draws from those of minibatches


class ChunkCritic(nn.Module):
    """An ensemble of Q(s, a), and V(s)."""

    def __init__(self, features: int, actions: int, members: int) -> None:
        super().__init__()
        self.q = nn.ModuleList(_network(features + actions) for _ in range(members))
        self.v = _network(features)

    def rate(self, state: Tensor, chunk: Tensor) -> Tensor:
        """[n, features], [n, actions] -> [n, members]."""
        inputs = torch.cat([state, chunk], dim=1)
        return torch.cat([member(inputs) for member in self.q], dim=1)

    def value(self, state: Tensor) -> Tensor:
        """[n, features] -> [n]."""
        values: Tensor = self.v(state)
        return values.squeeze(1)


class CriticTrainer:
    """A critic with its target and its optimizer."""

    def __init__(self, algorithm: CriticAlgorithm, seed: int, device: torch.device) -> None:
        self._algorithm, self._seed, self._device = algorithm, seed, device
        self._pair: CriticPair[ChunkCritic] | None = None  # made when the sizes of its inputs are known

    def train(self, batch: SuperBatch, features: np.ndarray, actions: np.ndarray) -> dict[str, float]:
        """The update's optimizer steps of the critic; returns metrics.

        ``features`` [M, F] and ``actions`` [M, K, A] (``Policy.normalized_actions``) of all chunks.
        """
        c = self._algorithm.config
        state, chunk = self._inputs(batch, features, actions)
        pair = self._made(state.shape[1], chunk.shape[1])
        critic = pair.online
        rewards = torch.from_numpy(chunk_rewards(batch.rewards, batch.num_steps)).to(state)
        following = np.arange(1, batch.num_chunks + 1)
        following[batch.offsets[1:] - 1] = -1  # after the end
        after = torch.from_numpy(following).to(self._device)
        losses = []
        for step in range(c.critic_steps):
            rng = np.random.default_rng((self._seed, batch.policy_version, step, _STREAM))
            rows = torch.from_numpy(rng.integers(batch.num_chunks, size=c.critic_batch)).to(self._device)
            with torch.no_grad():
                next_values = torch.where(after[rows] < 0, 0.0, critic.value(state[after[rows]]))
                target_q = pair.target.rate(state[rows], chunk[rows])
            q, values = critic.rate(state[rows], chunk[rows]), critic.value(state[rows])
            loss = self._algorithm.critic_loss(q, target_q, values, next_values, rewards[rows])
            losses.append(loss.item())
            if np.isfinite(losses[-1]):  # else a step would spoil the weights
                pair.step(loss, c.target_rate)
        return {"critic_loss": float(np.mean(losses))}

    @torch.no_grad()
    def rate(self, batch: SuperBatch, features: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Q_target [M, critics] and V [M] of all chunks; arguments as ``train``, which is called first."""
        state, chunk = self._inputs(batch, features, actions)
        pair = self._made(state.shape[1], chunk.shape[1])
        return pair.target.rate(state, chunk).cpu().numpy(), pair.online.value(state).cpu().numpy()

    def save(self, path: Path) -> None:
        if self._pair is not None:
            save_tensors(self._pair.state(), path)

    def load(self, path: Path) -> None:
        """Continue from ``save``. Raises UserError if the file is damaged."""
        state = load_tensors(path, self._device)
        first, value = state["online.q.0.0.weight"], state["online.v.0.weight"]
        self._made(value.shape[1], first.shape[1] - value.shape[1]).load(state)

    def _inputs(self, batch: SuperBatch, features: np.ndarray, actions: np.ndarray) -> tuple[Tensor, Tensor]:
        """State and chunk as the networks read them: features with the elapsed time, and flat actions."""
        elapsed = batch.elapsed[batch.obs_row][:, None]
        state = np.concatenate([features, elapsed], axis=1, dtype=np.float32)
        chunk = actions.reshape(batch.num_chunks, -1)
        return torch.from_numpy(state).to(self._device), torch.from_numpy(chunk).to(self._device)

    def _made(self, features: int, actions: int) -> CriticPair[ChunkCritic]:
        if self._pair is None:
            c = self._algorithm.config
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed)
                critic = ChunkCritic(features, actions, c.critics)
            self._pair = CriticPair(critic.to(self._device), c.critic_lr)
        return self._pair


def _network(inputs: int, widths: Sequence[int] = (_WIDTH, _WIDTH)) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise((inputs, *widths)):
        layers += [nn.Linear(before, after), nn.LayerNorm(after), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))
